"""Launches of generated code and the nodes of compiled graphs that they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic_trace import SESSION, WINDOW, SyntheticTrace

from tlk_tracking import load_annotation
from tlk_tracking.annotation.checks import check_tables
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.attribution.annotate import annotate
from tlk_tracking.attribution.fused_notes import (
    GraphNotes,
    NodeNotes,
    decode_window_notes,
    encode_window_notes,
)
from tlk_tracking.core.errors import AnnotationError


def node(name: str, *, module: str | None = None) -> NodeNotes:
    return NodeNotes(
        name=name,
        target=f"aten.{name}.default",
        original="aten.layer_norm.default",
        module=module,
        output='[[2,"s0"],"float32"]',
    )


GRAPH = GraphNotes(
    number=3,
    key="fkey",
    nodes=(node("mul", module="L['self'].layers.0"), node("relu"), node("sum", module="L['other']")),
    handles={1: (0, 1), 2: (2,)},
)


class CompiledTrace(SyntheticTrace):
    """One step (0 to 1,000 µs) with one ATen call that launches, number 0, at its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.step(5, 0, 1000)
        self.op(0, 10, 30)
        self.launch(90, 20)

    def site(self, kind: str, graph: int, handle: int, start: float, end: float) -> None:
        self.host(f"tlk::{SESSION}::{kind}::{graph}::{handle}", start, end)

    def graph(self, key: str, start: float, end: float) -> None:
        self.host(f"## Call CompiledFxGraph {key} ##", start, end)

    def annotation(self, folder: Path, *graphs: GraphNotes) -> KernelAnnotation:
        return annotate(self.write(folder), WINDOW, calls=None, graphs=graphs)


def relations(annotation: KernelAnnotation) -> list[tuple[int, str, str]]:
    """Return (launch, origin, node or "call 0") of each relation."""
    nodes = dict(
        zip(*(annotation.fused_table[name].to_pylist() for name in ("sequence", "node")), strict=True)
    )
    return [
        (row["launch"], row["origin"], nodes.get(row["sequence"], f"call {row['sequence']}"))
        for row in annotation.relation_table.to_pylist()
    ]


def fused_counts(annotation: KernelAnnotation) -> dict[str, int]:
    return {
        name.removeprefix("fused_"): count
        for name, count in annotation.manifest.notes.items()
        if name.startswith("fused_") and count
    }


def test_a_launch_at_a_call_site_computes_exactly_the_nodes_of_its_handle(tmp_path: Path) -> None:
    trace = CompiledTrace()
    trace.graph("fkey", 100, 500)
    trace.site("fused", 3, 1, 200, 210)
    trace.launch(1, 205)
    annotation = trace.annotation(tmp_path, GRAPH)
    assert relations(annotation) == [
        (0, "dispatch", "call 0"),
        (1, "inductor_kernel", "mul"),
        (1, "inductor_kernel", "relu"),
    ]
    assert fused_counts(annotation) == {"inductor_kernel": 1}


def test_a_launch_that_is_only_inside_a_graph_computes_some_of_its_nodes(tmp_path: Path) -> None:
    trace = CompiledTrace()
    trace.graph("fkey", 100, 500)
    trace.call(1, 200, name="cudaGraphLaunch")
    for start in (210, 220):
        trace.record(1, start)
    annotation = trace.annotation(tmp_path, GRAPH)
    assert relations(annotation) == [
        (0, "dispatch", "call 0"),
        *((launch, "inductor_graph", name) for launch in (1, 2) for name in ("mul", "relu", "sum")),
    ]
    assert fused_counts(annotation) == {"inductor_graph": 2}
    assert annotation.launch_table["graph_launch"].to_pylist() == [None, 0, 0]


def test_a_call_site_without_a_known_handle_is_sure_of_its_graph_only(tmp_path: Path) -> None:
    trace = CompiledTrace()
    trace.site("fused", 3, -1, 200, 210)
    trace.launch(1, 205)
    assert {origin for _, origin, _ in relations(trace.annotation(tmp_path, GRAPH))} == {
        "dispatch",
        "inductor_graph",
    }


def test_a_graph_without_notes_has_no_nodes(tmp_path: Path) -> None:
    trace = CompiledTrace()
    trace.graph("another", 100, 500)
    trace.site("fused", 4, 1, 200, 210)
    trace.launch(1, 205)
    annotation = trace.annotation(tmp_path, GRAPH)
    assert relations(annotation) == [(0, "dispatch", "call 0")]
    assert fused_counts(annotation) == {"no_provenance": 1}


def test_variants_that_are_tried_out_are_kept_apart_from_the_run_after_them(tmp_path: Path) -> None:
    trace = CompiledTrace()
    trace.site("autotune", 3, 2, 200, 300)
    for number, start in enumerate((210, 220, 230), start=1):
        trace.launch(number, start)
    annotation = trace.annotation(tmp_path, GRAPH)
    assert relations(annotation) == [(0, "dispatch", "call 0"), (3, "inductor_kernel", "sum")]
    assert fused_counts(annotation) == {"autotuning": 2, "inductor_kernel": 1}


def test_a_launch_of_an_aten_call_inside_generated_code_is_the_calls_alone(tmp_path: Path) -> None:
    trace = CompiledTrace()
    trace.graph("fkey", 100, 500)
    trace.op(1, 190, 220)
    trace.launch(1, 205)
    assert relations(trace.annotation(tmp_path, GRAPH)) == [
        (0, "dispatch", "call 0"),
        (1, "dispatch", "call 1"),
    ]


def test_nodes_are_counted_nowhere(tmp_path: Path) -> None:
    trace = CompiledTrace()
    trace.site("fused", 3, 1, 200, 210)
    trace.launch(1, 205)
    with_nodes = trace.annotation(tmp_path, GRAPH).manifest
    without = trace.annotation(tmp_path).manifest
    assert with_nodes.counts == without.counts
    assert with_nodes.gaps == without.gaps
    assert [gap.reason.value for gap in with_nodes.gaps] == ["launched_outside_dispatcher"]


def test_a_node_says_where_it_came_from(tmp_path: Path) -> None:
    trace = CompiledTrace()
    trace.graph("fkey", 200, 210)
    trace.launch(1, 205)
    nodes = trace.annotation(tmp_path, GRAPH).fused_table.to_pylist()
    common = {"graph": "fkey", "overload": "default", "original": "aten.layer_norm.default"}
    common |= {"output": '[[2,"s0"],"float32"]'}
    assert nodes == [
        {"sequence": 1, "node": "mul", "operator": "aten.mul", "inner_module": "layers.0", **common},
        {"sequence": 2, "node": "relu", "operator": "aten.relu", "inner_module": None, **common},
        {"sequence": 3, "node": "sum", "operator": "aten.sum", "inner_module": None, **common},
    ]


def _saved(folder: Path) -> KernelAnnotation:
    trace = CompiledTrace()
    trace.site("fused", 3, 1, 200, 210)
    trace.launch(1, 205)
    annotation = trace.annotation(folder, GRAPH)
    annotation.save(folder / "saved")
    return annotation


def test_saving_and_loading_keeps_the_nodes(tmp_path: Path) -> None:
    annotation = _saved(tmp_path)
    loaded = load_annotation(tmp_path / "saved")
    assert loaded.fused_table.equals(annotation.fused_table)
    assert loaded.relation_table.equals(annotation.relation_table)
    assert loaded.fused_nodes["node"].tolist() == ["mul", "relu"]


def test_without_nodes_there_is_no_file_of_nodes(tmp_path: Path) -> None:
    CompiledTrace().annotation(tmp_path, GRAPH).save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "fused_nodes.parquet").exists()
    assert len(load_annotation(tmp_path / "saved").fused_table) == 0


def _damaged(annotation: KernelAnnotation, **tables: pa.Table) -> AnnotationError:
    given: dict[str, Any] = {
        "calls": annotation.call_table,
        "launches": annotation.launch_table,
        "relations": annotation.relation_table,
        "fused": annotation.fused_table,
    }
    with pytest.raises(AnnotationError) as caught:
        check_tables(annotation.manifest, **(given | tables))
    return caught.value


def test_a_relation_to_no_node_is_refused(tmp_path: Path) -> None:
    annotation = _saved(tmp_path)
    error = _damaged(annotation, fused=annotation.fused_table.slice(0, 1))
    assert (error.file, error.row, error.field) == ("launch_relations.parquet", 2, "sequence")


def test_a_node_with_the_number_of_a_call_is_refused(tmp_path: Path) -> None:
    annotation = _saved(tmp_path)
    numbers = pa.array([0, 2], pa.int64())
    error = _damaged(
        annotation, fused=annotation.fused_table.set_column(0, annotation.fused_table.field(0), numbers)
    )
    assert (error.file, error.row, error.field) == ("fused_nodes.parquet", 0, "sequence")


def test_the_files_schema_is_closed(tmp_path: Path) -> None:
    _saved(tmp_path)
    path = tmp_path / "saved" / "fused_nodes.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["node"]), path)
    with pytest.raises(AnnotationError):
        load_annotation(tmp_path / "saved")


def test_notes_of_a_window_come_back_as_they_were() -> None:
    assert decode_window_notes(encode_window_notes([GRAPH, GRAPH])) == (GRAPH, GRAPH)

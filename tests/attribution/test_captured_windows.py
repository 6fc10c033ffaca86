"""Windows of small programs as an H200 recorded them (tests/cuda/test_captured_traces.py), read without a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
from captured_window import annotate_captured
from paths import CAPTURED
from plain_profiler import read_records, work_of
from recorded_window import work_of_launches

from tlk_tracking import KernelAnnotation
from tlk_tracking.analysis.metrics import metrics
from tlk_tracking.annotation.kernel_annotation import module_table
from tlk_tracking.core.gaps import Bound
from tlk_tracking.core.records import Phase
from tlk_tracking.report.annotation_report import render_report

NAMES = sorted(path.name.removesuffix(".window.json") for path in CAPTURED.glob("*.window.json"))

Place = tuple[str | None, str | None]


def read(name: str) -> KernelAnnotation:
    return annotate_captured(CAPTURED, name)


def places(annotation: KernelAnnotation, *, gap: str | None = None) -> dict[Place, int]:
    """Count launches by phase and module, those of one gap only."""
    rows = annotation.launch_table.select(["phase", "module", "gap"]).to_pylist()
    counted = Counter((row["phase"], row["module"]) for row in rows if gap is None or row["gap"] == gap)
    return dict(sorted(counted.items(), key=str))


def gaps(annotation: KernelAnnotation) -> dict[str, int]:
    return {gap.reason.value: gap.count for gap in annotation.manifest.gaps}


@pytest.mark.parametrize("name", NAMES)
def test_each_device_record_is_one_launch(name: str) -> None:
    plain = work_of(read_records(CAPTURED / f"{name}.trace.json.gz"))
    assert work_of_launches(read(name)) == plain


@pytest.mark.parametrize("name", [name for name in NAMES if name != "foreign_thread"])
def test_kinetos_own_link_agrees(name: str) -> None:
    annotation = read(name)
    audit = annotation.manifest.audit
    assert (audit.agreed, audit.disagreed, audit.not_audited) == (len(annotation.launch_table), 0, 0)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "foreign_thread"])
def test_each_launch_has_a_phase(name: str) -> None:
    assert read(name).launch_table["phase"].null_count == 0


@pytest.mark.parametrize(
    "name", ["autocast", "checkpointed", "deep_queue", "modules", "streams", "transfers"]
)
def test_each_launch_of_an_eager_program_has_its_call(name: str) -> None:
    annotation = read(name)
    assert gaps(annotation) == {}
    assert annotation.manifest.counts["unattributed"].value == 0
    assert not annotation.manifest.lower_bound


def test_shared_blocks_are_told_apart_by_their_calls_in_forward_and_backward() -> None:
    launches = read("modules").launches
    found = (
        launches[launches["module"] == "block.mlp.1"].groupby(["phase", "module_call"], observed=True).size()
    )
    assert found.to_dict() == {
        ("backward", 0): 1,
        ("backward", 1): 1,
        ("forward", 0): 1,
        ("forward", 1): 1,
    }


def test_a_module_has_the_launches_of_the_modules_inside_it() -> None:
    annotation = read("modules")
    launches = annotation.launches
    inside = launches["module"].astype(str).str.match(r"block(\.|$)").sum()
    rows = {row["module"]: row for row in module_table(annotation).to_pylist()}
    assert rows["block"]["launches_per_step_with_children"] == inside
    assert rows[""]["launches_per_step_with_children"] == launches["module"].notna().sum()


def test_what_checkpoints_compute_again_is_in_backward_with_numbers_of_its_own() -> None:
    launches = read("checkpointed").launches
    gelu = launches[launches["module"] == "block.mlp.1"]
    assert gelu.groupby(["phase", "module_call"], observed=True).size().to_dict() == {
        ("backward", 0): 1,  # the first forward's own backward, under the checkpoint that fills its graph
        ("backward", 2): 2,  # computed again by the reentrant checkpoint, and its backward
        ("backward", 3): 1,  # computed again by the other
        ("forward", 0): 1,
        ("forward", 1): 1,
    }


def test_triton_kernels_in_forward_and_in_a_custom_backward_have_their_module() -> None:
    annotation = read("triton_kernel")
    assert gaps(annotation) == {"launched_outside_dispatcher": 2}
    assert places(annotation, gap="launched_outside_dispatcher") == {
        ("backward", "1"): 1,
        ("forward", "1"): 1,
    }


def test_a_replay_in_a_module_has_that_module_and_one_outside_has_none() -> None:
    annotation = read("graph_replay")
    rows = annotation.launch_table.select(["graph_launch", "module", "phase"]).to_pylist()
    replays = Counter((row["graph_launch"], row["module"], row["phase"]) for row in rows)
    assert {key: count for key, count in replays.items() if key[0] is not None} == {
        (0, "replaying", "forward"): 3,
        (1, None, "forward"): 3,
    }


def test_each_replay_of_a_compiled_module_has_its_phase_and_its_call() -> None:
    rows = read("reduce_overhead").launches
    replayed = rows[rows["graph_launch"].notna()]
    found = replayed.groupby(["graph_launch", "phase", "module", "module_call"], observed=True).size()
    assert found.to_dict() == {
        (0, "forward", "block._orig_mod", 0): 9,
        (1, "forward", "block._orig_mod", 1): 10,
        (2, "backward", "block._orig_mod", 1): 10,
        (3, "backward", "block._orig_mod", 0): 9,
    }


def test_generated_code_has_the_module_that_was_compiled() -> None:
    assert places(read("compiled"), gap="launched_outside_dispatcher") == {
        ("backward", "block._orig_mod"): 7,
        ("forward", "block._orig_mod"): 6,
    }


def test_a_users_thread_has_a_step_and_nothing_else() -> None:
    annotation = read("foreign_thread")
    foreign = annotation.launches[annotation.launches["gap"] == "foreign_thread"]
    assert foreign[["step", "phase", "module"]].astype(object).where(
        foreign.notna(), None
    ).values.tolist() == [[3, None, None]]


def test_waiting_streams_keep_their_launches_apart() -> None:
    launches = read("streams").launches
    assert sorted(Counter(launches["stream"].tolist()).values()) == [2, 2]


def test_kernels_under_a_deep_queue_start_long_after_their_call_and_keep_it() -> None:
    annotation = read("deep_queue")
    last = annotation.launches.tail(10)
    called = last["start_ns"] - last["launch_latency_ns"]
    assert (last["start_ns"].iloc[:-1].to_numpy() > called.iloc[1:].to_numpy()).all()
    assert len(annotation.relation_table) == len(annotation.launch_table)


def test_transfers_have_their_bytes() -> None:
    launches = read("transfers").launches
    copies = launches[launches["kind"] == "memcpy"]
    assert {(str(row.launch_name), int(row.bytes)) for row in copies.itertuples()} == {
        ("Memcpy HtoD (Pinned -> Device)", 1 << 16),
        ("Memcpy HtoD (Pageable -> Device)", 1 << 16),
        ("Memcpy DtoH (Device -> Pinned)", 1 << 16),
        ("Memcpy DtoH (Device -> Pageable)", 1 << 16),
    }


def test_a_set_of_no_bytes_bounds_nothing() -> None:
    annotation = read("autocast")
    assert annotation.manifest.counts["launches"].bound.value == "exact"


@pytest.mark.parametrize("name", ["compiled", "graph_replay", "reduce_overhead", "triton_kernel"])
def test_numbers_by_phase_are_exact_where_each_launch_has_a_phase(name: str) -> None:
    annotation = read(name)
    found = {metric.name: metric for metric in metrics(annotation)}
    by_phase = [found[f"launches_{phase.value}"] for phase in Phase]
    assert {metric.bound for metric in by_phase} == {Bound.EXACT}
    assert sum(metric.value for metric in by_phase) == found["launches"].value
    assert found["attributed_launches"].bound is Bound.LOWER


def test_a_launch_without_a_phase_makes_the_numbers_by_phase_lower_bounds() -> None:
    found = {metric.name: metric for metric in metrics(read("foreign_thread"))}
    assert {found[f"launches_{phase.value}"].bound for phase in Phase} == {Bound.LOWER}


def test_the_report_shows_modules_with_the_modules_inside_them() -> None:
    page = render_report(read("modules"))
    assert "launches with children" in page
    assert "(the model itself)" in page


def origins(annotation: KernelAnnotation, *, gap: str) -> dict[int, set[str]]:
    """Return for each launch with this gap what its relations rest on."""
    rows = annotation.launch_table.select(["launch", "gap"]).to_pylist()
    found: dict[int, set[str]] = {row["launch"]: set() for row in rows if row["gap"] == gap}
    for row in annotation.relation_table.to_pylist():
        if row["launch"] in found:
            found[row["launch"]].add(row["origin"])
    return found


def test_each_launch_of_generated_code_computes_the_nodes_of_its_call_site() -> None:
    annotation = read("compiled")
    found = origins(annotation, gap="launched_outside_dispatcher")
    assert set(map(frozenset, found.values())) == {frozenset({"inductor_kernel"})}
    nodes = annotation.relations.merge(annotation.fused_nodes, on="sequence").groupby("launch").size()
    assert len(nodes) == len(found)
    assert nodes.max() > 2


def test_each_record_of_a_replayed_compiled_graph_is_related_to_the_graph() -> None:
    found = origins(read("reduce_overhead"), gap="graph_replay")
    assert set(map(frozenset, found.values())) == {frozenset({"inductor_graph"})}

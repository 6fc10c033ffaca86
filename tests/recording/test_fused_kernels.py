"""Real compilations by Inductor, on the CPU: few and small, since each takes seconds."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tlk_tracking.attribution.fused_notes import GraphNotes, decode_window_notes, encode_notes
from tlk_tracking.recording import inductor_private
from tlk_tracking.recording.fused_kernels import FusedKernels, _call_sites

# Half a minute of compiling on two idle cores, several on busy ones.
pytestmark = pytest.mark.timeout(480)

SESSION = "c0ffee00"

# Trains a small compiled model, in a process of its own, so that Inductor's cache is first cold and then warm.
PROGRAM = """
import json, sys, torch
from torch import nn
from torch._inductor import config
from torch._inductor.output_code import CompiledFxGraph
from torch.profiler import ProfilerActivity, profile
from tlk_tracking.recording.fused_kernels import FusedKernels
from tlk_tracking.attribution.fused_notes import encode_window_notes

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.layer(x) * 2).sigmoid()

def private():
    return [CompiledFxGraph.__init__, CompiledFxGraph.post_compile, config.trace.provenance_tracking_level,
            torch.compiler.config.cache_key_tag]

before = private()
kernels = FusedKernels()
kernels.install()
step = torch.compile(Block())
with config.patch({"cpp_cache_precompile_headers": False}):  # two small kernels are quicker without
    step(torch.ones(4, 8)).sum().backward()
with profile(activities=[ProfilerActivity.CPU]) as session:
    kernels.attach("c0ffee00")
    step(torch.ones(4, 8)).sum().backward()
    kernels.detach()
    step(torch.ones(4, 8)).sum().backward()
session.export_chrome_trace(sys.argv[1])
notes = encode_window_notes(kernels.notes()).decode()
kernels.remove()
print(json.dumps({
    "fault": repr(kernels.fault),
    "hits": torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"],
    "notes": notes,
    "as_before": private() == before,
    "proxies_left": sum(type(v).__name__ == "_LaunchProxy" for g in kernels._graphs for v in g.names.values()),
}))
"""


@dataclass(frozen=True)
class Compiled:
    """What one run of PROGRAM said, and the ranges in its trace; `cache` is Inductor's, warm by now."""

    cache: Path
    said: dict[str, Any]
    notes: tuple[GraphNotes, ...]
    ranges: list[str]


def run_program(folder: Path, cache: Path) -> Compiled:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", PROGRAM, str(folder / "trace.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return Compiled(
        cache=cache,
        said=said,
        notes=decode_window_notes(said["notes"].encode()),
        ranges=[event["name"] for event in events if event.get("name", "").startswith("tlk::")],
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("compiled")
    return run_program(folder, folder / "cache")


def targets(graph: GraphNotes, handle: int) -> set[str]:
    return {graph.nodes[place].target for place in graph.handles[handle]}


def test_a_kernels_nodes_are_those_of_its_call_site(compiled: Compiled) -> None:
    forward, backward = compiled.notes
    assert {frozenset(targets(forward, handle)) for handle in forward.handles} == {
        frozenset({"aten.addmm.default"}),
        frozenset({"aten.mul.Tensor", "aten.relu.default", "aten.sigmoid.default", "aten.le.Scalar"}),
    }
    assert any("aten.where.self" in targets(backward, handle) for handle in backward.handles)


def test_a_node_knows_its_module_inside_the_compiled_one_in_forward_and_backward(compiled: Compiled) -> None:
    for graph in compiled.notes:
        assert {node.module for node in graph.nodes if "mm" in node.target} == {"L['self'].layer"}


def test_each_launch_of_generated_code_has_a_range_of_its_call_site(compiled: Compiled) -> None:
    generated = {
        (graph.number, handle)
        for graph in compiled.notes
        for handle in graph.handles
        if not any(
            "mm" in target for target in targets(graph, handle)
        )  # those are called through the dispatcher
    }
    assert sorted(compiled.ranges) == sorted(f"tlk::{SESSION}::fused::{g}::{h}" for g, h in generated)


def test_a_graph_has_the_name_that_a_trace_gives_it(compiled: Compiled) -> None:
    assert all(graph.key is not None and len(graph.key) > 20 for graph in compiled.notes)
    assert len({graph.key for graph in compiled.notes}) == 2


def test_afterwards_inductor_is_as_it_was(compiled: Compiled) -> None:
    assert compiled.said["fault"] == "None"
    assert compiled.said["as_before"]
    assert compiled.said["proxies_left"] == 0


def test_a_cache_hit_in_a_new_process_has_its_notes_and_its_ranges(
    compiled: Compiled, tmp_path: Path
) -> None:
    again = run_program(tmp_path, compiled.cache)
    assert (compiled.said["hits"], again.said["hits"]) == (0, 2)
    assert again.notes == compiled.notes
    assert sorted(again.ranges) == sorted(compiled.ranges)


SOURCE = """
def call(self, args):
    # [Provenance debug handles] triton_a:1
    triton_a.run(x, stream=stream0)
    # [Provenance debug handles] extern_kernels.mm:2
    extern_kernels.mm(
        reinterpret_tensor(x), out=y
    )
    # [Provenance debug handles] triton_a:3
    stream0 = get_raw_stream(0)
    triton_a.run(y, stream=stream0)
    # [Provenance debug handles] cpp_b:4
    cpp_b(x)
"""


def test_call_sites_are_found_by_line_and_launchers_by_their_outermost_call() -> None:
    sites, launchers = _call_sites(SOURCE)
    assert sites == [(3, 1), (5, 2), (9, 3), (12, 4)]
    assert launchers == {"triton_a", "cpp_b"}


class _FakeKernel:
    """A generated Triton kernel: variants that it has, and those that are ready to be launched."""

    def __init__(self, *, variants: int, launchers: int) -> None:
        self.configs = list(range(variants))
        self.launchers = list(range(launchers))


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (_FakeKernel(variants=2, launchers=0), True),
        (_FakeKernel(variants=2, launchers=2), True),
        (_FakeKernel(variants=2, launchers=1), False),
        (_FakeKernel(variants=1, launchers=0), False),
        (print, False),
    ],
)
def test_a_run_that_tries_variants_first_is_told_apart(kernel: Any, expected: bool) -> None:
    assert inductor_private.will_autotune(kernel) is expected


def test_an_error_of_ours_fails_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: torch.fx.GraphModule) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tlk_tracking.recording.fused_kernels._describe", broken)
    kernels = FusedKernels()
    kernels._note(object(), torch.fx.GraphModule({}, torch.fx.Graph()))
    assert isinstance(kernels.fault, ZeroDivisionError)
    assert kernels.notes() == ()


def test_an_inductor_without_provenance_is_left_as_it_is_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    undone: list[str] = []

    def missing(**_: object) -> inductor_private.Undo:
        raise AttributeError("no post_compile")

    monkeypatch.setattr(
        "tlk_tracking.recording.fused_kernels.turn_provenance_on", lambda: lambda: undone.append("level")
    )
    monkeypatch.setattr("tlk_tracking.recording.fused_kernels.watch_graphs", missing)
    with caplog.at_level("WARNING"), FusedKernels() as kernels:
        kernels.attach(SESSION)
    assert undone == ["level"]
    assert [record.message for record in caplog.records] == [
        "this Inductor keeps no provenance (no post_compile): compiled code stays without nodes"
    ]
    assert kernels.fault is None


def test_graphs_that_are_gone_are_forgotten() -> None:
    class Graph:
        """Stands for Inductor's object of a compiled graph."""

        current_callable = None

    kernels = FusedKernels()
    first, second = Graph(), Graph()
    for graph in (first, second):
        setattr(
            graph, inductor_private.NOTES, encode_notes(GraphNotes(number=0, key=None, nodes=(), handles={}))
        )
        kernels._register(graph)
    del first, graph
    gc.collect()
    kernels.attach(SESSION)
    kernels.detach()
    assert [graph.number for graph in kernels._graphs] == [1]

"""Launches that no ATen call made: generated code, hand-written kernels, graphs, other threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plain_profiler import profiled, work_of
from recorded_window import recorded, work_of_launches
from torch import nn

from tlk_tracking import KernelAnnotation, record_kernels
from tlk_tracking.recording.fused_kernels import FusedKernels

Check = Callable[[str, str, object, object], None]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gaps(annotation: KernelAnnotation) -> dict[str, int]:
    return {gap.reason.value: gap.count for gap in annotation.manifest.gaps}


def test_a_hand_written_triton_kernel(check: Check) -> None:
    pytest.importorskip("triton")
    from triton_kernel import double_in_place

    x = torch.ones(4096, device="cuda")

    def program() -> None:
        x.add_(1)
        double_in_place(x)
        x.sub_(1)

    annotation = recorded(program)
    assert work_of_launches(annotation) == work_of(profiled(program))
    check(
        "a hand-written Triton kernel",
        "an addition, the kernel, a subtraction; from the program",
        {"launches": 3, "attributed": 2, "gaps": {"launched_outside_dispatcher": 1}},
        {
            "launches": annotation.manifest.counts["launches"].value,
            "attributed": annotation.manifest.counts["attributed"].value,
            "gaps": gaps(annotation),
        },
    )


def test_a_kernel_of_another_library(check: Check) -> None:
    cupy = pytest.importorskip("cupy")
    kernel = cupy.RawKernel('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }', "twice")
    x = torch.ones(64, device="cuda")

    class Foreign(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            kernel((1,), (64,), (cupy.asarray(x),))

    model = nn.Sequential(Foreign())

    def program() -> None:
        x.add_(1)
        model(x)

    program()
    with record_kernels(model=model) as recording:
        program()
    annotation = recording.annotation
    launch = annotation.launches[annotation.launches["gap"] == "launched_outside_dispatcher"].iloc[0]
    check(
        "a kernel of another library",
        "an addition, then a CuPy RawKernel; from the program",
        {
            "launches": 2,
            "attributed": 1,
            "gaps": {"launched_outside_dispatcher": 1},
            "its place": ("forward", "0", 0),
        },
        {
            "launches": annotation.manifest.counts["launches"].value,
            "attributed": annotation.manifest.counts["attributed"].value,
            "gaps": gaps(annotation),
            "its place": (launch["phase"], launch["module"], launch["step"]),
        },
    )
    assert float(x[0]) == float(x[-1])


def test_a_thread_of_the_user(check: Check) -> None:
    x, y = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")

    def program() -> None:
        thread = threading.Thread(target=lambda: y.add_(1))
        thread.start()
        x.add_(1)
        thread.join()

    annotation = recorded(program)
    check(
        "a thread of the user",
        "an addition on the main thread and one on a thread of its own; from the program",
        {"launches": 2, "attributed": 1, "gaps": {"foreign_thread": 1}},
        {
            "launches": annotation.manifest.counts["launches"].value,
            "attributed": annotation.manifest.counts["attributed"].value,
            "gaps": gaps(annotation),
        },
    )


def test_replays_of_a_graph(check: Check) -> None:
    x = torch.ones(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (x * 2 + 1).relu()

    def program() -> None:
        graph.replay()
        x.add_(1)
        graph.replay()

    annotation = recorded(program)
    assert work_of_launches(annotation) == work_of(profiled(program))
    launches = annotation.launches
    replayed = launches[launches["gap"] == "graph_replay"]
    check(
        "replays of a CUDA graph",
        "a graph of 3 kernels, replayed twice, an addition between; from the program",
        {"launches": 7, "attributed": 1, "records of each replay": [3, 3]},
        {
            "launches": annotation.manifest.counts["launches"].value,
            "attributed": annotation.manifest.counts["attributed"].value,
            "records of each replay": sorted(Counter(replayed["runtime_correlation"].tolist()).values()),
        },
    )


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_stays_compiled(mode: str, fresh_compiler: None, check: Check) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
    compiled = torch.compile(model, mode=mode)
    x = torch.randn(32, 64, device="cuda")

    def program() -> None:
        model.zero_grad()
        compiled(x).square().mean().backward()

    for _ in range(4):  # graphs are captured in the first calls
        program()
    graphs = dict(torch._dynamo.utils.counters["stats"])
    annotation = recorded(program)
    plain = profiled(program)
    check(
        f"a compiled model, mode={mode}",
        "an MLP, forward and backward, compiled before the window; plain profiler",
        {"launches": len(plain), "compiled again": False, "same launches": True},
        {
            "launches": annotation.manifest.counts["launches"].value,
            "compiled again": dict(torch._dynamo.utils.counters["stats"]) != graphs,
            "same launches": work_of_launches(annotation) == work_of(plain),
        },
    )
    reason = "launched_outside_dispatcher" if mode == "default" else "graph_replay"
    assert gaps(annotation)[reason] > 0


def test_a_custom_function_that_launches_in_backward(check: Check) -> None:
    pytest.importorskip("triton")
    from triton_kernel import double_in_place

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # fixed arity
            mine = grad.clone()
            double_in_place(mine)
            return mine

    x = torch.ones(4096, device="cuda", requires_grad=True)

    def program() -> None:
        torch.autograd.grad(Doubled.apply(x).sum(), x)

    annotation = recorded(program)
    assert work_of_launches(annotation) == work_of(profiled(program))
    check(
        "a Triton kernel in a custom backward",
        "on autograd's own thread; from the program",
        {"launched_outside_dispatcher": 1},
        gaps(annotation),
    )


def _origins(annotation: KernelAnnotation) -> dict[int, set[str]]:
    """Return for each launch what its relations rest on."""
    found: dict[int, set[str]] = {}
    for row in annotation.relation_table.to_pylist():
        found.setdefault(row["launch"], set()).add(row["origin"])
    return found


def _computes_what_its_name_says(annotation: KernelAnnotation, launch: int) -> bool:
    """Inductor puts the ATen operators that a kernel computes into its name: a second opinion on the join."""
    relations = annotation.relations
    nodes = annotation.fused_nodes.set_index("sequence")
    originals = {
        str(nodes.loc[sequence, "original"]).removeprefix("aten.").partition(".")[0]
        for sequence in relations[relations["launch"] == launch]["sequence"]
    }
    name = str(annotation.launches["launch_name"].iloc[launch])
    return any(original in name for original in originals)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x)).tanh()


@pytest.mark.parametrize("first_call", ["before the window", "in the window"])
def test_launches_of_compiled_code_are_related_to_their_nodes(
    first_call: str, fresh_compiler: None, check: Check
) -> None:
    model = nn.Sequential(Residual(), Residual()).cuda()
    x = torch.randn(32, 64, device="cuda")
    with FusedKernels() as kernels:
        compiled = torch.compile(model)

        def program() -> None:
            model.zero_grad()
            compiled(x).square().mean().backward()

        if first_call == "before the window":
            program()
            program()
        with record_kernels(model=model, fused=kernels) as recording:
            program()
        if first_call == "in the window":
            program()
        plain = profiled(program)
    annotation = recording.annotation
    origins = _origins(annotation)
    launches = annotation.launches
    generated = launches[launches["launch_name"].astype(str).str.startswith("triton_")]
    related = [launch for launch in generated["launch"] if origins.get(launch) == {"inductor_kernel"}]
    notes = annotation.manifest.notes
    check(
        f"many ATen nodes, one fused launch: compiled {first_call}",
        "two residual blocks, forward and backward; plain profiler, and the operators in Inductor's kernel names",
        {
            "related launches": sum(record.work.name.startswith("triton_") for record in plain),
            "of another name": 0,
            "one call and nodes": 0,
            "some with 2 and more nodes": True,
        },
        {
            "related launches": len(related),
            "of another name": sum(not _computes_what_its_name_says(annotation, one) for one in related),
            "one call and nodes": sum(len(found) > 1 for found in origins.values()),
            "some with 2 and more nodes": bool((annotation.relations["launch"].value_counts() >= 2).any()),
        },
    )
    assert notes["fused_no_provenance"] == 0
    if first_call == "before the window":
        assert len(generated) == len(related)


def test_replays_of_compiled_graphs_are_related_to_their_graph(fresh_compiler: None, check: Check) -> None:
    model = Residual().cuda()
    x = torch.randn(32, 64, device="cuda")
    with FusedKernels() as kernels:
        compiled = torch.compile(model, mode="reduce-overhead")

        def program() -> None:
            model.zero_grad()
            compiled(x).square().mean().backward()

        for _ in range(6):
            program()
        with record_kernels(model=model, fused=kernels) as recording:
            program()
    annotation = recording.annotation
    replayed = annotation.launches[annotation.launches["graph_launch"].notna()]
    origins = _origins(annotation)
    check(
        "mode=reduce-overhead: replays",
        "a residual block, forward and backward; every replayed record",
        {"graph launches": 2, "related": {"inductor_graph"}, "phases": ["backward", "forward"]},
        {
            "graph launches": replayed["graph_launch"].nunique(),
            "related": set().union(*(origins.get(launch, set()) for launch in replayed["launch"])),
            "phases": sorted(str(phase) for phase in replayed["phase"].dropna().unique()),
        },
    )

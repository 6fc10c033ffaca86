"""Make the raw windows of tests/data/captured: small programs with modules, each seen by a plain profiler too."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_window import capture
from plain_profiler import profiled, work_of
from recorded_window import work_of_launches
from torch import Tensor, nn

from tlk_tracking.recording.fused_kernels import FusedKernels

MAX_BYTES = 100_000


@dataclass
class Program:
    """What one capture runs; `run` is called several times before it is recorded."""

    run: Callable[[], object]
    model: nn.Module | None = None
    before: int = 2
    fused: FusedKernels | None = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * self.mlp(self.norm(x))


class Net(nn.Module):
    """One block is called twice, with a keyword; a loss outside of modules follows."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.block(x, scale=0.5), scale=2.0))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from triton_kernel import double_in_place

        doubled = x.clone()
        double_in_place(doubled)
        return doubled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # fixed arity
        from triton_kernel import double_in_place

        doubled = grad.clone()
        double_in_place(doubled)
        return doubled


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)


class Replaying(nn.Module):
    """Its forward replays a graph of three kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.cuda.CUDAGraph()
        self.register_buffer("x", torch.ones(1024, device="cuda"))
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.y = (self.x * 2 + 1).relu()

    def forward(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        self.graph.replay()
        return self.y


def step(model: nn.Module, loss_of: Callable[[], Tensor], **arguments: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), **arguments)

    def run() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return run


def modules() -> Program:
    model = Net().cuda()
    x = torch.randn(32, 64, device="cuda")
    return Program(run=step(model, lambda: model(x).square().mean()), model=model)


def autocast() -> Program:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)).cuda()
    x = torch.randn(32, 256, device="cuda")

    def loss() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(x).float().sum()

    return Program(run=step(model, loss, fused=True), model=model)


def checkpointed() -> Program:
    from torch.utils.checkpoint import checkpoint

    model = Net().cuda()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)

    def loss() -> Tensor:
        once = checkpoint(lambda t: model.block(t, scale=1.0), x, use_reentrant=False)
        twice = checkpoint(lambda t: model.block(t, scale=2.0), once, use_reentrant=True)
        return model.head(twice).sum()

    return Program(run=lambda: loss().backward(), model=model)


def streams() -> Program:
    a, b = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    side = torch.cuda.Stream()

    def run() -> None:
        main = torch.cuda.current_stream()
        a.add_(1)
        with torch.cuda.stream(side):
            side.wait_stream(main)
            b.add_(a).mul_(2)
        main.wait_stream(side)
        a.mul_(b)

    return Program(run=run)


def deep_queue() -> Program:
    big, small = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), torch.zeros(64, device="cuda")

    def run() -> None:
        for _ in range(8):
            big @ big
        for _ in range(10):
            small.add_(1)

    return Program(run=run)


def foreign_thread() -> Program:
    x, y = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")

    def run() -> None:
        thread = threading.Thread(target=lambda: y.add_(1))
        thread.start()
        thread.join()
        x.add_(1)

    return Program(run=run)


def transfers() -> Program:
    device = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    pinned, pageable = (
        torch.zeros(1 << 16, dtype=torch.uint8).pin_memory(),
        torch.zeros(1 << 16, dtype=torch.uint8),
    )
    large = torch.ones(1 << 26, device="cuda")

    def run() -> None:
        device.copy_(pinned, non_blocking=True)
        device.copy_(pageable)
        pinned.copy_(device, non_blocking=True)
        pageable.copy_(device)
        large.sum()

    return Program(run=run)


def triton_kernel() -> Program:
    model = nn.Sequential(nn.Linear(64, 64), Doubling()).cuda()
    x = torch.randn(32, 64, device="cuda")
    return Program(run=step(model, lambda: model(x).sum()), model=model)


def graph_replay() -> Program:
    model = nn.ModuleDict({"replaying": Replaying()})
    x = torch.ones(1024, device="cuda")

    def run() -> None:
        model["replaying"](x).add(1)
        model["replaying"].graph.replay()

    return Program(run=run, model=model)


def compiled(mode: str) -> Callable[[], Program]:
    def make() -> Program:
        fused = FusedKernels()
        fused.install()
        model = Net().cuda()
        model.block = torch.compile(model.block, mode=mode)
        x = torch.randn(32, 64, device="cuda")
        return Program(run=step(model, lambda: model(x).square().mean()), model=model, before=5, fused=fused)

    return make


PROGRAMS: dict[str, Callable[[], Program]] = {
    "modules": modules,
    "autocast": autocast,
    "checkpointed": checkpointed,
    "streams": streams,
    "deep_queue": deep_queue,
    "foreign_thread": foreign_thread,
    "transfers": transfers,
    "triton_kernel": triton_kernel,
    "graph_replay": graph_replay,
    "compiled": compiled("default"),
    "reduce_overhead": compiled("reduce-overhead"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_captured_window_has_what_a_plain_profiler_sees(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = PROGRAMS[name]()
    for _ in range(program.before):
        program.run()
    torch.cuda.synchronize()
    folder = Path(os.environ.get("TLK_TRACES", tmp_path))
    try:
        annotation = capture(
            folder, name, lambda recorder: program.run(), model=program.model, fused=program.fused
        )
    finally:
        if program.fused is not None:
            program.fused.remove()
    assert work_of_launches(annotation) == work_of(profiled(program.run))
    assert (folder / f"{name}.trace.json.gz").stat().st_size < MAX_BYTES
    torch._dynamo.reset()

"""A fit with windows computes bit for bit what it computes without them, whatever the model is made of."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_fits import COMPLETE, Telemetry, batches, fit
from paths import SUPPORT
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tlk_tracking.callbacks import KernelTelemetry
from tlk_tracking.core.gaps import GapReason
from tlk_tracking.delivery import carriers
from tlk_tracking.delivery.outbox import Outbox
from tlk_tracking.delivery.worker import WindowWorker
from tlk_tracking.tracking.tracking_uri import Destination

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    # torch's own, when Dynamo looks at tensors and Inductor is loaded.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

Layers = Callable[[nn.Module, Tensor], Tensor]


class _Theirs(TorchDispatchMode):
    """A mode of the user's own, which counts."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Theirs.calls += 1
        return func(*args, **(kwargs or {}))


class _Named(Tensor):
    """A subclass with nothing of its own."""


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        return 3 * values**2 * gradients[0]


def _plain(layers: nn.Module, values: Tensor) -> Tensor:
    result: Tensor = layers(values)
    return result


def _in_their_mode(layers: nn.Module, values: Tensor) -> Tensor:
    with _Theirs():
        return _plain(layers, values)


def _in_their_profiler(layers: nn.Module, values: Tensor) -> Tensor:
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        result = _plain(layers, values)
    assert "aten::addmm" in {event.name for event in theirs.events()}
    return result


def _cond(layers: nn.Module, values: Tensor) -> Tensor:
    def positive(inputs: Tensor) -> Tensor:
        return inputs.sin()

    def negative(inputs: Tensor) -> Tensor:
        return inputs.cos()

    hidden = _plain(layers, values)
    result: Tensor = torch.cond(hidden.sum() > 0, positive, negative, (hidden,))
    return result


MODELS: dict[str, Layers] = {
    "plain": _plain,
    "checkpoint, reentrant": lambda layers, values: checkpoint(
        layers, values.requires_grad_(), use_reentrant=True
    ),
    "checkpoint": lambda layers, values: checkpoint(layers, values, use_reentrant=False),
    "a tensor subclass": lambda layers, values: layers(values.as_subclass(_Named)),  # type: ignore[arg-type]  # torch asks for a type of its own
    "a custom Function": lambda layers, values: _Cube.apply(layers(values)),
    "cond": _cond,
    "functorch": lambda layers, values: torch.func.vmap(layers, randomness="different")(values),
    "a mode of the user's": _in_their_mode,
    "a profiler of the user's": _in_their_profiler,
}


class _Model(pl.LightningModule):
    def __init__(self, layers: nn.Module, run: Layers) -> None:
        super().__init__()
        self.layers, self.run = layers, run

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        noisy = batch[0] / 100 + torch.rand_like(batch[0]) + random.random() + np.random.rand()
        return self.run(self.layers, noisy).float().pow(2).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.layers(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class _Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *rest: Any) -> None:
        self.seen.append(outputs["loss"].item())


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 2))


def result(
    folder: Path,
    telemetry: list[Callback],
    *,
    run: Layers,
    compiled: Callable[[nn.Module], Any] = lambda layers: layers,
    steps: int = 24,
    **trainer_arguments: Any,
) -> dict[str, Any]:
    """Return everything that a fit computed, from the same seeds."""
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    model, losses = _Model(compiled(_layers()), run), _Losses()
    trainer = fit(folder, [*telemetry, losses], model=model, steps=steps, **trainer_arguments)
    return {
        "weights": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "losses": losses.seen,
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
    }


def windows(folder: Path, steps: int = 24) -> Telemetry:
    """Return a callback that records three windows of two steps in that many."""
    return Telemetry(folder / "outbox", every_n_steps=steps // 3, max_windows=3)


def equal(one: object, other: object) -> bool:
    """Return whether two nested values are the same, tensors bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("model", MODELS)
def test_everything_computed_is_bit_identical(tmp_path: Path, model: str) -> None:
    steps = 60 if model == "plain" else 24
    arguments: dict[str, Any] = {"run": MODELS[model], "steps": steps}
    if model == "plain":
        arguments |= {"validation": batches(2), "val_check_interval": 7}
    telemetry = windows(tmp_path, steps)
    recorded = result(tmp_path, [telemetry], **arguments)
    assert equal(recorded, result(tmp_path, [], **arguments))
    facts = telemetry.facts()
    assert len(facts) == 3
    if model == "a profiler of the user's":
        assert {gap.reason for window in facts for gap in window.gaps} == {GapReason.WINDOW_TRUNCATED}
    else:
        assert [gap for window in facts for gap in window.gaps] == []
        assert [[outcome for _, outcome in window] for window in telemetry.steps()] == [[COMPLETE] * 2] * 3


def test_autocast_is_bit_identical(tmp_path: Path) -> None:
    telemetry = windows(tmp_path)
    recorded = result(tmp_path, [telemetry], run=_plain, precision="bf16-mixed")
    assert equal(recorded, result(tmp_path, [], run=_plain, precision="bf16-mixed"))
    assert any("bfloat16" in str(row["inputs"]) for row in telemetry.rows())


@pytest.mark.parametrize("around", [_Theirs, nullcontext])
def test_a_mode_of_the_users_around_the_fit_sees_what_it_saw(
    tmp_path: Path, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    def run(telemetry: list[Callback]) -> tuple[dict[str, Any], int]:
        _Theirs.calls = 0
        with around():
            return result(tmp_path, telemetry, run=_plain), _Theirs.calls

    telemetry = windows(tmp_path)
    (recorded, seen), (plain, seen_without) = run([telemetry]), run([])
    assert equal(recorded, plain)
    assert seen == seen_without
    assert len(telemetry.facts()) == 3


def _compilations() -> dict[str, int]:
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "frames": counters["frames"]["ok"],
    }


@pytest.mark.parametrize(
    ("backend", "fullgraph", "first_window"),
    [
        ("eager", False, 0),
        ("eager", True, 0),
        ("eager", True, 4),
        ("aot_eager", True, 0),
        ("aot_eager", True, 4),
        ("inductor", True, 0),
    ],
)
def test_a_compiled_model_is_compiled_as_often_and_computes_the_same(
    tmp_path: Path, backend: str, fullgraph: bool, first_window: int
) -> None:
    def run(telemetry: list[Callback]) -> tuple[dict[str, Any], dict[str, int]]:
        torch._dynamo.reset()
        counters.clear()
        computed = result(
            tmp_path,
            telemetry,
            run=_plain,
            compiled=lambda layers: torch.compile(layers, backend=backend, fullgraph=fullgraph),
        )
        return computed, _compilations()

    telemetry = Telemetry(
        tmp_path / "outbox", skip_first=first_window, warmup=0, every_n_steps=8, max_windows=3
    )
    recorded, compilations = run([telemetry])
    plain, compilations_without = run([])
    torch._dynamo.reset()
    assert compilations == compilations_without
    assert compilations["graphs"] > 0
    assert equal(recorded, plain)
    assert [gap for window in telemetry.facts() for gap in window.gaps] == []
    assert len(telemetry.facts()) == 3


def test_training_connects_to_nothing_and_waits_for_windows_at_its_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[object] = []
    waited: list[tuple[bool, float]] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: connected.append(address))
    monkeypatch.setattr(carriers, "_PROGRAM", "fault_programs.silent_worker")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))

    class Waits(WindowWorker):
        def _wait_until(self, deadline: float) -> None:
            waited.append((ended != [], round(deadline - time.monotonic())))

    class Watched(KernelTelemetry):
        def _make_worker(self, outbox: Outbox, destination: Destination) -> WindowWorker:
            return Waits(outbox, destination, upload_timeout_s=self._upload_timeout_s)

        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            super().on_train_end(trainer, pl_module)
            ended.append(trainer.global_step)

    ended: list[int] = []
    telemetry = Watched(
        every_n_steps=8,
        skip_first=0,
        min_interval_s=0.0,
        upload_timeout_s=20.0,
        outbox=tmp_path / "outbox",
        run_id="a_run",
        tracking_uri="http://127.0.0.1:1",
    )
    with pytest.warns(UserWarning, match="3 of 3 windows") as warned:
        result(tmp_path, [telemetry], run=_plain)
    assert connected == []
    assert waited == [(True, 20)]
    ours = [str(each.message) for each in warned if "kernel telemetry" in str(each.message)]
    assert [str(tmp_path / "outbox") in text for text in ours] == [True]

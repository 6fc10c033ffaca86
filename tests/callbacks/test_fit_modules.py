"""Modules of a Lightning fit: named as in the LightningModule, known in each recorded step, and gone after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fits import Small, Telemetry, fit
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # inside Inductor
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]


class Nested(Small):
    """A loss in `training_step` is outside of every module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()


def _modules(telemetry: Telemetry, phase: str) -> list[str | None]:
    return sorted({path for path, p in telemetry.calls("module", "phase") if p == phase}, key=str)


def test_modules_are_named_as_in_the_lightning_module(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "outbox")
    fit(tmp_path, [telemetry], model=Nested())
    assert _modules(telemetry, "forward") == [None, "layers.0", "layers.1", "layers.2"]
    assert _modules(telemetry, "backward") == [None, "layers.0", "layers.1", "layers.2"]
    assert _modules(telemetry, "optimizer") == [None]


def test_each_step_numbers_its_module_calls_from_zero(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "outbox")
    fit(tmp_path, [telemetry], model=Nested())
    numbers = {
        (step, number)
        for step, path, number in telemetry.calls("step", "module", "module_call")
        if path == "layers.1"
    }
    assert numbers == {(3, 0), (4, 0)}


def test_after_the_fit_no_hook_of_ours_is_left(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "outbox", fused=True)
    fit(tmp_path, [telemetry], model=Nested())
    assert not module_hooks._global_forward_hooks
    assert not module_hooks._global_forward_pre_hooks
    from torch._inductor import config

    assert config.trace.provenance_tracking_level == 0
    assert torch.compiler.config.cache_key_tag == ""


def test_after_a_fit_that_raised_neither(tmp_path: Path) -> None:
    class Raising(Nested):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    telemetry = Telemetry(tmp_path / "outbox", fused=True)
    with pytest.raises(ArithmeticError):
        fit(tmp_path, [telemetry], model=Raising())
    assert not module_hooks._global_forward_hooks
    from torch._inductor import config

    assert config.trace.provenance_tracking_level == 0

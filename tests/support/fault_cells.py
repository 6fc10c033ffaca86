"""Small Lightning fits in which something strikes at one place of one step, with the callback and without."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from tlk_tracking.recording.profiler_session import _OPEN
from tlk_tracking.recording.torch_private import dispatch_mode_stack, profiled_here, profiler_flag

# The window: warm-up in steps 2 and 3, recorded steps 4 to 6.
SCHEDULE = {"every_n_steps": 1000, "skip_first": 2, "warmup": 2, "active": 3, "min_interval_s": 0.0}
STEPS = 10


class When(StrEnum):
    IDLE = "before the window"
    WARM_UP = "in the warm-up"
    FIRST = "in the first recorded step"
    LAST = "in the last recorded step"
    UPLOAD = "while the window is uploaded"


STEP = {When.IDLE: 1, When.WARM_UP: 3, When.FIRST: 4, When.LAST: 6, When.UPLOAD: 8}


class Where(StrEnum):
    FORWARD = "training_step"
    LAYER = "a layer's forward"
    BACKWARD = "backward"
    FUNCTION = "a custom Function's backward"
    OPTIMIZER = "the optimizer's step"
    LOADER = "the dataloader"
    VALIDATION = "validation"
    START_BEFORE = "on_train_batch_start before ours"
    START_AFTER = "on_train_batch_start after ours"
    END_BEFORE = "on_train_batch_end before ours"
    END_AFTER = "on_train_batch_end after ours"


# By then our own hook has ended the step, and the window with the last step of it.
AFTER_THE_STEP = {Where.VALIDATION, Where.END_AFTER}

Strike = Callable[[], object]


class StatusLogger(Logger):
    """A logger that notes how it is finalized, and what `look` sees at that moment."""

    name = "statuses"
    version = 0

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self.look = look
        self.finalized: list[tuple[str, object]] = []

    def log_metrics(self, *arguments: Any, **keywords: Any) -> None: ...

    def log_hyperparams(self, *arguments: Any, **keywords: Any) -> None: ...

    def finalize(self, status: str) -> None:
        self.finalized.append((status, self.look()))


@dataclass(kw_only=True)
class Cell:
    """What strikes where at which step. `strike` may raise, or send a signal."""

    where: Where
    step: int
    strike: Strike
    struck: int = 0
    module: LightningModule | None = field(default=None, repr=False)

    def at(self, where: Where, step: int | None = None) -> None:
        """Strike if this is the place and the step, by default the one that runs."""
        if where is not self.where:
            return
        if step is None:
            assert self.module is not None
            step = self.module.trainer.fit_loop.total_batch_idx
        if step == self.step and not self.struck:
            self.struck += 1
            self.strike()


class _Rows(Dataset[Tensor]):
    def __init__(self, cell: Cell, where: Where | None) -> None:
        self.cell, self.where = cell, where

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Tensor:
        if self.where is not None:
            self.cell.at(self.where, index)
        return torch.full((8,), float(index))


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, strike: Strike) -> Tensor:
        ctx.strike = strike
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.strike()
        return gradients[0], None


class _Layer(nn.Module):
    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self.inner = nn.Linear(8, 8)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.inner(values)
        self.cell.at(Where.LAYER)
        return result


class _SGD(torch.optim.SGD):
    cell: Cell

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        self.cell.at(Where.OPTIMIZER)
        return done


class StruckModule(pl.LightningModule):
    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        cell.module = self
        self.layer = _Layer(cell)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        outputs = self.layer(batch)
        self.cell.at(Where.FORWARD)
        if self.cell.where is Where.FUNCTION:
            outputs = _Identity.apply(outputs, lambda: self.cell.at(Where.FUNCTION))
        loss: Tensor = outputs.pow(2).mean()
        if self.cell.where is Where.BACKWARD:
            loss.register_hook(lambda gradient: self.cell.at(Where.BACKWARD))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)
        self.cell.at(Where.VALIDATION)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = _SGD(self.parameters(), lr=0.01)
        optimizer.cell = self.cell
        return optimizer


class _Struck(Callback):
    def __init__(self, cell: Cell, start: Where, end: Where) -> None:
        self.cell, self.start, self.end = cell, start, end

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.cell.at(self.start)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.cell.at(self.end)


def run_cell(cell: Cell, ours: Sequence[Callback], logger: Logger | bool, folder: Path) -> Trainer:
    """Fit for STEPS batches, or as long as the cell's strike lets it."""
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=logger,
        default_root_dir=folder,
        callbacks=[
            _Struck(cell, Where.START_BEFORE, Where.END_BEFORE),
            *ours,
            _Struck(cell, Where.START_AFTER, Where.END_AFTER),
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=1 if cell.where is Where.VALIDATION else None,
        limit_val_batches=1 if cell.where is Where.VALIDATION else 0,
    )
    trainer.fit(
        StruckModule(cell),
        DataLoader(_Rows(cell, Where.LOADER), batch_size=None),
        DataLoader(_Rows(cell, None), batch_size=None),
    )
    return trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a fit must leave as it was, whatever happens in it."""

    modes: tuple[object, ...]
    profiler: tuple[object, ...]
    module_hooks: tuple[int, ...]
    optimizer_hooks: int
    signal_handlers: tuple[object, ...]
    threads: frozenset[str]


def surroundings() -> Surroundings:
    """Return what is on in this thread and process."""
    kinds = (
        module_hooks._global_forward_hooks,
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_backward_hooks,
        module_hooks._global_forward_hooks_always_called,
    )
    return Surroundings(
        modes=dispatch_mode_stack(),
        profiler=(repr(profiler_flag()), type(profiler_flag()), profiled_here(), len(_OPEN)),
        module_hooks=tuple(len(kind) for kind in kinds),
        optimizer_hooks=len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks),
        signal_handlers=tuple(
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        ),
        threads=frozenset(thread.name for thread in threading.enumerate() if not thread.daemon),
    )


def plain_profiler_events() -> set[str]:
    """Return the names of what a plain torch.profiler session sees of one product."""
    with profile(activities=[ProfilerActivity.CPU]) as plain:
        torch.ones(2, 2).mm(torch.ones(2, 2))
    return {event.name for event in plain.events()}

"""Small Lightning fits on CPU with the callback, whose windows stay in an outbox instead of going to a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow.parquet as pq
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tlk_tracking.callbacks import KernelTelemetry
from tlk_tracking.core.records import StepOutcome, WindowFacts
from tlk_tracking.delivery.outbox import Outbox, RawWindow
from tlk_tracking.delivery.worker import WindowWorker
from tlk_tracking.tracking.tracking_uri import Destination

COMPLETE, RAISED, ABANDONED = StepOutcome.COMPLETE, StepOutcome.RAISED, StepOutcome.ABANDONED


class SilentWorker(WindowWorker):
    """A worker that only notes what it is asked for."""

    def __init__(self, outbox: Outbox, destination: Destination | None, *, upload_timeout_s: float) -> None:
        super().__init__(outbox, destination, upload_timeout_s=upload_timeout_s)
        self.drained: list[float] = []
        self.submitted: list[RawWindow] = []

    def start(self) -> None: ...

    def submit(self, window: RawWindow) -> None:
        self.submitted.append(window)

    def drain(self, timeout_s: float) -> Any:
        self.drained.append(timeout_s)

    def close(self) -> None: ...


class Telemetry(KernelTelemetry):
    """The callback with a worker that sends nothing."""

    def __init__(self, outbox: Path, **arguments: Any) -> None:
        every = {"every_n_steps": 1000, "skip_first": 2, "warmup": 1, "active": 2, "min_interval_s": 0.0}
        super().__init__(
            outbox=outbox, run_id="a_run", tracking_uri="sqlite:///nowhere.db", **(every | arguments)
        )
        self.box = Outbox(outbox)
        self.workers: list[SilentWorker] = []

    def _make_worker(self, outbox: Outbox, destination: Destination) -> WindowWorker:
        self.workers.append(SilentWorker(outbox, destination, upload_timeout_s=self._upload_timeout_s))
        return self.workers[-1]

    def facts(self) -> list[WindowFacts]:
        """Return what is known of each window in the outbox, in order of their steps."""
        return sorted(
            (window.facts() for window in self.box.raw_windows()), key=lambda facts: facts.first_step
        )

    def steps(self) -> list[list[tuple[int, StepOutcome]]]:
        """Return the steps of each window and how they ended."""
        return [[(bracket.step, bracket.outcome) for bracket in facts.steps] for facts in self.facts()]

    def rows(self) -> list[dict[str, Any]]:
        """Return the ATen calls of all windows."""
        tables = [
            pq.read_table(window.calls) for window in self.box.raw_windows() if window.calls is not None
        ]
        return [row for table in tables for row in table.to_pylist()]

    def calls(self, *names: str) -> list[tuple[Any, ...]]:
        """Return some columns of the ATen calls of all windows."""
        return [tuple(row[name] for name in names) for row in self.rows()]


class Small(pl.LightningModule):
    """Two layers and AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss: Tensor = self.layers(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validation", torch.erf(self.layers(batch[0])).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches(count: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return that many batches of two."""
    return DataLoader(TensorDataset(torch.arange(8.0 * count).reshape(2 * count, 4)), batch_size=2)


def fit(
    folder: Path,
    callbacks: Sequence[Callback],
    *,
    model: LightningModule | None = None,
    steps: int = 8,
    validation: DataLoader[tuple[Tensor, ...]] | None = None,
    checkpoint: Path | None = None,
    **trainer_arguments: Any,
) -> Trainer:
    """Run a fit of one epoch of that many steps."""
    arguments: dict[str, Any] = {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(
        **(arguments | trainer_arguments),
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model or Small(),
        batches(steps),
        validation,
        ckpt_path=None if checkpoint is None else str(checkpoint),
    )
    return trainer

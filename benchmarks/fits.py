"""Lightning fits to measure: a transformer on random batches, with an MLflow run beside it."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger
from torch.utils.data import DataLoader

from benchmarks.models import Encoder, Size


class _Module(LightningModule):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = Encoder(size)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.model(batch) - batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=True, fused=False)


def fit(
    size: Size, *, steps: int, folder: Path, device: str, callbacks: list[Callback], profiler: Any = None
) -> float:
    """Train for `steps` batches and return how many seconds `Trainer.fit` took."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("lightning.pytorch", "mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    batches = [torch.randn(size.batch, size.length, size.width) for _ in range(4)] * (steps // 4 + 1)
    logger = MLFlowLogger(
        "benchmark", tracking_uri=f"sqlite:///{folder / 'mlflow.db'}", artifact_location=None
    )
    _ = logger.run_id  # the run and its database are made before the clock starts
    trainer = Trainer(
        max_steps=steps, logger=logger, callbacks=callbacks, profiler=profiler, default_root_dir=folder,
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=steps,
    )  # fmt: skip
    module = _Module(size)
    loader = DataLoader(batches, batch_size=None, shuffle=False)
    begin = time.perf_counter()
    trainer.fit(module, loader)
    return time.perf_counter() - begin

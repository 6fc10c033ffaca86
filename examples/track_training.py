"""Train a small Lightning model for a few hundred steps and record its kernels into an MLflow run.

The last line printed is the id of the run: `tlk show runs:/RUN_ID` reads it back.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import MLFlowLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tlk_tracking.callbacks import KernelTelemetry

VOCABULARY, LENGTH, WIDTH = 32, 24, 64


class WhichHalf(pl.LightningModule):
    """Tell which half of the vocabulary a sequence draws most of its tokens from."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the two logits of each sequence."""
        return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch and log it."""
        tokens, label = batch
        loss = nn.functional.cross_entropy(self(tokens), label)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW at a rate that suits a model of this size."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def synthetic_batches(count: int, batch_size: int = 32) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of random token sequences with their labels."""
    tokens = torch.randint(VOCABULARY, (count, batch_size, LENGTH))
    label = ((tokens < VOCABULARY // 2).sum(dim=2) > LENGTH // 2).long()
    return DataLoader(TensorDataset(tokens, label), batch_size=None)


def main() -> None:
    """Train, with the kernel telemetry among the Trainer's callbacks."""
    pl.seed_everything(0)
    logger = MLFlowLogger(experiment_name="tlk_tracking_demo", tracking_uri="sqlite:///mlflow.db")
    trainer = pl.Trainer(
        max_epochs=1,
        logger=logger,
        callbacks=[KernelTelemetry()],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(WhichHalf(), synthetic_batches(count=300))
    print(logger.run_id)


if __name__ == "__main__":
    main()

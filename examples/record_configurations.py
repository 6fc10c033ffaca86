"""Record one model under two configurations on a GPU: the annotations that compare_runs.py compares.

    python examples/record_configurations.py [FOLDER]

FOLDER (examples/data by default) gets `compare_fp32` and `compare_bf16`, three windows of four steps each.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import MLFlowLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tlk_tracking import load_run
from tlk_tracking.callbacks import KernelTelemetry

VOCABULARY, LENGTH, WIDTH, LAYERS = 512, 256, 512, 4
CONFIGURATIONS = {"compare_fp32": "32-true", "compare_bf16": "bf16-mixed"}


class NextToken(pl.LightningModule):
    """Predict the next token: a small transformer that keeps a GPU busy."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=8, dim_feedforward=4 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        (tokens,) = batch
        logits = self.head(self.encoder(self.embedding(tokens[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def record(precision: str, tracking_uri: str, folder: str) -> str:
    """Train for a hundred steps with three windows and return the id of the run."""
    pl.seed_everything(0)
    logger = MLFlowLogger(
        experiment_name="configurations", tracking_uri=tracking_uri, artifact_location=f"{folder}/artifacts"
    )
    trainer = pl.Trainer(
        max_epochs=1,
        precision=precision,
        logger=logger,
        callbacks=[KernelTelemetry(active=4, at_steps=[30, 60, 90])],
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    tokens = torch.randint(VOCABULARY, (100, 16, LENGTH))
    trainer.fit(NextToken(), DataLoader(TensorDataset(tokens), batch_size=None))
    return str(logger.run_id)


def main(folder: Path) -> None:
    """Record every configuration and save its annotations below the folder."""
    with tempfile.TemporaryDirectory() as work:
        tracking_uri = f"sqlite:///{work}/mlflow.db"
        for name, precision in CONFIGURATIONS.items():
            run_id = record(precision, tracking_uri, work)
            for annotation in load_run(run_id, tracking_uri).annotations:
                annotation.save(folder / name / annotation.folder_name)
                print(folder / name / annotation.folder_name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")

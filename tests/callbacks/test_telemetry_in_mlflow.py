"""A Lightning fit whose windows are in its MLflow run, with the real worker and each of Lightning's two names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FIT = """
import json, sys
package, uri = sys.argv[1:]
if package == "lightning":
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import MLFlowLogger
else:
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import MLFlowLogger
import torch
from torch.utils.data import DataLoader, TensorDataset
from tlk_tracking.callbacks import KernelTelemetry

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

logger = MLFlowLogger(tracking_uri=uri)
telemetry = KernelTelemetry(every_n_steps=8, skip_first=2, min_interval_s=0, max_windows=2, upload_timeout_s=100)
trainer = pl.Trainer(
    max_epochs=1, logger=logger, callbacks=[telemetry], enable_progress_bar=False, enable_checkpointing=False,
    accelerator="cpu", log_every_n_steps=1,
)
trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=2))
other = {"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}[package]
loaded = any(name.partition(".")[0] == other for name in sys.modules)
print(json.dumps({"run": logger.run_id, "other loaded": loaded}))
"""


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_windows_of_a_fit_are_in_its_run(package: str, mlflow_sqlite: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    from tlk_tracking import load_run

    done = subprocess.run(
        [sys.executable, "-c", FIT, package, mlflow_sqlite],
        cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert not said["other loaded"]
    run = load_run(said["run"], mlflow_sqlite)
    found = [annotation for window in run.windows for annotation in window.ranks.values()]
    assert [[row.step for row in annotation.manifest.window.steps] for annotation in found] == [
        [5, 6, 7],
        [13, 14, 15],
    ]
    assert {annotation.manifest.environment.lightning is not None for annotation in found} == {True}
    stored = MlflowClient(mlflow_sqlite).get_run(said["run"])
    assert stored.info.status == "FINISHED"
    assert stored.data.metrics["kernel_telemetry/steps_recorded"] == 3
    assert stored.data.tags["tlk.availability"] == "unavailable"
    outbox = tmp_path / "kernel_telemetry_outbox"
    assert [path for stage in ("raw", "annotations") for path in (outbox / stage).iterdir()] == []

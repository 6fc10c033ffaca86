"""A fit on the GPU computes bit for bit, with deterministic algorithms, what it computes without windows."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import SUPPORT

Check = Callable[[str, str, object, object], None]

# A process of its own: cuBLAS reads its part of determinism when it starts.
_PROGRAM = """
import hashlib, io, json, random, sys, warnings
from pathlib import Path
import lightning.pytorch as pl
import numpy as np
import torch
from lightning_fits import Telemetry
from torch.utils.data import DataLoader, TensorDataset
from paths import SUPPORT

warnings.simplefilter("ignore")
recorded, precision, compiled, folder = json.loads(sys.argv[1])
torch.use_deterministic_algorithms(True)
pl.seed_everything(5, verbose=False)

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.run = torch.compile(self.layers) if compiled else self.layers
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.run(batch[0] + torch.rand_like(batch[0])).pow(2).mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

model, folder = Model(), Path(folder)
telemetry = Telemetry(folder / "outbox", every_n_steps=20, skip_first=3, warmup=3, active=3, max_windows=3)
data = DataLoader(TensorDataset(torch.randn(60 * 4, 16, 64)), batch_size=4)
trainer = pl.Trainer(
    accelerator="gpu", devices=1, precision=precision, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    callbacks=[telemetry] if recorded else [],
)
trainer.fit(model, data)

def digest(value):
    body = io.BytesIO()
    torch.save(value, body)
    return hashlib.sha256(body.getvalue()).hexdigest()

cpu = lambda tree: torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, tree)
counters = torch._dynamo.utils.counters if compiled else {"stats": {}}
print(json.dumps({
    "windows": len(telemetry.facts()) if recorded else 0,
    "computed": {
        "steps": trainer.global_step,
        "weights": [digest(cpu(one)) for one in model.state_dict().values()],
        "optimizer": digest(cpu(trainer.optimizers[0].state_dict())),
        "losses": [loss.item() for loss in model.losses],
        "random": [digest(torch.get_rng_state()), digest(torch.cuda.get_rng_state()), str(random.getstate())],
        "graphs": counters["stats"].get("unique_graphs", 0),
    },
}))
"""


def _run(folder: Path, *, recorded: bool, precision: str, compiled: bool) -> dict[str, object]:
    arguments = json.dumps([recorded, precision, compiled, str(folder)])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arguments],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("precision", "compiled"), [("32-true", False), ("bf16-mixed", False), ("32-true", True)]
)
def test_a_fit_computes_what_it_computes_without_windows(
    tmp_path: Path, precision: str, compiled: bool, check: Check
) -> None:
    recorded, plain = (
        _run(tmp_path, recorded=with_windows, precision=precision, compiled=compiled)
        for with_windows in (True, False)
    )
    assert recorded["windows"] == 3
    sums = [
        hashlib.sha256(json.dumps(one["computed"]).encode()).hexdigest()[:16] for one in (plain, recorded)
    ]
    check(
        "weights, optimizer state, losses and random states after 60 steps with three windows",
        f"transformer, {precision}{', compiled' if compiled else ''}; a fit without the callback",
        *sums,
    )

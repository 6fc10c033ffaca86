"""A LightningCLI program; KernelTelemetry comes in by its configuration file alone.

pip install "jsonargparse[signatures]"
python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

if __name__ == "__main__":
    LightningCLI(DemoModel, BoringDataModule, save_config_callback=None)

"""The configuration file of examples/ works under LightningCLI, with either of Lightning's packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from paths import EXAMPLES

from tlk_tracking import load_run


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_callback_comes_in_by_its_class_path(package: str, mlflow_sqlite: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    pytest.importorskip(package.partition(".")[0])
    for name in ("lightning_cli.py", "lightning_cli.yaml"):
        text = (EXAMPLES / name).read_text().replace("lightning.pytorch", package)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "lightning_cli.py", "fit", "--config", "lightning_cli.yaml"]
    subprocess.run(command, check=True, capture_output=True, timeout=170, cwd=tmp_path)
    client = MlflowClient(mlflow_sqlite)
    experiment = client.get_experiment_by_name("tlk_tracking_cli")
    (run,) = client.search_runs([experiment.experiment_id])
    (annotation,) = load_run(run.info.run_id, mlflow_sqlite).annotations
    assert annotation.complete_steps == (12, 13, 14)


@pytest.mark.parametrize(
    ("given", "chosen"), [([], (0,)), (["zero"], (0,)), (["all"], "all"), (["[2, 0]"], (0, 2))]
)
def test_ranks_go_through_a_configuration_and_back(given: list[str], chosen: object) -> None:
    from jsonargparse import ArgumentParser

    from tlk_tracking.callbacks import KernelTelemetry

    parser = ArgumentParser()
    parser.add_class_arguments(KernelTelemetry, "telemetry")
    configuration = parser.parse_args([f"--telemetry.ranks={value}" for value in given])
    again = parser.parse_string(parser.dump(configuration))
    assert again == configuration
    assert KernelTelemetry(**again.telemetry.as_dict())._ranks == chosen

"""Fits that are killed in the middle of a window or its saving leave windows that are whole, or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient
from paths import SUPPORT
from soak_figures import TIMEOUT_S, tell

from tlk_tracking import load_run

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.timeout(TIMEOUT_S),
]


def test_what_killed_fits_kept_is_whole_and_arrives_once(tmp_path: Path, mlflow_sqlite: str) -> None:
    client = MlflowClient(tracking_uri=mlflow_sqlite)
    run_id = client.create_run(client.create_experiment("killed")).info.run_id
    # scripts/soak kills more often; tests/cli/test_upload.py kills annotating and sending.
    kills = int(os.environ.get("TLK_KILLS", "12"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fault_programs.killed_fits"),
            *(str(tmp_path), run_id, mlflow_sqlite, str(kills)),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    tell("fits that are killed", **told)
    assert len(load_run(run_id, mlflow_sqlite).windows) == told["kept"] > 0
    points = client.get_metric_history(run_id, "kernel_telemetry/steps_recorded")
    assert len(points) == told["kept"]

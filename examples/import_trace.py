"""Put a trace that was recorded elsewhere into an MLflow run of its own.

    python examples/import_trace.py TRACE OPS

The last line printed is the id of the run: `tlk show runs:/RUN_ID` reads it back.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mlflow import MlflowClient

from tlk_tracking import import_trace, log_annotation

TRACKING_URI = "sqlite:///mlflow.db"


def main(trace: str, ops: str) -> None:
    """Import the trace and log its annotation into a new run."""
    client = MlflowClient(TRACKING_URI)
    experiment = client.get_experiment_by_name("tlk_tracking_demo")
    experiment_id = experiment.experiment_id if experiment else client.create_experiment("tlk_tracking_demo")
    run_id = client.create_run(experiment_id, run_name=Path(trace).name).info.run_id
    log_annotation(import_trace(Path(trace), ops=Path(ops)), run_id, TRACKING_URI)
    client.set_terminated(run_id)
    print(run_id)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Make MLflow give up in time (deadline -> environment variables)."""

from __future__ import annotations

import math


def request_limits(timeout_s: float) -> dict[str, str]:
    """Return the variables with which MLflow ends a request well within a deadline and sends no telemetry.

    For the environment of a process of ours alone: MLflow reads it at each request, and by default a dead
    server holds one for four minutes.
    """
    return {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(max(1, math.floor(timeout_s / 3))),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }

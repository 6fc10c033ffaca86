"""CUDA kernel telemetry for PyTorch Lightning training, tracked in MLflow; every number says what it is worth.

Importing the package loads neither torch, lightning, mlflow nor pandas: names are loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tlk_tracking.annotate import import_trace
    from tlk_tracking.annotation import KernelAnnotation, load_annotation
    from tlk_tracking.comparison import compare_annotations
    from tlk_tracking.errors import TlkError
    from tlk_tracking.mlflow_tracking import load_run, log_annotation
    from tlk_tracking.recording import record_kernels
    from tlk_tracking.records import AtenCall, Bound, KernelLaunch
    from tlk_tracking.across_runs import compare_runs, kernel_history

__version__ = "0.1.0"

__all__ = [
    "AtenCall",
    "Bound",
    "KernelAnnotation",
    "KernelLaunch",
    "TlkError",
    "compare_annotations",
    "compare_runs",
    "import_trace",
    "kernel_history",
    "load_annotation",
    "load_run",
    "log_annotation",
    "record_kernels",
]

_HOME = {
    "AtenCall": "records",
    "Bound": "records",
    "KernelAnnotation": "annotation",
    "KernelLaunch": "records",
    "TlkError": "errors",
    "compare_annotations": "comparison",
    "compare_runs": "across_runs",
    "import_trace": "annotate",
    "kernel_history": "across_runs",
    "load_annotation": "annotation",
    "load_run": "mlflow_tracking",
    "log_annotation": "mlflow_tracking",
    "record_kernels": "recording",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

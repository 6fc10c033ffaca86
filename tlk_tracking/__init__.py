"""CUDA kernel telemetry for PyTorch Lightning training, tracked in MLflow; every number says what it is worth.

Importing the package loads neither torch, lightning, mlflow nor pandas: names are loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tlk_tracking.analysis.comparison import compare_annotations
    from tlk_tracking.annotation.kernel_annotation import KernelAnnotation, load_annotation
    from tlk_tracking.attribution.annotate import import_trace
    from tlk_tracking.core.errors import TlkError
    from tlk_tracking.core.gaps import Bound
    from tlk_tracking.core.records import AtenCall, KernelLaunch
    from tlk_tracking.recording.block_recording import record_kernels
    from tlk_tracking.tracking.across_runs import compare_runs, kernel_history
    from tlk_tracking.tracking.mlflow_tracking import load_run, log_annotation

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
    "AtenCall": "core.records",
    "Bound": "core.gaps",
    "KernelAnnotation": "annotation.kernel_annotation",
    "KernelLaunch": "core.records",
    "TlkError": "core.errors",
    "compare_annotations": "analysis.comparison",
    "compare_runs": "tracking.across_runs",
    "import_trace": "attribution.annotate",
    "kernel_history": "tracking.across_runs",
    "load_annotation": "annotation.kernel_annotation",
    "load_run": "tracking.mlflow_tracking",
    "log_annotation": "tracking.mlflow_tracking",
    "record_kernels": "recording.block_recording",
}


# In a checkout, callbacks/ stands beside this folder and not in it, where an installed package has it.
if Path(__file__).parents[1].joinpath("callbacks", "kernel_telemetry.py").is_file():
    __path__.append(str(Path(__file__).parents[1]))


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

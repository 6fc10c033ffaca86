"""Say where a window was recorded, from a closed list of facts (process -> Environment)."""

from __future__ import annotations

import functools
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tlk_tracking.core.records import Environment
from tlk_tracking.recording.torch_private import has_compiled

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s")
_CUPTI_PACKAGES = ("nvidia-cuda-cupti", "nvidia-cuda-cupti-cu13", "nvidia-cuda-cupti-cu12")


def describe_environment() -> Environment:
    """Return the facts of this process; never a host's or user's name, a path, an argument or a variable.

    Lightning, precision, strategy and world size are for the caller to add.
    """
    return Environment(**_lasting_facts(), compiled=has_compiled())  # type: ignore[arg-type]  # by name, as made below


@functools.cache
def _lasting_facts() -> dict[str, str | int | None]:
    has_device = torch.cuda.is_available()
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": _driver_version() if has_device else None,
        "cupti": _first_version(_CUPTI_PACKAGES) if has_device else None,
        "python": platform.python_version(),
        "mlflow": _first_version(("mlflow", "mlflow-skinny")),
        "tlk_tracking": _first_version(("tlk-tracking",)),
        "gpu_model": torch.cuda.get_device_name() if has_device else None,
        "gpu_count": torch.cuda.device_count(),
        "os_family": platform.system() or None,
    }


def _driver_version() -> str | None:
    try:
        found = _DRIVER_VERSION.search(_DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0])
    except (OSError, IndexError):
        return None
    return found.group(1) if found else None


def _first_version(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None

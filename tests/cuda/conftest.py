"""What the CUDA tests share: their marks, and the file that collects what was expected and what was seen."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# (situation, program, expected, observed): noted for docs/validation.md, then compared.
Check = Callable[[str, str, object, object], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cuda)
            # The torch and Lightning of a GPU machine are not pinned: what they warn of is not ours.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def _results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("TLK_VALIDATION_JSON")
    path = Path(named) if named else tmp_path_factory.mktemp("validation") / "results.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": _machine()}) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def check(_results: Path, request: pytest.FixtureRequest) -> Check:
    """Note one line of docs/validation.md, then refuse it if the two sides differ."""

    def compare(situation: str, program: str, expected: object, observed: object) -> None:
        row = {
            "situation": situation,
            "program": program,
            "expected": str(expected),
            "observed": str(observed),
            "passed": bool(expected == observed),
            "test": request.node.nodeid.rpartition("/")[2],
        }
        with _results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        assert observed == expected

    return compare


@pytest.fixture
def note(_results: Path, request: pytest.FixtureRequest) -> Callable[[str, str, object], None]:
    """Note a figure for docs/validation.md that nothing is expected of."""

    def write(situation: str, program: str, observed: object) -> None:
        row = {
            "situation": situation,
            "program": program,
            "expected": "measured, not judged",
            "observed": str(observed),
            "passed": True,
            "test": request.node.nodeid.rpartition("/")[2],
        }
        with _results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    return write


def _machine() -> dict[str, str | None]:
    import torch

    versions: dict[str, str | None] = {}
    for name in ("torch", "lightning", "mlflow", "triton"):
        versions[name] = None
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions | {
        "gpu": torch.cuda.get_device_name(),
        "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": os.environ.get("TLK_COMMIT") or _first_line(["git", "rev-parse", "--short=12", "HEAD"]),
    }


def _first_line(command: list[str]) -> str | None:
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=HERE, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(said.splitlines()), None)

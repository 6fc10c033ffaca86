"""What every test leaves behind is checked here; a real MLflow server and store for those that need one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports mlflow: tests send no usage statistics. Child processes inherit it.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["DO_NOT_TRACK"] = "true"

_SERVER_START_S = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]
    reason = _why_no_cuda() if marked else None
    for item in marked:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_cuda() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no usable NVIDIA GPU"


@pytest.fixture(autouse=True)
def _nothing_is_left_on() -> Iterator[None]:
    """Check after each test: no profiler on, no dispatch mode on the stack, no MLflow run open."""
    yield
    # A test that never imported torch or mlflow left nothing of theirs, and need not wait for them.
    if "torch" in sys.modules:
        import torch

        assert not torch.autograd.profiler._is_profiler_enabled, "the test left a profiler on"
        assert torch._C._len_torch_dispatch_stack() == 0, "the test left a dispatch mode on the stack"
    if "mlflow" in sys.modules:
        import mlflow

        assert mlflow.active_run() is None, "the test left an MLflow run open"


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let saves not reach the disk, for tests with thousands of them."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder of the small real traces."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def _empty_mlflow_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Its many migrations take seconds, so they are made once and the file is copied.
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    folder = tmp_path_factory.mktemp("mlflow_template")
    path = folder / "mlflow.db"
    SqlAlchemyStore(f"sqlite:///{path}", str(folder / "artifacts"))
    return path


@pytest.fixture
def mlflow_sqlite(_empty_mlflow_db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of an empty embedded MLflow store of this test's own; the test runs in its folder."""
    # New experiments put their artifacts into ./mlruns.
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{shutil.copy(_empty_mlflow_db, tmp_path / 'mlflow.db')}"


@pytest.fixture(scope="session")
def mlflow_server(_empty_mlflow_db: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a real MLflow server (sqlite, proxied artifacts) on loopback; return its URI."""
    folder = tmp_path_factory.mktemp("mlflow_server")
    shutil.copy(_empty_mlflow_db, folder / "mlflow.db")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
        *("--artifacts-destination", str(folder / "artifacts")),
    ]
    with log.open("wb") as output:
        # A session of its own, so that the server's workers end with it.
        server = subprocess.Popen(
            command,
            cwd=folder,
            # Its runners of background jobs take long to start and to stop, and no test has a job.
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        uri = f"http://127.0.0.1:{port}"
        _wait_until_healthy(uri, server, log)
        yield uri
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_until_healthy(uri: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _SERVER_START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    pytest.fail(f"the MLflow server did not come up:\n{log.read_text(errors='replace')[-3000:]}")

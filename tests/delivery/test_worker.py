from __future__ import annotations

import json
import linecache
import os
import select
import signal
import subprocess
import sys
import threading
import types
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from fault_proxy import Fault, FaultProxy, fault_proxy
from mlflow import MlflowClient
from outboxes import environment_with_tests, seal, visible_files, window_facts

from tlk_tracking.annotation.kernel_annotation import (
    MODULES_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    TABLE_FILES,
    load_annotation,
)
from tlk_tracking.core.places import MANIFEST_FILE
from tlk_tracking.delivery import carriers
from tlk_tracking.delivery.delivery_loop import get_ready, send, settle
from tlk_tracking.delivery.outbox import TRACE_FILE, Delivery, DeliveryState, Outbox, RawWindow
from tlk_tracking.delivery.worker import WindowWorker
from tlk_tracking.tracking.mlflow_tracking import load_run
from tlk_tracking.tracking.tracking_uri import Destination

# Enough for everything but a fault: no test waits that long where all is well.
LONG_S = 60.0

Start = Callable[..., WindowWorker]

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox")


@pytest.fixture
def start(outbox: Outbox) -> Iterator[Start]:
    """Start workers that are ended, and reaped, after the test."""
    workers = []

    def started(destination: Destination | None, upload_timeout_s: float = LONG_S) -> WindowWorker:
        worker = WindowWorker(outbox, destination, upload_timeout_s=upload_timeout_s)
        worker.start()
        workers.append(worker)
        return worker

    yield started
    _end(*workers)


def _end(*workers: WindowWorker) -> None:
    for worker in workers:
        worker.close()
        if worker.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
    _join_readers()


def _join_readers() -> None:
    for thread in threading.enumerate():
        if thread.name == "tlk_tracking answers":
            thread.join(LONG_S)
            assert not thread.is_alive()


def _new_run(tracking_uri: str) -> Destination:
    client = MlflowClient(tracking_uri=tracking_uri)
    run = client.create_run(client.create_experiment(uuid.uuid4().hex))
    return Destination(run_id=run.info.run_id, tracking_uri=tracking_uri)


def _windows_in(destination: Destination) -> list[int]:
    """Return the first steps of the windows in a run, after a check that each value is stored once."""
    run = load_run(destination.run_id, destination.tracking_uri)
    client = MlflowClient(tracking_uri=destination.tracking_uri)
    for key in run.metrics:
        assert len(client.get_metric_history(destination.run_id, key)) == len(run.windows)
    return [window.first_step for window in run.windows]


def _sent(*windows: RawWindow) -> tuple[Delivery, ...]:
    return tuple(Delivery(name=window.name, state=DeliveryState.SENT) for window in windows)


# --- where all is well


def test_submitted_windows_arrive_in_their_run_and_leave_the_outbox(
    outbox: Outbox, start: Start, mlflow_sqlite: str
) -> None:
    destination = _new_run(mlflow_sqlite)
    worker = start(destination)
    windows = [seal(outbox, window_facts(step), destination) for step in (10, 20)]
    for window in windows:
        worker.submit(window)
    assert worker.drain(LONG_S).deliveries == _sent(*windows)
    assert _windows_in(destination) == [10, 20]
    assert visible_files(outbox.root) == ["tags.lock"]


def test_credentials_reach_the_worker_and_not_the_disk(
    outbox: Outbox, start: Start, mlflow_server: str
) -> None:
    plain = _new_run(mlflow_server)
    secret = Destination(
        run_id=plain.run_id, tracking_uri=mlflow_server.replace("http://", "http://user:secret@")
    )
    worker = start(secret)
    window = seal(outbox, window_facts(10), secret)
    kept = b"".join(path.read_bytes() for path in outbox.root.rglob("*") if path.is_file())
    worker.submit(window)
    assert worker.drain(LONG_S).deliveries == _sent(window)
    assert b"secret" not in kept
    assert worker.pid is not None
    assert b"secret" not in Path(f"/proc/{worker.pid}/cmdline").read_bytes()


@linux_only
def test_the_environment_of_the_training_is_not_changed_and_that_of_the_worker_ends_requests_in_time(
    start: Start, mlflow_sqlite: str
) -> None:
    before = dict(os.environ)
    worker = start(_new_run(mlflow_sqlite), 9.0)
    assert dict(os.environ) == before
    of_worker = Path(f"/proc/{worker.pid}/environ").read_bytes().decode().split("\0")
    assert {"MLFLOW_HTTP_REQUEST_TIMEOUT=3", "MLFLOW_HTTP_REQUEST_MAX_RETRIES=1"} <= set(of_worker)
    assert {"MLFLOW_DISABLE_TELEMETRY=true", "DO_NOT_TRACK=true"} <= set(of_worker)


def test_the_handle_loads_no_analysis_into_the_training() -> None:
    program = (
        "import sys, tlk_tracking.delivery.worker;"
        "print([name for name in ('numpy', 'pandas', 'pyarrow', 'mlflow', 'torch') if name in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert printed == "[]\n"


@linux_only
def test_the_worker_never_loads_torch(outbox: Outbox, start: Start, mlflow_sqlite: str) -> None:
    destination = _new_run(mlflow_sqlite)
    worker = start(destination)
    worker.submit(seal(outbox, window_facts(10), destination))
    worker.drain(LONG_S)
    assert "libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text()


def test_the_worker_prints_nothing_into_the_terminal(
    outbox: Outbox, start: Start, mlflow_server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    destination = _new_run(mlflow_server)
    worker = start(destination)
    worker.submit(seal(outbox, window_facts(10), destination))
    worker.drain(LONG_S)
    _end(worker)
    assert tuple(capfd.readouterr()) == ("", "")


def test_two_workers_on_one_outbox_send_each_window_once(
    outbox: Outbox, start: Start, mlflow_server: str
) -> None:
    destination = _new_run(mlflow_server)
    workers = [start(destination), start(destination)]
    windows = [seal(outbox, window_facts(step), destination) for step in (10, 20, 30)]
    for window in windows:
        for worker in workers:
            worker.submit(window)
    for worker in workers:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the other works on is not this one's to send
            worker.drain(LONG_S)
    for entry in outbox.entries():
        send(outbox, entry)
    assert _windows_in(destination) == [10, 20, 30]
    assert (outbox.raw_windows(), outbox.entries()) == ((), ())


# --- where the server fails


@pytest.fixture
def proxy(mlflow_server: str) -> Iterator[FaultProxy]:
    with fault_proxy(mlflow_server) as proxy:
        yield proxy


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE])
def test_what_a_fault_kept_back_stays_whole_and_arrives_once_later(
    outbox: Outbox, start: Start, proxy: FaultProxy, fault: Fault
) -> None:
    destination = _new_run(proxy.uri)
    worker = start(destination, 4.0)
    window = seal(outbox, window_facts(10), destination)
    proxy.fault = fault
    worker.submit(window)
    with pytest.warns(UserWarning, match="1 of 1 windows") as warned:
        (delivery,) = worker.drain(LONG_S).deliveries
    assert (delivery.state, delivery.folder) == (DeliveryState.SAVED, outbox.entry(window.name).folder)
    assert len(warned) == 1
    assert f"Their files are in {outbox.root}; `tlk upload --outbox {outbox.root}`" in str(warned[0].message)
    load_annotation(outbox.entry(window.name).annotation_folder)
    _end(worker)
    proxy.fault = Fault.NONE
    assert send(outbox, outbox.entry(window.name)).state is DeliveryState.SENT
    assert send(outbox, outbox.entry(window.name)).state is DeliveryState.GONE
    assert _windows_in(destination) == [10]
    assert visible_files(outbox.root) == ["tags.lock"]


def test_a_deleted_run_keeps_its_windows_until_it_is_restored(
    outbox: Outbox, start: Start, mlflow_server: str
) -> None:
    destination = _new_run(mlflow_server)
    client = MlflowClient(tracking_uri=mlflow_server)
    client.delete_run(destination.run_id)
    worker = start(destination)
    window = seal(outbox, window_facts(10), destination)
    worker.submit(window)
    with pytest.warns(UserWarning, match="are not in their MLflow run yet"):
        worker.drain(LONG_S)
    client.restore_run(destination.run_id)
    assert send(outbox, outbox.entry(window.name)).state is DeliveryState.SENT
    assert _windows_in(destination) == [10]


def test_a_run_that_does_not_exist_is_not_promised_an_upload(
    outbox: Outbox, start: Start, mlflow_sqlite: str
) -> None:
    destination = Destination(run_id="a" * 32, tracking_uri=mlflow_sqlite)
    worker = start(destination)
    worker.submit(seal(outbox, window_facts(10), destination))
    with pytest.warns(UserWarning, match="there is no such run, so send each by") as warned:
        worker.drain(LONG_S)
    (warning,) = warned
    assert "tlk upload" not in str(warning.message)
    assert linecache.getline(warning.filename, warning.lineno) == ""


def test_what_failed_is_sent_when_a_later_window_gets_through(
    outbox: Outbox, start: Start, proxy: FaultProxy
) -> None:
    destination = _new_run(proxy.uri)
    worker = start(destination)
    windows = [seal(outbox, window_facts(step), destination) for step in (10, 20)]
    proxy.fault = Fault.STATUS_401
    worker.submit(windows[0])
    with pytest.warns(UserWarning, match="1 of 1 windows"):
        worker.drain(LONG_S)
    proxy.fault = Fault.NONE
    worker.submit(windows[1])
    assert worker.drain(LONG_S).deliveries[1] == _sent(windows[1])[0]
    worker.close()
    _join_readers()
    assert _windows_in(destination) == [10, 20]


def test_a_failure_is_warned_of_once(outbox: Outbox, start: Start, proxy: FaultProxy) -> None:
    destination = _new_run(proxy.uri)
    worker = start(destination)
    proxy.fault = Fault.STATUS_401
    worker.submit(seal(outbox, window_facts(10), destination))
    with pytest.warns(UserWarning, match="1 of 1 windows"):
        worker.drain(LONG_S)
    worker.drain(LONG_S)  # a second warning would be an error


def test_a_warning_that_is_an_error_does_not_end_the_training(
    outbox: Outbox, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(None)
    worker.submit(seal(outbox, window_facts(10), None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worker.drain(LONG_S)
    assert "it belongs to no MLflow run" in caplog.text


# --- where the worker fails


def test_a_worker_that_is_killed_is_replaced_and_the_window_arrives(
    outbox: Outbox, start: Start, mlflow_sqlite: str
) -> None:
    destination = _new_run(mlflow_sqlite)
    worker = start(destination)
    window = seal(outbox, window_facts(10), destination)
    first = worker.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    worker.submit(window)
    assert worker.drain(LONG_S).deliveries == _sent(window)
    assert worker.pid != first
    assert _windows_in(destination) == [10]


def test_a_worker_that_always_dies_is_given_up_and_the_window_stays(
    outbox: Outbox, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carriers, "_PROGRAM", "tlk_tracking.not_there")
    destination = Destination(run_id="a" * 32, tracking_uri="http://127.0.0.1:1")
    worker = start(destination)
    window = seal(outbox, window_facts(10), destination)
    worker.submit(window)
    with pytest.warns(UserWarning, match="the window worker ended"):
        (delivery,) = worker.drain(LONG_S).deliveries
    assert (delivery.state, delivery.folder) == (DeliveryState.RAW, window.folder)
    _join_readers()


def test_a_window_that_cannot_be_annotated_stays_and_the_others_go_on(
    outbox: Outbox, start: Start, mlflow_sqlite: str
) -> None:
    destination = _new_run(mlflow_sqlite)
    worker = start(destination)
    folder = outbox.open_window()
    (folder / TRACE_FILE).write_text("no trace")
    broken = outbox.seal_window(folder, window_facts(10), destination)
    good = seal(outbox, window_facts(20), destination)
    worker.submit(broken)
    worker.submit(good)
    with pytest.warns(
        UserWarning, match="1 of 2 windows of kernel telemetry are not in their MLflow run yet"
    ):
        first, second = worker.drain(LONG_S).deliveries
    assert (first.state, first.folder, second) == (DeliveryState.RAW, broken.folder, *_sent(good))


def test_a_worker_that_does_not_read_does_not_hold_the_training(
    outbox: Outbox, start: Start, mlflow_sqlite: str
) -> None:
    destination = _new_run(mlflow_sqlite)
    worker = start(destination)
    window = seal(outbox, window_facts(10), destination)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    for _ in range(3000):  # more than a pipe holds
        worker.submit(window)
    with pytest.warns(UserWarning, match=r"not done within 0\.1 s"):
        worker.drain(0.1)


def test_a_drain_waits_no_longer_than_it_may_and_the_worker_goes_on(
    outbox: Outbox, start: Start, mlflow_sqlite: str
) -> None:
    destination = _new_run(mlflow_sqlite)
    worker = start(destination)
    window = seal(outbox, window_facts(10), destination)
    worker.submit(window)
    with pytest.warns(UserWarning, match="not done within 0 s"):
        (delivery,) = worker.drain(0.0).deliveries
    assert (delivery.state, delivery.folder) == (DeliveryState.RAW, window.folder)
    worker.close()
    _join_readers()
    assert _windows_in(destination) == [10]


# --- where there is no process


def test_where_no_process_can_be_started_a_thread_does_the_work(
    outbox: Outbox, start: Start, mlflow_sqlite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    destination = _new_run(mlflow_sqlite)
    worker = start(destination)
    window = seal(outbox, window_facts(10), destination)
    worker.submit(window)
    assert (worker.drain(LONG_S).deliveries, worker.pid) == (_sent(window), None)
    assert _windows_in(destination) == [10]


def test_in_a_notebook_a_thread_does_the_work(
    outbox: Outbox, start: Start, mlflow_sqlite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]  # stands for the module
    destination = _new_run(mlflow_sqlite)
    worker = start(destination)
    window = seal(outbox, window_facts(10), destination)
    worker.submit(window)
    assert (worker.drain(LONG_S).deliveries, worker.pid) == (_sent(window), None)


def test_a_database_in_memory_is_written_by_the_thread_that_made_it(
    outbox: Outbox, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    destination = _new_run("sqlite:///:memory:")
    worker = start(destination)
    window = seal(outbox, window_facts(10), destination)
    worker.submit(window)
    assert worker.drain(LONG_S).deliveries == _sent(window)
    assert _windows_in(destination) == [10]


# --- the end


def test_a_closed_worker_ends_and_leaves_no_zombie(start: Start, mlflow_sqlite: str) -> None:
    worker = start(_new_run(mlflow_sqlite))
    pid = worker.pid
    assert pid is not None
    worker.close()
    worker.close()
    _join_readers()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_closed_worker_takes_no_more_windows_and_says_so(
    outbox: Outbox, start: Start, mlflow_sqlite: str
) -> None:
    destination = _new_run(mlflow_sqlite)
    worker = start(destination)
    worker.close()
    window = seal(outbox, window_facts(10), destination)
    worker.submit(window)
    assert worker.drain(LONG_S).deliveries == ()
    assert outbox.raw_windows() == (window,)
    _join_readers()


def test_signals_of_the_terminal_and_the_scheduler_do_not_end_the_worker(
    outbox: Outbox, start: Start, mlflow_sqlite: str
) -> None:
    destination = _new_run(mlflow_sqlite)
    worker = start(destination)
    windows = [seal(outbox, window_facts(step), destination) for step in (10, 20)]
    worker.submit(windows[0])
    worker.drain(LONG_S)
    pid = worker.pid
    assert pid is not None
    assert os.getsid(pid) == pid
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    worker.submit(windows[1])
    assert (worker.drain(LONG_S).deliveries, worker.pid) == (_sent(*windows), pid)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 and later, of threads
def test_a_forked_child_leaves_the_worker_to_its_parent(
    outbox: Outbox, start: Start, mlflow_sqlite: str
) -> None:
    destination = _new_run(mlflow_sqlite)
    worker = start(destination)
    window = seal(outbox, window_facts(10), destination)
    child = os.fork()
    if child == 0:
        worker.submit(window)
        worker.drain(LONG_S)
        worker.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    worker.submit(window)
    assert worker.drain(LONG_S).deliveries == _sent(window)


_KILLED_TRAINING = """
import json, os, signal, sys
from pathlib import Path
from outboxes import seal, window_facts
from tlk_tracking.tracking.tracking_uri import Destination
from tlk_tracking.delivery.outbox import Outbox
from tlk_tracking.delivery.worker import WindowWorker

root, run_id, tracking_uri, holds_pipe = json.loads(sys.argv[1])
outbox, destination = Outbox(Path(root)), Destination(run_id=run_id, tracking_uri=tracking_uri)
worker = WindowWorker(outbox, destination, upload_timeout_s=60.0)
worker.start()
for step in (10, 20):
    worker.submit(seal(outbox, window_facts(step), destination))
if holds_pipe and os.fork() == 0:  # as a loader's process that outlives its parent
    os.close(1)
    signal.pause()
    os._exit(0)
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@linux_only
@pytest.mark.parametrize("holds_pipe", [False, True])
def test_a_worker_whose_training_is_killed_sends_what_it_holds_and_ends(
    outbox: Outbox, mlflow_sqlite: str, holds_pipe: bool
) -> None:
    destination = _new_run(mlflow_sqlite)
    arguments = json.dumps([str(outbox.root), destination.run_id, destination.tracking_uri, holds_pipe])
    training = subprocess.Popen(
        [sys.executable, "-c", _KILLED_TRAINING, arguments],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=environment_with_tests(),
    )
    with training:
        assert training.stdout is not None
        worker_pid = int(training.stdout.readline())
        # A descriptor of the process itself becomes readable when it ends, however it does.
        worker = os.pidfd_open(worker_pid)
        try:
            assert select.select([worker], [], [], LONG_S)[0]
        finally:
            os.close(worker)
        os.killpg(training.pid, signal.SIGKILL) if holds_pipe else None
    assert _windows_in(destination) == [10, 20]
    assert visible_files(outbox.root) == ["tags.lock"]


# --- settling and sending


def test_what_another_process_works_on_is_left_to_it(outbox: Outbox, mlflow_sqlite: str) -> None:
    destination = _new_run(mlflow_sqlite)
    window = seal(outbox, window_facts(10), destination)
    with outbox.claim(window):
        assert settle(outbox, window) == Delivery(
            name=window.name,
            state=DeliveryState.RAW,
            folder=window.folder,
            reason="another process works on it",
        )
    settle(outbox, window)
    entry = outbox.entry(window.name)
    with outbox.claim(entry):
        assert send(outbox, entry).reason == "another process works on it"
    assert send(outbox, entry).state is DeliveryState.SENT


def test_an_annotation_stands_before_its_report_is_drawn_and_before_mlflow_is_loaded(
    outbox: Outbox, tmp_path: Path
) -> None:
    window = seal(outbox, window_facts(10), Destination(run_id="a", tracking_uri="sqlite:///no.db"))
    program = (
        "import sys; from pathlib import Path; from tlk_tracking.delivery.delivery_loop import settle;"
        "from tlk_tracking.delivery.outbox import Outbox; outbox = Outbox(Path(sys.argv[1]));"
        "print(settle(outbox, outbox.raw_window(sys.argv[2])).state);"
        "print([name for name in ('mlflow', 'matplotlib') if name in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program, str(outbox.root), window.name],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    annotation = outbox.entry(window.name).annotation_folder
    assert printed == "saved\n[]\n"
    assert load_annotation(annotation).manifest.window.first_step == 10
    assert not (annotation / REPORT_FILE).exists()


def test_a_window_that_cannot_be_sent_has_its_report_in_the_outbox(outbox: Outbox, tmp_path: Path) -> None:
    window = seal(
        outbox, window_facts(10), Destination(run_id="a", tracking_uri=f"sqlite:///{tmp_path}/no.db")
    )
    settle(outbox, window)
    entry = outbox.entry(window.name)
    assert send(outbox, entry).state is DeliveryState.SAVED
    assert sorted(path.name for path in entry.annotation_folder.iterdir()) == sorted(
        (*TABLE_FILES, SUMMARY_FILE, MODULES_FILE, MANIFEST_FILE, REPORT_FILE)
    )


def test_a_report_that_is_there_is_sent_as_it_is(outbox: Outbox, mlflow_sqlite: str) -> None:
    destination = _new_run(mlflow_sqlite)
    window = seal(outbox, window_facts(10), destination)
    settle(outbox, window)
    entry = outbox.entry(window.name)
    folder = entry.annotation_folder
    (folder / REPORT_FILE).write_text("drawn before")
    artifact = "/".join(("kernel_telemetry", *folder.parts[-2:], REPORT_FILE))
    assert send(outbox, entry).state is DeliveryState.SENT
    client = MlflowClient(tracking_uri=mlflow_sqlite)
    assert Path(client.download_artifacts(destination.run_id, artifact)).read_text() == "drawn before"


def test_getting_ready_for_a_store_that_is_not_there_makes_none(tmp_path: Path) -> None:
    get_ready(f"sqlite:///{tmp_path}/no.db")
    assert list(tmp_path.iterdir()) == []

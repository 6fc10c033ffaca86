from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from mlflow import MlflowClient
from outboxes import environment_with_tests, seal, visible_files, window_facts
from soak_figures import tell

from tlk_tracking.cli import tlk
from tlk_tracking.delivery.delivery_loop import send, settle
from tlk_tracking.delivery.outbox import TRACE_FILE, Outbox
from tlk_tracking.tracking.mlflow_tracking import load_run
from tlk_tracking.tracking.tracking_uri import Destination, request_limits


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "kernel_telemetry_outbox")


@pytest.fixture
def destination(mlflow_sqlite: str) -> Destination:
    return _new_run(mlflow_sqlite)


def _new_run(tracking_uri: str) -> Destination:
    client = MlflowClient(tracking_uri=tracking_uri)
    run = client.create_run(client.create_experiment(uuid.uuid4().hex))
    return Destination(run_id=run.info.run_id, tracking_uri=tracking_uri)


def _upload(*arguments: str) -> Result:
    # What the command sets in its own process is taken back.
    return CliRunner(env=dict(request_limits(9.0))).invoke(tlk, ["upload", *arguments])


def _windows_in(destination: Destination) -> list[int]:
    return [window.first_step for window in load_run(destination.run_id, destination.tracking_uri).windows]


def test_raw_windows_and_annotations_are_sent_once(outbox: Outbox, destination: Destination) -> None:
    windows = [seal(outbox, window_facts(step), destination) for step in (10, 20)]
    settle(outbox, windows[0])
    first = _upload("--outbox", str(outbox.root))
    assert (first.exit_code, first.output.splitlines()) == (
        0,
        [*(f"sent  {window.name}" for window in windows), f"2 sent, 0 left in {outbox.root}"],
    )
    again = _upload("--outbox", str(outbox.root))
    assert (again.exit_code, again.output) == (0, f"0 sent, 0 left in {outbox.root}\n")
    assert _windows_in(destination) == [10, 20]
    client = MlflowClient(tracking_uri=destination.tracking_uri)
    assert len(client.get_metric_history(destination.run_id, "kernel_telemetry/steps_recorded")) == 2


def test_the_outbox_of_the_current_folder_is_the_default(
    outbox: Outbox, destination: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(outbox, window_facts(10), destination)
    monkeypatch.chdir(outbox.root.parent)
    assert _upload().exit_code == 0
    assert _windows_in(destination) == [10]


def test_a_relative_store_is_found_from_another_folder(
    outbox: Outbox, destination: Destination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(
        outbox,
        window_facts(10),
        Destination(run_id=destination.run_id, tracking_uri="sqlite:///mlflow.db"),
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert _upload("--outbox", str(outbox.root)).exit_code == 0
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert _windows_in(destination) == [10]


def test_what_is_left_is_named_with_its_reason_and_the_rest_is_sent(
    outbox: Outbox, destination: Destination
) -> None:
    folder = outbox.open_window()
    (folder / TRACE_FILE).write_text("no trace")
    broken = outbox.seal_window(folder, window_facts(10), destination)
    homeless = seal(outbox, window_facts(20), None)
    lost = seal(
        outbox,
        window_facts(30),
        Destination(run_id="deadbeef" * 4, tracking_uri=destination.tracking_uri),
    )
    good = seal(outbox, window_facts(40), destination)
    result = _upload("--outbox", str(outbox.root))
    lines = {line.split(":")[0]: line for line in result.output.splitlines()}
    assert result.exit_code == 1
    assert set(lines) == {
        f"raw   {broken.name}",
        f"saved {homeless.name}",
        f"saved {lost.name}",
        f"sent  {good.name}",
        f"1 sent, 3 left in {outbox.root}",
    }
    assert "it belongs to no MLflow run" in lines[f"saved {homeless.name}"]
    assert "deadbeef…" in lines[f"saved {lost.name}"]
    assert _windows_in(destination) == [40]


def test_another_tracking_uri_may_be_given(outbox: Outbox, destination: Destination) -> None:
    moved = Destination(run_id=destination.run_id, tracking_uri="sqlite:////nowhere/moved.db")
    seal(outbox, window_facts(10), moved)
    assert "there is no MLflow store /nowhere/moved.db" in _upload("--outbox", str(outbox.root)).output
    result = _upload("--outbox", str(outbox.root), "--tracking-uri", destination.tracking_uri)
    assert result.exit_code == 0
    assert _windows_in(destination) == [10]


def test_where_credentials_were_left_out_a_failure_says_so(outbox: Outbox) -> None:
    secret = Destination(run_id="a" * 32, tracking_uri="postgresql://user:secret@127.0.0.1:1/mlflow")
    seal(outbox, window_facts(10), secret)
    result = _upload("--outbox", str(outbox.root))
    assert result.exit_code == 1
    assert "the outbox keeps no credentials; give the whole tracking URI" in result.output
    assert "secret" not in result.output


def test_a_folder_that_is_no_outbox_is_bad_usage(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert _upload("--outbox", str(folder)).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_half_is_taken_away(outbox: Outbox, destination: Destination) -> None:
    seal(outbox, window_facts(10), destination)
    half = outbox.root / "annotations" / ".partial-0123456789abcdef"
    half.mkdir()
    (half / "lock").touch()
    (outbox.root / "raw" / ".gone-0123456789abcdef").mkdir()
    assert _upload("--outbox", str(outbox.root)).exit_code == 0
    assert visible_files(outbox.root) == ["tags.lock"]


def test_a_window_that_another_process_works_on_is_left_to_it(
    outbox: Outbox, destination: Destination
) -> None:
    window = seal(outbox, window_facts(10), destination)
    with outbox.claim(window):
        result = _upload("--outbox", str(outbox.root))
    assert (result.exit_code, result.output.splitlines()[0]) == (
        1,
        f"raw   {window.name}: another process works on it",
    )


def test_several_uploads_at_once_send_each_window_once(outbox: Outbox, mlflow_server: str) -> None:
    destination = _new_run(mlflow_server)
    steps = list(range(10, 110, 10))
    for step in steps:
        seal(outbox, window_facts(step), destination)
    # Each with a file descriptor of its own, which is what the locks go by.
    uploads = [threading.Thread(target=_send_all, args=(Outbox(outbox.root),), daemon=True) for _ in range(3)]
    for upload in uploads:
        upload.start()
    for upload in uploads:
        upload.join()
    _send_all(outbox)
    assert _windows_in(destination) == steps
    client = MlflowClient(tracking_uri=mlflow_server)
    history = client.get_metric_history(destination.run_id, "kernel_telemetry/aten_calls")
    assert [point.step for point in sorted(history, key=lambda point: point.step)] == steps
    assert visible_files(outbox.root) == ["tags.lock"]


def _send_all(outbox: Outbox) -> None:
    for window in outbox.raw_windows():
        settle(outbox, window)
    for entry in outbox.entries():
        send(outbox, entry)


def test_names_with_control_characters_are_shown_inert(outbox: Outbox, destination: Destination) -> None:
    window = seal(outbox, window_facts(10), destination)
    window.folder.rename(window.folder.with_name("\x1b[2Jevil\u202e"))
    assert "\x1b" not in _upload("--outbox", str(outbox.root)).output


def test_the_limits_that_the_user_set_for_requests_stand(
    outbox: Outbox, destination: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(outbox, window_facts(10), destination)
    seen: list[str] = []
    monkeypatch.setattr(Outbox, "sweep", lambda self: seen.append(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]))
    CliRunner(env={**request_limits(9.0), "MLFLOW_HTTP_REQUEST_TIMEOUT": "77"}).invoke(
        tlk, ["upload", "--outbox", str(outbox.root)]
    )
    assert seen == ["77"]


# Kills a child of its own at many points of closing, annotating and sending a window; then uploads twice.
_KILLED_EVERYWHERE = """
import json, os, signal, sys, traceback
from pathlib import Path
import mlflow
from outboxes import seal, window_facts
from tlk_tracking.delivery.delivery_loop import send, settle
from tlk_tracking.tracking.tracking_uri import Destination
from tlk_tracking.delivery.outbox import DeliveryState, Outbox

root, run_id, tracking_uri, kills = json.loads(sys.argv[1])
outbox, destination = Outbox(Path(root)), Destination(run_id=run_id, tracking_uri=tracking_uri)

def in_child(work):
    child = os.fork()  # a database is opened in children alone: no connection is shared
    if child == 0:
        try:
            work()
        except BaseException:  # a forked child must not run on as a second pytest
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def window(step, die_at):
    left = [die_at]
    def hook(event, arguments):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    raw = seal(outbox, window_facts(step), destination)
    settle(outbox, raw)
    send(outbox, outbox.entry(raw.name))
    Path(root + ".events").write_text(str(die_at - left[0]))

def upload():
    outbox.sweep()
    for raw in outbox.raw_windows():
        assert settle(outbox, raw).state is DeliveryState.SAVED
    for entry in outbox.entries():
        delivery = send(outbox, entry)
        assert delivery.state is DeliveryState.SENT, delivery
    assert (outbox.raw_windows(), outbox.entries()) == ((), ())

assert in_child(lambda: window(0, 10**9)) == 0
events = int(Path(root + ".events").read_text())
kept = [0]
for number in range(kills):
    step = 10 * (number + 1)
    assert in_child(lambda: window(step, 1 + events * number // kills)) == -signal.SIGKILL
    if outbox.raw_windows() or outbox.entries():
        kept.append(step)
    assert in_child(lambda: (upload(), upload())) == 0
print(json.dumps(kept))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_whatever_was_kept_when_killed_is_uploaded_once(tmp_path: Path, destination: Destination) -> None:
    # scripts/soak kills more often.
    kills = int(os.environ.get("TLK_KILLS", "8"))
    arguments = [str(tmp_path / "killed"), destination.run_id, destination.tracking_uri, kills]
    done = subprocess.run(
        [sys.executable, "-c", _KILLED_EVERYWHERE, json.dumps(arguments)],
        capture_output=True,
        text=True,
        env=environment_with_tests(),
    )
    assert done.returncode == 0, done.stderr
    kept = set(json.loads(done.stdout))
    arrived = _windows_in(destination)
    tell("windows whose process is killed", kills=kills, kept=len(kept), arrived_once=len(set(arrived)))
    assert len(arrived) == len(set(arrived))
    assert kept <= set(arrived)
    client = MlflowClient(tracking_uri=destination.tracking_uri)
    for key in ("kernel_telemetry/steps_recorded", "kernel_telemetry/aten_calls"):
        history = client.get_metric_history(destination.run_id, key)
        assert sorted(point.step for point in history) == arrived

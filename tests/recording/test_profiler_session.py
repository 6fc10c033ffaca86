from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tlk_tracking.core.errors import RecordingError
from tlk_tracking.recording import profiler_session
from tlk_tracking.recording.profiler_session import ProfilerSession
from tlk_tracking.recording.torch_private import NamedRange, profiled_here, profiler_flag

_made: list[ProfilerSession] = []


@pytest.fixture(autouse=True)
def _close_all() -> Iterator[None]:
    """Close what a failed test left open, so that the next one is judged by itself."""
    yield
    while _made:
        _made.pop().close()


def session() -> ProfilerSession:
    made = ProfilerSession(device=False, synchronize=True)
    _made.append(made)
    return made


def started() -> ProfilerSession:
    made = session()
    made.prepare(steps=1)
    made.start()
    return made


def theirs() -> profile:
    return profile(activities=[ProfilerActivity.CPU])


def record(opened: profile) -> int:
    """Return how many calls of one operator somebody's own profiler saw."""
    torch.ones(2).neg()
    opened.stop()
    assert opened.profiler is not None
    assert opened.profiler.kineto_results is not None
    return [event.name() for event in opened.profiler.kineto_results.events()].count("aten::neg")


def a_plain_session_works() -> bool:
    opened = theirs()
    opened.start()
    return record(opened) == 1 and not profiler_flag() and not profiled_here()


def names(trace: Path) -> list[str]:
    return [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]


def in_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_what_runs_between_start_and_stop_is_in_the_trace(tmp_path: Path) -> None:
    made = session()
    made.prepare(steps=2)
    with NamedRange("before"):
        pass
    made.start()
    with NamedRange("inside"):
        pass
    made.stop(tmp_path / "trace.json")
    found = names(tmp_path / "trace.json")
    assert ("inside" in found, "before" in found) == (True, False)
    assert a_plain_session_works()


@pytest.mark.parametrize("prepared", [False, True])
def test_closing_is_idempotent_in_any_state(prepared: bool) -> None:
    made = session()
    if prepared:
        made.prepare(steps=1)
    made.close()
    made.close()
    assert a_plain_session_works()


def test_a_closed_recording_leaves_the_next_session_alone(tmp_path: Path) -> None:
    made = started()
    made.close()
    again = started()
    made.close()
    assert again.running
    again.stop(tmp_path / "trace.json")
    assert a_plain_session_works()


def test_one_session_at_a_time_in_a_process() -> None:
    made = started()
    with pytest.raises(RecordingError, match="another window of this process is open"):
        session().prepare(steps=1)
    failures: list[Exception] = []

    def elsewhere() -> None:
        try:
            session().prepare(steps=1)
        except RecordingError as error:
            failures.append(error)

    in_thread(elsewhere)
    assert len(failures) == 1
    assert made.running
    made.close()
    assert a_plain_session_works()


def test_another_profiler_that_runs_is_left_alone() -> None:
    opened = theirs()
    opened.start()
    with pytest.raises(RecordingError, match="another torch profiler is running"):
        session().prepare(steps=1)
    assert record(opened) == 1


def test_a_scheduled_profiler_that_comes_to_its_warm_up_is_left_alone() -> None:
    opened = profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=2, warmup=1, active=1))
    opened.start()
    ours = session()
    ours.prepare(steps=1)
    with pytest.raises(RecordingError, match=r"torch\.profiler\.profile object with a schedule"):
        ours.start()
    opened.stop()
    del opened
    started().close()
    assert a_plain_session_works()


def test_another_profiler_that_comes_and_goes_in_our_warm_up_costs_nothing(tmp_path: Path) -> None:
    made = session()
    made.prepare(steps=1)
    assert a_plain_session_works()
    made.start()
    with NamedRange("inside"):
        pass
    made.stop(tmp_path / "trace.json")
    assert "inside" in names(tmp_path / "trace.json")


def test_another_profiler_that_begins_in_our_warm_up_keeps_its_session() -> None:
    made = session()
    made.prepare(steps=1)
    opened = theirs()
    opened.start()
    with pytest.raises(RecordingError, match="another torch profiler is running"):
        made.start()
    made.close()
    assert record(opened) == 1
    assert a_plain_session_works()


def test_another_profiler_that_begins_while_we_record_keeps_its_session(tmp_path: Path) -> None:
    made = started()
    opened = theirs()
    opened.start()
    assert not made.running
    with pytest.raises(RecordingError, match="took the session over"):
        made.stop(tmp_path / "trace.json")
    assert record(opened) == 1
    assert a_plain_session_works()


def test_a_session_that_was_taken_over_and_left_is_cleared_away(tmp_path: Path) -> None:
    made = started()
    opened = theirs()
    opened.start()
    assert record(opened) == 1
    with pytest.raises(RecordingError, match="took the session over"):
        made.stop(tmp_path / "trace.json")
    assert a_plain_session_works()


def test_a_session_that_another_threads_profiler_met_is_whole_or_cleared_away(tmp_path: Path) -> None:
    made = started()
    met: list[object] = []

    def use_their_own() -> None:
        opened = theirs()
        try:
            opened.start()
            met.append(record(opened))
        except RuntimeError as error:
            met.append(str(error))

    in_thread(use_their_own)
    # torch 2.11 lets no second thread begin while a session of another thread is on, whosever that is.
    kept = met == ["Can't disable Kineto profiler when it's not running"]
    assert kept or met == [1]
    with contextlib.nullcontext() if kept else pytest.raises(RecordingError, match="took the session over"):
        made.stop(tmp_path / "trace.json")
    assert a_plain_session_works()


def test_another_thread_leaves_the_session_to_its_owner(tmp_path: Path) -> None:
    made = started()
    in_thread(made.close)
    assert made.running
    made.stop(tmp_path / "trace.json")
    assert a_plain_session_works()


def test_a_session_whose_thread_is_gone_can_be_closed() -> None:
    made = session()

    def begin() -> None:
        made.prepare(steps=1)
        made.start()

    in_thread(begin)
    made.close()
    assert a_plain_session_works()


@pytest.mark.parametrize("part", ["prepare_trace", "start_trace", "stop_trace"])
def test_whatever_torch_raises_the_next_window_finds_the_place_free(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = getattr(profile, part)

    def refuse_once(self: profile) -> None:
        monkeypatch.setattr(profile, part, real)
        raise RuntimeError("no CUPTI today")

    monkeypatch.setattr(profile, part, refuse_once)
    made = session()
    made.prepare(steps=1)
    with contextlib.suppress(RuntimeError):
        made.start()
        made.stop(tmp_path / "trace.json")
    assert getattr(profile, part) is real
    assert not profiled_here()
    assert not profiler_flag()
    made.close()
    started().close()
    assert a_plain_session_works()


def test_a_session_makes_torch_warn_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch 2.11 gives its advice once in a process, to whoever is first.
    monkeypatch.setattr(torch.profiler.profiler, "_WARNINGS_SHOWN", set(), raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        started().stop(tmp_path / "trace.json")


def test_no_event_is_made_a_python_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.autograd.profiler.profile, "_ensure_function_events", lambda _: pytest.fail("events are made")
    )
    started().stop(tmp_path / "trace.json")


def test_no_session_begins_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = session()
    made.prepare(steps=1)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RecordingError, match="CUDA graph is being captured"):
            made.start()
        with pytest.raises(RecordingError, match="CUDA graph is being captured"):
            session().prepare(steps=1)
    assert a_plain_session_works()


def test_the_first_session_of_a_process_is_run_once_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[profile] = []

    def make(self: ProfilerSession) -> profile:  # as on a GPU, of which there may be none here
        begun.append(theirs())
        return begun[-1]

    monkeypatch.setattr(profiler_session, "_is_warm", False)
    monkeypatch.setattr(ProfilerSession, "_make_profile", make)
    for expected in ([1, 2], [2, 3]):
        made = ProfilerSession(device=True, synchronize=False)
        _made.append(made)
        made.prepare(steps=1)
        assert (len(begun), profiled_here(), profiler_flag()) == (expected[0], False, False)
        assert a_plain_session_works()
        made.start()
        assert (len(begun), made.running) == (expected[1], True)
        made.stop(tmp_path / "trace.json")
    assert a_plain_session_works()

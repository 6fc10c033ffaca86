"""Own torch.profiler: reserve, start, stop, write the trace; never disturb a profiler that is not ours."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from enum import Enum, auto
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from tlk_tracking.core.errors import RecordingError
from tlk_tracking.recording.torch_private import (
    RUNNING,
    profiled_here,
    profiler_flag,
    session_options,
    set_profiler_flag,
)

# Another profiler's schedule may count more than one step of its own in a step of the fit (Lightning's does).
_STEPS_OF_OTHERS = 4


class _State(Enum):
    NEW = auto()
    STARTING = auto()
    RUNNING = auto()
    CLOSED = auto()


class ProfilerSession:
    """One session of torch.profiler; the only place that starts or stops it.

    A process has one of these open at a time. Torch keeps one session for a whole process. A second one silently gets
    the first one's events, and stopping a session that was taken over can even crash; so a session that finds another
    profiler's traces leaves everything alone. Where one is merely prepared, torch 2.11 lets no other begin, in the
    user's own code: ours is prepared only in the moment in which it starts.
    """

    def __init__(self, *, device: bool, synchronize: bool) -> None:
        self._device = device
        self._synchronize = synchronize and device
        self._state = _State.NEW
        self._profile: profile | None = None
        self._stopped: profile | None = None
        self._steps = 0
        self._owner = threading.get_ident()
        self._process = os.getpid()

    @property
    def running(self) -> bool:
        """Whether the session is recording, and still ours."""
        return self._state is _State.RUNNING and profiler_flag() is RUNNING

    def prepare(self, *, steps: int) -> None:
        """Get ready, without recording, for a session that will be over after `steps` steps.

        Raises:
            RecordingError: another profiler runs, or another window of this process is open.
        """
        self._steps = steps
        self._refuse_if_busy()
        if _OPEN.setdefault(_ONLY_ONE, self) is not self:
            raise RecordingError("another window of this process is open; one is recorded at a time")
        try:
            self._warm_up()
        except BaseException:  # tidied up, then raised on
            self.close()
            raise

    def start(self) -> None:
        """Begin to record, with nothing queued on the device if `synchronize` was asked for.

        Raises:
            RecordingError: another profiler runs or will before the session ends, or a CUDA graph is being captured.
        """
        try:
            self._refuse_if_busy()
            self._refuse_if_scheduled()
            if self._synchronize:
                torch.cuda.synchronize()
            self._begin()
        except BaseException:  # tidied up, then raised on
            self.close()
            raise

    def stop(self, trace: Path) -> None:
        """Stop recording after all that was launched has run, and write the Chrome trace.

        Interrupted by a Ctrl-C, it can be called again.

        Raises:
            RecordingError: another profiler took the session over; what it recorded is lost.
        """
        if self._synchronize and self.running:
            torch.cuda.synchronize()
        self.stop_unsynchronized(trace)

    def stop_unsynchronized(self, trace: Path) -> None:
        """Stop recording and write what there is: the way out when training raised. Errors as `stop`."""
        if self._stopped is None:
            if not self.running:
                self.close()
                raise RecordingError("another torch profiler took the session over; nothing of it is left")
            self._stopped = self._profile
        stopped = self._stopped
        assert stopped is not None
        self.close()
        stopped.export_chrome_trace(str(trace))

    def forget(self) -> None:
        """Let go of what was recorded: torch's object is a cycle and may live on for long."""
        stopped, self._stopped = self._stopped, None
        if stopped is not None:
            stopped.profiler = None
            stopped.action_map.clear()

    def close(self) -> None:
        """Stop without a trace, whatever the state; does nothing the second time, and nothing to another's profiler.

        Only the thread that prepared the session can stop it. Called from another one while that lives, it
        leaves the session to it.
        """
        if os.getpid() != self._process:
            return  # a forked child has a copy of this object, not the session
        orphaned = self._owner not in {thread.ident for thread in threading.enumerate()}
        if threading.get_ident() != self._owner and not orphaned:
            return
        try:
            # Torch may be unable to stop what another profiler took; all that is left to do then is to leave.
            with contextlib.suppress(RuntimeError):
                self._end(orphaned=orphaned)
        except BaseException:  # tidied up, then raised on
            if not profiled_here():
                self._leave()  # else a Ctrl-C, say, came before torch had stopped: whoever closes next stops it
            raise
        self._leave()

    def _warm_up(self) -> None:
        """Run a session for nothing, once in a process: the first one is slow and can miss the first kernels."""
        global _is_warm
        if not _is_warm and self._device:
            self._refuse_if_scheduled()
            self._begin()
            if self._synchronize:
                torch.cuda.synchronize()
            self._end(orphaned=False)
            self._state = _State.NEW
            _is_warm = True

    def _begin(self) -> None:
        self._state = _State.STARTING
        self._profile = opened = self._make_profile()
        try:
            opened.prepare_trace()
        except RuntimeError:
            self._profile = None  # torch refuses: another one is prepared, and that one is not to be stopped
            raise
        opened.start_trace()
        set_profiler_flag(RUNNING)
        self._state = _State.RUNNING

    def _end(self, *, orphaned: bool) -> None:
        """Stop what is on of our session in torch."""
        opened, flag = self._profile, profiler_flag()
        if opened is None or self._state not in (_State.STARTING, _State.RUNNING):
            return
        ours = flag is RUNNING or self._state is _State.STARTING
        if flag and not ours:
            return  # another one runs: what torch held of our session went when that one began
        if orphaned or not ours:
            # It went with its thread, or with one that ran inside ours. To stop it now would crash; a session
            # prepared anew can be stopped.
            opened = self._make_profile()
            with contextlib.suppress(RuntimeError):  # torch 2.11 finds nothing to stop here, and goes on
                opened.prepare_trace()
        if not profiled_here():
            if opened.profiler is None:
                return  # an interrupt came before torch had prepared anything
            opened.start_trace()
        try:
            _stop_without_synchronizing(opened)
        except BaseException:  # tidied up, then raised on
            if profiled_here():  # a Ctrl-C, say, that came before torch had stopped
                _stop_without_synchronizing(opened)
            raise

    def _make_profile(self) -> profile:
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if self._device else [ProfilerActivity.CPU]
        # acc_events: without it torch 2.11 warns the user of how sessions follow each other. Taken back at the end.
        return profile(activities=activities, experimental_config=session_options(), acc_events=True)

    def _refuse_if_busy(self) -> None:
        if profiler_flag() is RUNNING:
            raise RecordingError("another window of this process is open; one is recorded at a time")
        if profiler_flag():
            raise RecordingError("another torch profiler is running; it is left alone")
        if is_capturing():
            raise RecordingError("a CUDA graph is being captured; no session is begun meanwhile")

    def _refuse_if_scheduled(self) -> None:
        if _another_is_scheduled(self._steps):
            raise RecordingError(
                "a torch.profiler.profile object with a schedule is in its warm-up or comes to it soon; "
                "it is left alone (delete the object when it is done with)"
            )

    def _leave(self) -> None:
        self._state = _State.CLOSED
        self._profile = None
        if _OPEN.get(_ONLY_ONE) is self:
            if profiler_flag() is RUNNING:
                set_profiler_flag(False)
            # Last, and at once: after a Ctrl-C before it, whoever closes next comes here again.
            del _OPEN[_ONLY_ONE]


def is_capturing() -> bool:
    """Return whether the current CUDA stream is being captured into a graph."""
    if not torch.cuda.is_available():
        return False
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return begun and torch.cuda.is_current_stream_capturing()


def _another_is_scheduled(steps: int) -> bool:
    """Return whether a scheduled profiler of somebody else would meet a session of `steps` steps.

    Torch does not tell that a session is prepared, and one that is prepared inside another crashes when it stops;
    so every living profiler object is asked for its plan. Some 50 ms where 500,000 objects live, once a window.
    """
    if not _any_scheduled(steps):
        return False
    gc.collect()  # a profiler object is a cycle: one that is done with is still there until now
    return _any_scheduled(steps)


def _any_scheduled(steps: int) -> bool:
    kinds = {profile, *profile.__subclasses__()}
    for found in [each for each in gc.get_objects() if type(each) in kinds]:
        # A profiler that is still being made has no schedule yet.
        if vars(found).get("record_steps"):
            ahead = range(found.step_num, found.step_num + _STEPS_OF_OTHERS * (steps + 1))
            if any(found.schedule(step) is not ProfilerAction.NONE for step in ahead):
                return True
    return False


def _stop_without_synchronizing(opened: profile) -> None:
    # torch synchronizes the device on its way out. Where that is wanted it has been done; after an error it can
    # raise, and then the session would never be stopped.
    if opened.profiler is not None:
        opened.profiler.use_device = None
        opened.profiler.acc_events = False  # it would make a Python object of each event
    opened.stop_trace()


# The session that is open in this process. To take its place is one step for the interpreter, and so is to leave it.
_ONLY_ONE = "session"
_OPEN: dict[str, ProfilerSession] = {}
_is_warm = False

"""Record the windows of one fit and hand each to the window worker (steps of a training loop -> raw windows)."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tlk_tracking.attribution.fused_notes import encode_window_notes
from tlk_tracking.core.errors import RecordingError, TlkError
from tlk_tracking.core.records import (
    Environment,
    Phase,
    RecordingRanks,
    StepOutcome,
    WindowFacts,
    WindowSource,
)
from tlk_tracking.delivery.outbox import CALLS_FILE, GRAPHS_FILE, TRACE_FILE, Outbox, RawWindow
from tlk_tracking.delivery.worker import WindowWorker
from tlk_tracking.recording.call_markers import call_table
from tlk_tracking.recording.fused_kernels import FusedKernels
from tlk_tracking.recording.schedule import StepAction, WindowProgress, WindowSchedule, decide, next_due
from tlk_tracking.recording.window_recorder import (
    RecordedWindow,
    WindowPlan,
    WindowRecorder,
    session_id,
    skipped_window,
)
from tlk_tracking.tracking.tracking_uri import Destination

NEVER = sys.maxsize

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitFacts:
    """What is the same for every window of a fit.

    Attributes:
        token: drawn afresh for each fit and shared by its ranks; sessions are made from it.
        base: the dispatch modes that were on when the fit began.
        synchronize: whether to wait for the device at both ends of the recorded steps.
        destination: the run that windows go to, or None to leave them in the outbox.
        environment: called once a window.
        root: the module whose parts the calls are named after.
        fused: the compiled graphs, or None to leave launches of their code without nodes.
    """

    token: str
    base: tuple[TorchDispatchMode, ...]
    synchronize: bool
    rank: int
    world_size: int
    recording_ranks: RecordingRanks
    destination: Destination | None
    environment: Callable[[], Environment]
    root: nn.Module | None = None
    fused: FusedKernels | None = None


class FitRecorder:
    """The windows of one fit, on the thread that trains. Steps are numbered as the training loop numbers them.

    Call `before_step` at each boundary between two steps, `begin_batch` once the batch is on the device, `end` or
    `fail` when the fit is over, and `close` in any case. Between windows only a `before_step` of a step not
    below `attention_step` does anything.

    Attributes:
        attention_step: the first step whose `before_step` has something to do.
    """

    def __init__(
        self,
        schedule: WindowSchedule,
        facts: FitFacts,
        *,
        outbox: Outbox,
        worker: WindowWorker,
        global_step: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule = schedule
        self._facts = facts
        self._outbox = outbox
        self._worker = worker
        self._global_step = global_step
        self._clock = clock
        self._progress = WindowProgress()
        self._recorder: WindowRecorder | None = None
        self._stuck: list[WindowRecorder] = []
        self._skip_reasons: set[str] = set()
        self._pauses = 0
        self._in_batch = False
        self.attention_step = 0

    def has_window_ahead(self, step: int) -> bool:
        """Return whether the schedule has a window from `step` on."""
        return next_due(step, self._schedule, progress=self._progress) is not None

    @property
    def is_open(self) -> bool:
        """Whether a window is open, in its warm-up or recording."""
        return self._recorder is not None

    def request(self) -> None:
        """Let a window begin at the next step that is in none, whatever the schedule says."""
        self._progress = replace(self._progress, requested=True)

    def before_step(self, step: int) -> None:
        """Note that the step before `step` is over, and do what `step` needs."""
        self._stuck = [recorder for recorder in self._stuck if not recorder.close()]
        self._in_batch = False
        recorder = self._recorder
        if recorder is not None and recorder.step is not None:
            recorder.end_step(StepOutcome.COMPLETE)
            if recorder.trouble is not None:
                _log.warning("the window at step %d ends here: %s", step - 1, recorder.trouble)
                self._finish()
        action = self._decide(step)
        if action is StepAction.CLOSE:
            self._finish()
            action = self._decide(step)
        if action in (StepAction.WARM_UP, StepAction.RECORD) and self._recorder is None:
            self._open(step)
        if action is StepAction.RECORD and self._recorder is not None:
            self._begin(self._recorder, step)
        self._look_ahead(step)

    def begin_batch(self, step: int) -> None:
        """Note that the batch of `step` is on the device: what runs from here on is the step's own."""
        if self._recorder is None or self._recorder.step is None:
            return
        if self._recorder.step != step:
            # Its range has another number, and the copies of this batch are in it: no bracket for this batch.
            self._recorder.end_step(StepOutcome.ABANDONED)
            return
        if self._pauses:
            self._pauses = 0
            self._recorder.resume()
        self._recorder.enter_phase(Phase.FORWARD)
        self._in_batch = True

    def before_epoch(self, step: int) -> None:
        """Go on with the step that the end of an epoch interrupted.

        A batch that began and did not end was skipped, and its epoch with it; then go on with `step`, the next.
        """
        if self._in_batch and self._recorder is not None:
            self._recorder.end_step(StepOutcome.ABANDONED)
            self.before_step(step)
        else:
            self.resume()

    def pause(self) -> None:
        """Leave what comes out of the open step, until as many `resume`s or the step's batch."""
        if self._recorder is not None and self._recorder.step is not None:
            self._pauses += 1
            self._recorder.pause()

    def resume(self) -> None:
        """Take one `pause` back; does nothing when there was none."""
        if self._pauses:
            self._pauses -= 1
            if not self._pauses and self._recorder is not None:
                self._recorder.resume()

    def end(self, step: int) -> None:
        """Note that the fit is over before `step`: an open step is none, an open window ends with what it has."""
        if self._recorder is not None and not self._recorder.has_complete_step:
            _log.warning(
                "the window due at step %d has no step, as the fit ended before step %d; it is left out",
                self._recorder.plan.first_step,
                step,
            )
            self._drop()
        elif self._recorder is not None:
            self._finish()
        elif self._progress.begun == 0 and (due := next_due(step, self._schedule, progress=self._progress)):
            _log.warning(
                "the fit ended before step %d without a window; the next was due at step %d, "
                "KernelTelemetry(skip_first=...) sets when",
                step,
                due,
            )
        self.attention_step = NEVER

    def fail(self, error: BaseException) -> None:
        """Keep what the open window has, marked with the type of the error that ended the fit; wait for nothing."""
        if self._recorder is not None and self._recorder.has_begun:
            self._finish(error)
        self.close()

    def close(self) -> None:
        """Take off whatever is on, without saving; does nothing the second time."""
        self.attention_step = NEVER
        self._drop()
        self._stuck = [recorder for recorder in self._stuck if not recorder.close()]

    def _decide(self, step: int) -> StepAction:
        return decide(step, self._schedule, progress=self._progress, now_s=self._clock())

    def _look_ahead(self, step: int) -> None:
        if self._recorder is not None or self._stuck:
            self.attention_step = step
            return
        due = next_due(step + 1, self._schedule, progress=self._progress)
        self.attention_step = NEVER if due is None else due

    def _open(self, step: int) -> None:
        self._progress = self._progress.opened(step)
        # Known before it is on, so that it is closed whatever happens, a Ctrl-C in the middle too.
        self._recorder = recorder = WindowRecorder(
            self._plan(step), base=self._facts.base, root=self._facts.root, fused=self._facts.fused
        )
        try:
            recorder.warm_up()
        except RecordingError as error:
            self._drop()
            self._skip(recorder, str(error))

    def _begin(self, recorder: WindowRecorder, step: int) -> None:
        self._pauses = 0
        try:
            recorder.begin_step(step, phase=Phase.BEFORE_BATCH)
        except RecordingError as error:
            self._drop()
            self._skip(recorder, str(error))

    def _plan(self, step: int) -> WindowPlan:
        first_step = step + self._schedule.warmup
        return WindowPlan(
            session=session_id(self._facts.token, first_step=first_step),
            source=WindowSource.CALLBACK,
            first_step=first_step,
            warmup=self._schedule.warmup,
            requested=self._schedule.active,
            synchronize=self._facts.synchronize,
            rank=self._facts.rank,
            world_size=self._facts.world_size,
            recording_ranks=self._facts.recording_ranks,
            environment=self._facts.environment(),
        )

    def _skip(self, recorder: WindowRecorder, reason: str) -> None:
        """Keep a record that a window was due, so that its run does not look as if all was seen."""
        self._progress = self._progress.closed(self._clock())
        if reason not in self._skip_reasons:
            self._skip_reasons.add(reason)
            _log.warning("the window due at step %d is skipped: %s", recorder.plan.first_step, reason)
        facts = skipped_window(recorder.plan, reason=reason, global_step=self._global_step())
        window = self._seal(lambda _: facts)
        if window is not None:
            self._worker.submit(window)

    def _drop(self) -> None:
        recorder = self._recorder
        if recorder is not None:
            self._progress = self._progress.closed(self._clock())
            if not recorder.close():
                self._stuck.append(recorder)
            self._recorder = None  # last: a Ctrl-C on the way here leaves it to the next who closes

    def _finish(self, error: BaseException | None = None) -> None:
        recorder = self._recorder
        if recorder is None:
            return

        def record(folder: Path) -> WindowFacts:
            return _write(
                recorder.finish(folder / TRACE_FILE, global_step=self._global_step(), error=error), folder
            )

        try:
            window = self._seal(record)
        except Exception:  # tidied up, then raised on
            self._drop()
            raise
        # A Ctrl-C before this leaves the recorder to `fail`, which finishes it again.
        self._drop()
        if window is not None:
            self._worker.submit(window)

    def _seal(self, record: Callable[[Path], WindowFacts]) -> RawWindow | None:
        """Make a raw window of what `record` puts into its folder; say so when that cannot be."""
        try:
            folder = self._outbox.open_window()
            try:
                return self._outbox.seal_window(folder, record(folder), self._facts.destination)
            except BaseException:  # tidied up, then raised on
                self._outbox.discard_window(folder)
                raise
        except (TlkError, OSError) as error:
            _log.warning("a window is lost, outbox %s: %s", self._outbox.root, error)
            return None


def _write(recorded: RecordedWindow, folder: Path) -> WindowFacts:
    pq.write_table(call_table(recorded.calls), folder / CALLS_FILE)
    if recorded.graphs:
        (folder / GRAPHS_FILE).write_bytes(encode_window_notes(recorded.graphs))
    return recorded.facts

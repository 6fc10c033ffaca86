"""Record one window: the profiler's session and the markers together (steps -> WindowFacts, CallRows, trace)."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tlk_tracking.attribution.fused_notes import GraphNotes
from tlk_tracking.core.errors import RecordingError
from tlk_tracking.core.gaps import Gap, GapReason
from tlk_tracking.core.records import (
    Environment,
    Phase,
    RecordingRanks,
    StepOutcome,
    WindowFacts,
    WindowSource,
)
from tlk_tracking.recording.call_markers import CallMarkers, CallRows
from tlk_tracking.recording.environment import describe_environment
from tlk_tracking.recording.fused_kernels import FusedKernels
from tlk_tracking.recording.module_tracker import ModuleTracker
from tlk_tracking.recording.profiler_session import ProfilerSession
from tlk_tracking.recording.step_brackets import StepBrackets

_log = logging.getLogger(__name__)
_DISPLACED = "another dispatch mode was on where ours had to go on or come off"
_NO_CUDA = "CUDA is not available to torch in this process"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """What is known of a window before it begins. Its fields mean what they mean in WindowFacts."""

    session: str
    source: WindowSource
    first_step: int
    warmup: int
    requested: int
    synchronize: bool
    rank: int = 0
    world_size: int = 1
    recording_ranks: RecordingRanks | None = None
    environment: Environment = field(default_factory=describe_environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWindow:
    """A window that has ended. `trace` is None when the profiler's session was lost."""

    facts: WindowFacts
    calls: CallRows
    trace: Path | None
    graphs: tuple[GraphNotes, ...] = ()


class WindowRecorder:
    """The recording of one window, on the thread that made this object.

    `warm_up`, then for each step `begin_step` and `end_step`, then `finish`; `close` at any time, any number of
    times. Steps may be `pause`d and `resume`d.
    """

    def __init__(
        self,
        plan: WindowPlan,
        *,
        base: tuple[TorchDispatchMode, ...],
        root: nn.Module | None = None,
        fused: FusedKernels | None = None,
    ) -> None:
        self.plan = plan
        self._has_device = torch.cuda.is_available()
        self._session = ProfilerSession(device=self._has_device, synchronize=plan.synchronize)
        self._fused = fused
        self._modules = None if root is None else ModuleTracker(plan.session, root=root)
        self._calls = CallMarkers(
            plan.session, locate=None if self._modules is None else self._modules.locate
        )
        self._brackets = StepBrackets(
            plan.session, calls=self._calls, base=base, modules=self._modules, fused=fused
        )
        self._started = False

    @property
    def step(self) -> int | None:
        """The step whose bracket is open or paused, or None."""
        return self._brackets.step

    @property
    def has_begun(self) -> bool:
        """Whether the warm-up is over and the session records."""
        return self._started

    @property
    def has_complete_step(self) -> bool:
        """Whether a step was recorded from its beginning to its end."""
        return any(bracket.outcome is StepOutcome.COMPLETE for bracket in self._brackets.steps)

    @property
    def trouble(self) -> str | None:
        """Why the window cannot go on, or None when it can."""
        if self._brackets.displaced:
            return _DISPLACED
        fault = self._fault
        if fault is not None:
            return _why(fault) if isinstance(fault, RecordingError) else f"{_why(fault)}: {fault}"
        return None if self._session.running else "another torch profiler took the session over"

    @property
    def _fault(self) -> Exception | None:
        found = (part.fault for part in (self._calls, self._modules, self._fused) if part is not None)
        return next((fault for fault in found if fault is not None), None)

    def warm_up(self) -> None:
        """Get the profiler ready. Raises RecordingError when this is no time for a window."""
        self._session.prepare(steps=self.plan.warmup + self.plan.requested)

    def begin_step(self, step: int, *, phase: Phase) -> None:
        """Open the bracket of a step, the first of which starts the session. Raises RecordingError like `warm_up`."""
        if not self._started:
            self._session.start()
            self._started = True
        self._brackets.open(step, phase=phase)

    def enter_phase(self, phase: Phase) -> None:
        """Note that the open step goes on in `phase`."""
        self._brackets.enter_phase(phase)

    def pause(self) -> bool:
        """Leave what comes out of the step until `resume`; return False when nothing was open."""
        return self._brackets.pause()

    def resume(self) -> None:
        """Go on with the paused step."""
        self._brackets.resume()

    def end_step(self, outcome: StepOutcome) -> None:
        """Close the bracket of the open step, if there is one."""
        self._brackets.close(outcome)

    def finish(self, trace: Path, *, global_step: int, error: BaseException | None = None) -> RecordedWindow:
        """End the window and write its trace; `error` is what ended it, if something did.

        The step in which an error came ends as raised; one that was paused or is cut short by the end of the fit
        is abandoned. Nothing is waited for when there is an error. Interrupted by a Ctrl-C, it can be called again.
        """
        was_running = self._brackets.pause()
        self._brackets.close(
            StepOutcome.RAISED if error is not None and was_running else StepOutcome.ABANDONED
        )
        lost: str | None = None
        try:
            if error is None:
                self._session.stop(trace)
            else:
                self._session.stop_unsynchronized(trace)
        except RecordingError as failure:
            lost = str(failure)
        except Exception as failure:  # noqa: BLE001 - torch's own, of any kind; the rows are still good
            lost = f"torch could not finish its profiler session ({type(failure).__name__})"
            _log.warning("the window from step %d on has no trace", self.plan.first_step, exc_info=failure)
        facts = WindowFacts(
            session=self.plan.session,
            source=self.plan.source,
            first_step=self.plan.first_step,
            warmup=self.plan.warmup,
            requested=self.plan.requested,
            steps=tuple(self._brackets.steps),
            synchronized=self.plan.synchronize and self._has_device and error is None,
            device_expected=self._has_device and lost is None,
            unavailable_reason=lost if self._has_device else _NO_CUDA,
            rank=self.plan.rank,
            world_size=self.plan.world_size,
            recording_ranks=self.plan.recording_ranks,
            global_step=global_step,
            gaps=self._gaps(error, lost),
            environment=self.plan.environment,
        )
        return RecordedWindow(
            facts=facts,
            calls=self._calls.noted(),
            trace=None if lost else trace,
            graphs=() if self._fused is None else self._fused.notes(),
        )

    def close(self) -> bool:
        """Take everything off without saving; return False when our mode is stuck below one of somebody else.

        Call it again later then: nothing is recorded meanwhile.
        """
        self._brackets.close(StepOutcome.ABANDONED)
        self._session.close()
        self._session.forget()
        return self._brackets.settle()

    def _gaps(self, error: BaseException | None, lost: str | None) -> tuple[Gap, ...]:
        found = []
        if self._brackets.displaced:
            found.append((GapReason.MODE_DISPLACED, 1, _DISPLACED))
        if error is not None:
            found.append((GapReason.CAPTURE_RAISED, 1, type(error).__name__))
        complete = sum(bracket.outcome is StepOutcome.COMPLETE for bracket in self._brackets.steps)
        why = [f"{complete} of {self.plan.requested} steps were recorded"]
        if self._fault is not None:
            why.append(_why(self._fault))
        if lost is not None:
            why.append(lost)
        if complete < self.plan.requested or len(why) > 1:
            found.append((GapReason.WINDOW_TRUNCATED, max(1, self.plan.requested - complete), "; ".join(why)))
        return tuple(Gap(reason=reason, count=count, evidence=evidence) for reason, count, evidence in found)


def session_id(token: str, *, first_step: int) -> str:
    """Return the session of a window: the same on all ranks that share the token."""
    return hashlib.sha256(f"{token}:{first_step}".encode()).hexdigest()[:8]


def skipped_window(plan: WindowPlan, *, reason: str, global_step: int) -> WindowFacts:
    """Return what is kept of a window that was due and could not be recorded."""
    return WindowFacts(
        session=plan.session,
        source=plan.source,
        first_step=plan.first_step,
        warmup=plan.warmup,
        requested=plan.requested,
        steps=(),
        synchronized=False,
        device_expected=False,
        unavailable_reason=reason,
        rank=plan.rank,
        world_size=plan.world_size,
        recording_ranks=plan.recording_ranks,
        global_step=global_step,
        gaps=(Gap(reason=GapReason.WINDOW_SKIPPED, count=1, evidence=reason),),
        environment=plan.environment,
    )


def _why(fault: Exception) -> str:
    """Return why nothing more was recorded; of an error that is not ours its type alone, its text may be private."""
    if isinstance(fault, RecordingError):
        return str(fault)
    return f"the recorder itself failed with {type(fault).__name__}"

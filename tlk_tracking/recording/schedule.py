"""Decide what each step is to the recorder (step index, schedule, clock -> skip | warm up | record | close)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from tlk_tracking.core.errors import ConfigurationError


class StepAction(StrEnum):
    """What to do with the step that comes next."""

    SKIP = "skip"
    WARM_UP = "warm_up"
    RECORD = "record"
    CLOSE = "close"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSchedule:
    """When windows are recorded, in steps of the fit; refuses values that cannot work.

    Attributes:
        every_n_steps: distance from one window's first warm-up step to the next one's.
        skip_first: the step at which the first warm-up begins.
        warmup: steps in which the profiler is ready but records nothing.
        active: recorded steps.
        max_windows: no more windows than this in one fit.
        min_interval_s: a window that comes due earlier than this after the last one is left out.
        at_steps: first recorded step of each window; given, it replaces `every_n_steps`, `skip_first` and
            `min_interval_s`.

    Raises:
        ConfigurationError: a value is of the wrong type or out of range.
    """

    every_n_steps: int = 1000
    skip_first: int = 10
    warmup: int = 3
    active: int = 3
    max_windows: int = 10
    min_interval_s: float = 60.0
    at_steps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_count("every_n_steps", self.every_n_steps, least=1)
        _check_count("skip_first", self.skip_first, least=0)
        _check_count("warmup", self.warmup, least=0)
        _check_count("active", self.active, least=1)
        _check_count("max_windows", self.max_windows, least=0)
        _check_seconds("min_interval_s", self.min_interval_s)
        length = self.warmup + self.active
        if self.at_steps is None:
            if self.every_n_steps < length:
                raise ConfigurationError(
                    f"every_n_steps={self.every_n_steps} is shorter than one window of warmup={self.warmup} and "
                    f"active={self.active} steps; give every_n_steps={length} or more"
                )
            return
        for step in self.at_steps:
            _check_count("at_steps", step, least=self.warmup)
        for earlier, later in zip(self.at_steps, self.at_steps[1:], strict=False):
            if later - earlier < length:
                raise ConfigurationError(
                    f"at_steps has {earlier} and then {later}; a window takes warmup + active = {length} steps, "
                    f"so give ascending steps at least {length} apart"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowProgress:
    """How far a fit has come with its schedule.

    Attributes:
        begun: windows begun so far.
        warmup_step: first warm-up step of the window that is open, or None when none is.
        closed_at_s: clock's reading when the last window closed, or None before the first one did.
        requested: a window was asked for by hand; it begins at the next step whatever the schedule says.
    """

    begun: int = 0
    warmup_step: int | None = None
    closed_at_s: float | None = None
    requested: bool = False

    def opened(self, step: int) -> WindowProgress:
        """Return the progress after a window has begun at `step`."""
        return replace(self, begun=self.begun + 1, warmup_step=step, requested=False)

    def closed(self, now_s: float) -> WindowProgress:
        """Return the progress after the open window has closed."""
        return replace(self, warmup_step=None, closed_at_s=now_s)


def decide(step: int, schedule: WindowSchedule, *, progress: WindowProgress, now_s: float) -> StepAction:
    """Return what the step numbered `step` is. After CLOSE, ask again with the window closed."""
    if progress.warmup_step is not None:
        offset = step - progress.warmup_step
        if 0 <= offset < schedule.warmup:
            return StepAction.WARM_UP
        if schedule.warmup <= offset < schedule.warmup + schedule.active:
            return StepAction.RECORD
        return StepAction.CLOSE
    if not (progress.requested or _is_due(step, schedule, progress, now_s)):
        return StepAction.SKIP
    return StepAction.WARM_UP if schedule.warmup else StepAction.RECORD


def next_due(step: int, schedule: WindowSchedule, *, progress: WindowProgress) -> int | None:
    """Return the first step from `step` on at which a window may begin, or None when none will.

    The clock is left out: at that step `decide` may still say SKIP. Until then nobody has to ask.
    """
    if progress.begun >= schedule.max_windows:
        return None
    if schedule.at_steps is not None:
        return min(
            (at - schedule.warmup for at in schedule.at_steps if at - schedule.warmup >= step), default=None
        )
    periods = max(0, math.ceil((step - schedule.skip_first) / schedule.every_n_steps))
    return schedule.skip_first + periods * schedule.every_n_steps


def _is_due(step: int, schedule: WindowSchedule, progress: WindowProgress, now_s: float) -> bool:
    if next_due(step, schedule, progress=progress) != step:
        return False
    if schedule.at_steps is not None or progress.closed_at_s is None:
        return True
    return now_s - progress.closed_at_s >= schedule.min_interval_s


def _check_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name}={value!r}; give a whole number of {least} or more")


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigurationError(f"{name}={value!r}; give a number of seconds of 0 or more")

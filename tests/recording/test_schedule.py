from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlk_tracking.core.errors import ConfigurationError
from tlk_tracking.recording.schedule import StepAction, WindowProgress, WindowSchedule, decide, next_due

SKIP, WARM_UP, RECORD, CLOSE = StepAction.SKIP, StepAction.WARM_UP, StepAction.RECORD, StepAction.CLOSE


def actions(
    schedule: WindowSchedule, *, steps: range, seconds_per_step: float = 1.0
) -> dict[int, StepAction]:
    """Play a fit; return what each step was, without those that were skipped."""
    progress = WindowProgress()
    found = {}
    for step in steps:
        now_s = step * seconds_per_step
        action = decide(step, schedule, progress=progress, now_s=now_s)
        if action is CLOSE:
            progress = progress.closed(now_s)
            action = decide(step, schedule, progress=progress, now_s=now_s)
        if action is not SKIP:
            found[step] = action
            if progress.warmup_step is None:
                progress = progress.opened(step)
    return found


def test_the_first_warm_up_begins_at_skip_first() -> None:
    schedule = WindowSchedule(every_n_steps=1000, skip_first=4, warmup=2, active=1)
    assert actions(schedule, steps=range(20)) == {4: WARM_UP, 5: WARM_UP, 6: RECORD}


def test_windows_come_every_n_steps() -> None:
    schedule = WindowSchedule(every_n_steps=5, skip_first=1, warmup=1, active=1, min_interval_s=0)
    assert actions(schedule, steps=range(13)) == {
        1: WARM_UP,
        2: RECORD,
        6: WARM_UP,
        7: RECORD,
        11: WARM_UP,
        12: RECORD,
    }


def test_a_window_may_begin_where_the_last_one_closes() -> None:
    schedule = WindowSchedule(every_n_steps=2, skip_first=0, warmup=1, active=1, min_interval_s=0)
    assert actions(schedule, steps=range(4)) == {0: WARM_UP, 1: RECORD, 2: WARM_UP, 3: RECORD}


def test_no_more_windows_than_max_windows() -> None:
    schedule = WindowSchedule(
        every_n_steps=3, skip_first=0, warmup=0, active=1, max_windows=2, min_interval_s=0
    )
    assert actions(schedule, steps=range(20)) == {0: RECORD, 3: RECORD}


def test_a_window_that_comes_due_too_soon_is_left_out() -> None:
    schedule = WindowSchedule(every_n_steps=10, skip_first=0, warmup=0, active=1, min_interval_s=15.0)
    assert actions(schedule, steps=range(50)) == {0: RECORD, 20: RECORD, 40: RECORD}


def test_at_steps_names_the_first_recorded_step_of_each_window() -> None:
    schedule = WindowSchedule(at_steps=(3, 9), warmup=2, active=1)
    assert actions(schedule, steps=range(30)) == {
        1: WARM_UP,
        2: WARM_UP,
        3: RECORD,
        7: WARM_UP,
        8: WARM_UP,
        9: RECORD,
    }


def test_a_fit_that_resumes_in_between_waits_for_the_next_period() -> None:
    schedule = WindowSchedule(every_n_steps=10, skip_first=2, warmup=0, active=1)
    assert actions(schedule, steps=range(5, 30), seconds_per_step=100.0) == {12: RECORD, 22: RECORD}


def test_a_requested_window_begins_at_once_and_only_once() -> None:
    schedule = WindowSchedule(every_n_steps=1000, skip_first=500, max_windows=0)
    asked = WindowProgress(requested=True)
    assert decide(7, schedule, progress=asked, now_s=0.0) is WARM_UP
    assert asked.opened(7).closed(1.0) == WindowProgress(begun=1, closed_at_s=1.0)


def test_a_step_before_the_open_window_closes_it() -> None:
    progress = WindowProgress().opened(20)
    assert decide(5, WindowSchedule(), progress=progress, now_s=0.0) is CLOSE


def test_without_windows_left_no_step_is_due() -> None:
    assert next_due(0, WindowSchedule(), progress=WindowProgress(begun=10)) is None
    assert next_due(7, WindowSchedule(at_steps=(9,), warmup=3), progress=WindowProgress()) is None


@given(
    every=st.integers(1, 30), skip=st.integers(0, 40), warmup=st.integers(0, 4), active=st.integers(1, 4),
    steps=st.integers(1, 200),
)  # fmt: skip
def test_nothing_happens_before_the_step_that_is_due(
    every: int, skip: int, warmup: int, active: int, steps: int
) -> None:
    schedule = WindowSchedule(
        every_n_steps=every + warmup + active, skip_first=skip, warmup=warmup, active=active, min_interval_s=0
    )
    begun = list(actions(schedule, steps=range(steps)))
    expected = next_due(0, schedule, progress=WindowProgress())
    assert begun[:1] == ([expected] if expected is not None and expected < steps else [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"every_n_steps": 0},
        {"every_n_steps": 5},
        {"every_n_steps": 10.0},
        {"every_n_steps": True},
        {"skip_first": -1},
        {"warmup": -1},
        {"active": 0},
        {"max_windows": -1},
        {"min_interval_s": -0.1},
        {"min_interval_s": float("nan")},
        {"min_interval_s": float("inf")},
        {"min_interval_s": "60"},
        {"at_steps": (2,)},
        {"at_steps": (10, 12)},
        {"at_steps": (20, 10)},
        {"at_steps": ("10",)},
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))}.*give"):
        replace(WindowSchedule(), **wrong)

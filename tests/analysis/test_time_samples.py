from __future__ import annotations

import numpy as np
import pytest

from tlk_tracking.analysis.time_samples import (
    Floats,
    Ints,
    Thresholds,
    TimeEvidence,
    judge,
    missing_samples,
    time_evidence,
)
from tlk_tracking.analysis.verdicts import Verdict
from tlk_tracking.core.errors import ConfigurationError

DEFAULTS = Thresholds()


def _samples(*, steps: int, factor: float = 1.0, noise: float = 0.02, seed: int = 0, rows: int = 1) -> Floats:
    return factor * np.random.default_rng(seed).lognormal(sigma=noise, size=(rows, steps))


def _windows(steps: int, *, of: int = 1) -> Ints:
    return np.repeat(np.arange(of), steps // of)


def _verdicts(before: Floats, after: Floats, *, windows: int = 1) -> list[Verdict]:
    evidence = time_evidence(
        before,
        after,
        baseline_windows=_windows(before.shape[1], of=windows),
        candidate_windows=_windows(after.shape[1], of=windows),
        thresholds=DEFAULTS,
    )
    return [judge(one, DEFAULTS)[0] for one in evidence]


def test_a_slower_row_is_increased_and_a_faster_one_decreased() -> None:
    before = _samples(steps=9, rows=3)
    after = np.concatenate([_samples(steps=9, seed=1, factor=factor) for factor in (1.3, 1.0, 0.7)])
    assert _verdicts(before, after) == [Verdict.INCREASED, Verdict.UNCHANGED, Verdict.DECREASED]


def test_a_change_below_min_change_is_never_called_one() -> None:
    before, after = _samples(steps=40, noise=0.001), _samples(steps=40, noise=0.001, factor=1.04, seed=1)
    assert _verdicts(before, after) == [Verdict.UNCHANGED]


def test_a_change_that_may_be_smaller_than_min_change_is_undecided() -> None:
    before, after = _samples(steps=40, noise=0.02), _samples(steps=40, noise=0.02, factor=1.055, seed=1)
    assert _verdicts(before, after) == [Verdict.UNDECIDED]


def test_times_too_noisy_for_either_answer_are_undecided_and_say_so() -> None:
    before, after = _samples(steps=8, noise=0.5), _samples(steps=8, noise=0.5, factor=1.1, seed=1)
    (evidence,) = time_evidence(
        before, after, baseline_windows=_windows(8), candidate_windows=_windows(8), thresholds=DEFAULTS
    )
    verdict, reason = judge(evidence, DEFAULTS)
    assert verdict is Verdict.UNDECIDED
    assert reason is not None
    assert reason.startswith("ratio ")
    assert reason.endswith("does not settle a change of 5%")


def test_equal_samples_without_any_spread_are_unchanged() -> None:
    assert _verdicts(np.ones((2, 8)), np.ones((2, 8))) == [Verdict.UNCHANGED] * 2


def test_one_unchanged_run_gives_no_change_in_95_of_100_resamples() -> None:
    clean = 0
    for seed in range(100):
        # 40 rows, of which each window runs at clocks of its own.
        generator = np.random.default_rng(seed)
        clocks = np.repeat(generator.lognormal(sigma=0.01, size=(2, 3)), 3, axis=1)
        before, after = generator.lognormal(sigma=0.1, size=(2, 40, 9)) * clocks[:, None, :]
        found = _verdicts(before, after, windows=3)
        clean += not {Verdict.INCREASED, Verdict.DECREASED} & set(found)
    assert clean >= 95


def test_one_comparison_gives_one_answer_however_often_it_is_made() -> None:
    before, after = _samples(steps=9, rows=4), _samples(steps=9, rows=4, seed=1)

    def evidence() -> list[TimeEvidence]:
        return time_evidence(
            before,
            after,
            baseline_windows=_windows(9, of=3),
            candidate_windows=_windows(9, of=3),
            thresholds=DEFAULTS,
        )

    assert evidence() == evidence()


def test_windows_that_disagree_widen_the_interval() -> None:
    before = _samples(steps=9, noise=0.001)
    after = _samples(steps=9, noise=0.001, seed=1) * np.repeat([0.9, 1.0, 1.3], 3)

    def width(windows: Ints) -> float:
        (one,) = time_evidence(
            before, after, baseline_windows=windows, candidate_windows=windows, thresholds=DEFAULTS
        )
        return one.ratio_high - one.ratio_low

    assert width(_windows(9, of=3)) > width(_windows(9))


def test_more_rows_raise_the_adjusted_p_value() -> None:
    slower = _samples(steps=8, factor=1.3, seed=1)
    p_values = []
    for others in (0, 200):
        before = _samples(steps=8, rows=1 + others)
        after = np.concatenate([slower, _samples(steps=8, rows=others, seed=2)])
        evidence = time_evidence(
            before, after, baseline_windows=_windows(8), candidate_windows=_windows(8), thresholds=DEFAULTS
        )
        p_values.append(evidence[0].p_value)
    assert p_values[0] < p_values[1]


@pytest.mark.parametrize(
    ("steps", "windows", "said"),
    [
        (8, 1, None),
        (3, 1, "3 of 8 steps; 2 more windows of 3 steps needed"),
        (7, 7, "7 of 8 steps; 1 more window of 1 step needed"),
        (6, 2, "6 of 8 steps; 1 more window of 3 steps needed"),
    ],
)
def test_too_few_steps_say_how_many_windows_are_missing(steps: int, windows: int, said: str | None) -> None:
    assert missing_samples(steps, windows, DEFAULTS) == said


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_change": -0.1},
        {"min_samples": 1},
        {"min_share": float("nan")},
        {"significance": 1.0},
        {"resamples": 9},
    ],
)
def test_thresholds_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        Thresholds(**wrong)  # type: ignore[arg-type]  # one wrong value each

"""Judge noisy times from one sample a step (two samples a row -> median ratio, its interval, a p-value)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tlk_tracking.analysis.verdicts import Verdict
from tlk_tracking.core.errors import ConfigurationError
from tlk_tracking.core.text import plural

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# One comparison gives one answer, whenever and wherever it is made.
_SEED = 20260101
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What a change of time must be to be called one.

    Attributes:
        min_change: relative change of the median from which on it is one (0.05 is 5 %).
        min_samples: complete steps that each side needs.
        min_share: share of the device time (0..1) from which on a row is tested.
        significance: false discovery rate that Benjamini-Hochberg keeps over the tested rows.
        resamples: resamples of the bootstrap.
    """

    min_change: float = 0.05
    min_samples: int = 8
    min_share: float = 0.01
    significance: float = 0.05
    resamples: int = 1000

    def __post_init__(self) -> None:
        for name in ("min_change", "min_share", "significance"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value < 1):
                raise ConfigurationError(f"{name} is {value}; give a number from 0 to below 1")
        if self.min_samples < 2:
            raise ConfigurationError(f"min_samples is {self.min_samples}; two is the least that has a spread")
        if self.resamples < 100:
            raise ConfigurationError(f"resamples is {self.resamples}; give at least 100")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEvidence:
    """What the samples of one row say: candidate / baseline of the medians, and how sure that is."""

    ratio: float
    ratio_low: float
    ratio_high: float
    p_value: float  # adjusted over all rows of the call


def time_evidence(
    baseline: Floats,
    candidate: Floats,
    *,
    baseline_windows: Ints,
    candidate_windows: Ints,
    thresholds: Thresholds,
) -> list[TimeEvidence]:
    """Compare rows of samples (rows, steps); `*_windows` say which window each step came from.

    Steps of one window share its clocks, so the bootstrap draws windows first and steps of them next. Medians
    must be above 0.
    """
    if not len(baseline):
        return []
    from scipy import stats  # takes most of a second, and few comparisons have the samples for it

    p_values = stats.mannwhitneyu(candidate, baseline, axis=1, alternative="two-sided").pvalue
    # Without any spread at all the statistic is undefined; equal samples are no evidence of a change.
    adjusted = stats.false_discovery_control(np.nan_to_num(p_values, nan=1.0), method="bh")
    generator = np.random.default_rng(_SEED)
    draws = [
        _draw(windows, thresholds.resamples, generator) for windows in (baseline_windows, candidate_windows)
    ]
    evidence = []
    for before, after, p_value in zip(baseline, candidate, adjusted, strict=True):
        resampled = _ratio(np.median(before[draws[0]], axis=1), np.median(after[draws[1]], axis=1))
        tail = 50 * (1 - _CONFIDENCE)
        low, high = np.percentile(resampled, [tail, 100 - tail], method="nearest")
        evidence.append(
            TimeEvidence(
                ratio=float(_ratio(np.median(before), np.median(after))),
                ratio_low=float(low),
                ratio_high=float(high),
                p_value=float(p_value),
            )
        )
    return evidence


def judge(evidence: TimeEvidence, thresholds: Thresholds) -> tuple[Verdict, str | None]:
    """Return the verdict of one row, and the reason of an UNDECIDED one.

    INCREASED and DECREASED are significant and their whole interval lies beyond `min_change`; the whole interval
    of UNCHANGED lies within it. A window's clocks shift all its steps, so a point beyond it would not do.
    """
    most = 1 + thresholds.min_change
    least = 1 / most
    significant = evidence.p_value <= thresholds.significance
    if significant and evidence.ratio_low >= most:
        return Verdict.INCREASED, None
    if significant and evidence.ratio_high <= least:
        return Verdict.DECREASED, None
    if least < evidence.ratio_low and evidence.ratio_high < most:
        return Verdict.UNCHANGED, None
    return Verdict.UNDECIDED, (
        f"ratio {evidence.ratio:.3f} in [{evidence.ratio_low:.3f}, {evidence.ratio_high:.3f}] "
        f"does not settle a change of {thresholds.min_change:.0%}"
    )


def missing_samples(steps: int, windows: int, thresholds: Thresholds) -> str | None:
    """Say how many windows a side needs for `min_samples`, or return None when it has them."""
    if steps >= thresholds.min_samples:
        return None
    per_window = max(1, steps // max(1, windows))
    missing = math.ceil((thresholds.min_samples - steps) / per_window)
    return (
        f"{steps} of {thresholds.min_samples} steps; {missing} more "
        f"{'window' if missing == 1 else 'windows'} of {plural(per_window, 'step')} needed"
    )


def _ratio(before: Floats, after: Floats) -> Floats:
    """Divide; a median of 0 in a resample makes the ratio 1 (both 0) or infinite, never an error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(before == after, 1.0, np.asarray(after, dtype=np.float64) / before)


def _draw(windows: Ints, resamples: int, generator: np.random.Generator) -> Ints:
    """Return sample indices for each resample: windows are drawn first, steps of them next."""
    members: Sequence[Ints] = [np.flatnonzero(windows == window) for window in np.unique(windows)]
    sizes = np.array([len(of_window) for of_window in members])
    padded = np.zeros((len(members), sizes.max()), dtype=np.int64)
    for row, of_window in enumerate(members):
        padded[row, : len(of_window)] = of_window
    # As many windows as there are, each giving its share of the steps.
    slots = np.repeat(np.arange(len(members)), sizes)
    chosen = generator.integers(len(members), size=(resamples, len(members)))[:, slots]
    drawn: Ints = padded[chosen, (generator.random(chosen.shape) * sizes[chosen]).astype(np.int64)]
    return drawn

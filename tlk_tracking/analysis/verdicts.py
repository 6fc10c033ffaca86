"""Say what two bounded values support (two intervals -> a verdict that holds for every pair of values)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from tlk_tracking.core.gaps import Bound


class Verdict(StrEnum):
    """What became of a row between two experiments."""

    ADDED = "ADDED"
    REMOVED = "REMOVED"
    INCREASED = "INCREASED"
    DECREASED = "DECREASED"
    UNCHANGED = "UNCHANGED"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Every value from `low` to `high`, both included; never negative, `high` may be infinite."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or math.isinf(self.low):
            raise ValueError(f"no interval goes from {self.low} to {self.high}")


def interval(low: float, high: float, *, bound: Bound) -> Interval:
    """Return the values that the truth can have when `low` to `high` was observed under `bound`."""
    return Interval(
        low=low if bound in (Bound.EXACT, Bound.LOWER) else 0.0,
        high=high if bound in (Bound.EXACT, Bound.UPPER) else math.inf,
    )


def decide(baseline: Interval, candidate: Interval) -> Verdict:
    """Return the one verdict that holds for every pair of values, else UNDECIDED.

    For one pair: equal values are UNCHANGED; from 0 to more is ADDED, from more to 0 is REMOVED; between two
    values above 0, more is INCREASED and less is DECREASED.
    """
    if baseline.low == baseline.high == candidate.low == candidate.high:
        return Verdict.UNCHANGED
    if baseline.high < candidate.low:
        return _if_certain(baseline, absent=Verdict.ADDED, present=Verdict.INCREASED)
    if candidate.high < baseline.low:
        return _if_certain(candidate, absent=Verdict.REMOVED, present=Verdict.DECREASED)
    return Verdict.UNDECIDED


def _if_certain(smaller: Interval, *, absent: Verdict, present: Verdict) -> Verdict:
    """Choose between the two names of one direction by whether the smaller side is 0: it may be unknown."""
    if smaller.high == 0:
        return absent
    return present if smaller.low > 0 else Verdict.UNDECIDED

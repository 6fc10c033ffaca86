from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import TOP

from tlk_tracking.analysis.verdicts import Interval, Verdict, decide, interval
from tlk_tracking.core.gaps import Bound, weakest

# The truth table is that of the documentation; a dash is UNDECIDED.
DOCUMENT = TOP / "docs" / "comparing.md"
BOUNDS = {"exact": Bound.EXACT, "≥": Bound.LOWER, "≤": Bound.UPPER, "?": Bound.UNKNOWN}


def _read_truth_table() -> list[tuple[Bound, Bound, tuple[int, int], Verdict]]:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    start = next(
        place for place, line in enumerate(lines) if line.startswith("| baseline | candidate | 2 → 2 ")
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start : start + 13]]
    values = [tuple(int(value) for value in title.split(" → ")) for title in rows[0][2:]]
    cases = {}
    for before, after, *verdicts in rows[2:]:
        pairs = product(*([BOUNDS[name]] if name != "any" else list(Bound) for name in (before, after)))
        for pair, (value, said) in product(pairs, zip(values, verdicts, strict=True)):
            cases[(*pair, value)] = Verdict.UNDECIDED if said == "-" else Verdict(said)
    return [(*case, verdict) for case, verdict in cases.items()]


CASES = _read_truth_table()


def test_the_truth_table_has_every_pair_of_bounds() -> None:
    assert {case[:2] for case in CASES} == set(product(Bound, Bound))
    assert len(CASES) == len(Bound) ** 2 * 6


@pytest.mark.parametrize(("before", "after", "values", "verdict"), CASES)
def test_a_verdict_is_that_of_the_truth_table(
    before: Bound, after: Bound, values: tuple[int, int], verdict: Verdict
) -> None:
    intervals = [
        interval(value, value, bound=bound) for value, bound in zip(values, (before, after), strict=True)
    ]
    assert decide(*intervals) is verdict


def _verdict_of_pair(before: float, after: float) -> Verdict:
    if before == after:
        return Verdict.UNCHANGED
    if before == 0 or after == 0:
        return Verdict.ADDED if before == 0 else Verdict.REMOVED
    return Verdict.INCREASED if after > before else Verdict.DECREASED


_ends = st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.0, math.inf])
_intervals = (
    st.tuples(_ends, _ends)
    .map(sorted)
    .filter(lambda ends: math.isfinite(ends[0]))
    .map(lambda ends: Interval(low=ends[0], high=ends[1]))
)


def _points(one: Interval) -> list[float]:
    """Both ends, every value of the grid inside, and values between: all orders of two intervals occur."""
    high = min(one.high, 9.0)
    grid = {one.low, high, (one.low + high) / 2, *(v / 4 for v in range(37) if one.low <= v / 4 <= high)}
    return sorted(grid)


@given(_intervals, _intervals)
def test_a_verdict_holds_for_every_pair_of_values_and_undecided_means_that_none_does(
    before: Interval, after: Interval
) -> None:
    possible = {_verdict_of_pair(*pair) for pair in product(_points(before), _points(after))}
    assert decide(before, after) is (possible.pop() if len(possible) == 1 else Verdict.UNDECIDED)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 2.0), (3.0, 2.0), (math.inf, math.inf), (math.nan, 1.0)])
def test_an_interval_without_a_value_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="no interval"):
        Interval(low=low, high=high)


@pytest.mark.parametrize(
    ("bounds", "together"),
    [
        ([], Bound.EXACT),
        ([Bound.EXACT, Bound.EXACT], Bound.EXACT),
        ([Bound.EXACT, Bound.LOWER], Bound.LOWER),
        ([Bound.UPPER, Bound.UPPER], Bound.UPPER),
        ([Bound.LOWER, Bound.UPPER], Bound.UNKNOWN),
        ([Bound.EXACT, Bound.UNKNOWN], Bound.UNKNOWN),
    ],
)
def test_a_sum_has_the_weakest_bound_of_its_parts(bounds: list[Bound], together: Bound) -> None:
    assert weakest(bounds) is together

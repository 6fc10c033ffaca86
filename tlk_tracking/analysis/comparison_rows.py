"""Align two experiments row by row and judge each number (two StepTables -> rows with verdicts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from tlk_tracking.analysis.step_tables import (
    CALL_MEASURES,
    TIME_MEASURES,
    Floats,
    Ints,
    StepTable,
    StepTables,
    TableName,
)
from tlk_tracking.analysis.time_samples import Thresholds, judge, missing_samples, time_evidence
from tlk_tracking.analysis.verdicts import Verdict, decide, interval
from tlk_tracking.core.gaps import Bound, GapReason

CHANGES = (Verdict.ADDED, Verdict.REMOVED, Verdict.INCREASED, Verdict.DECREASED)
_BY_CALL = (TableName.PHASE, TableName.MODULE, TableName.CALL)
_BOUND_WORDS = {
    Bound.LOWER: "only a lower bound",
    Bound.UPPER: "only an upper bound",
    Bound.UNKNOWN: "neither a lower nor an upper bound",
}
_NO_ROW = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number on both sides, per complete step, and what became of it.

    Attributes:
        target: label of the candidate.
        key: canonical JSON of what the row is about; None for the totals.
        measure: a metric's name without its prefix.
        baseline, candidate: mean over the complete steps; None where a side has no such row or cannot know.
        baseline_bound, candidate_bound: also of the 0 that a missing row stands for.
        reason: why the verdict is UNDECIDED.
        ratio, ratio_low, ratio_high: candidate / baseline of the medians with its 95 % interval (times only).
        p_value: Mann-Whitney's, adjusted over all tested rows.
        share: largest share of the device time that the key has on a side, 0..1.
        change_ms: observed difference in device time of the key; orders rows, claims nothing.
    """

    target: str
    table: TableName
    key: str | None
    measure: str
    baseline: float | None
    baseline_bound: Bound
    candidate: float | None
    candidate_bound: Bound
    verdict: Verdict
    reason: str | None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    p_value: float | None = None
    share: float | None = None
    change_ms: float | None = None


def compare_tables(
    baseline: StepTables,
    candidate: StepTables,
    *,
    target: str,
    thresholds: Thresholds,
    why_no_times: str | None = None,
    why_no_calls: str | None = None,
) -> list[Row]:
    """Return a row for each table, key and measure of either side, in tables' order, the biggest change first.

    Args:
        baseline: counts and times of the experiment that is compared with.
        candidate: those of the other; its tables are made with the same call keys.
        target: label of the candidate.
        thresholds: what a change of time must be.
        why_no_times: reason to leave every time UNDECIDED.
        why_no_calls: reason to leave everything about ATen calls UNDECIDED.
    """
    rows: list[Row] = []
    tests: list[tuple[int, _Number, _Number]] = []
    for pair in _pairs(baseline, candidate):
        blocked = why_no_times if pair.measure in TIME_MEASURES else None
        if pair.table in _BY_CALL or pair.measure in CALL_MEASURES:
            blocked = why_no_calls or blocked
        verdict, reason = (Verdict.UNDECIDED, blocked) if blocked else _judge(pair, thresholds)
        if verdict is None:
            tests.append((len(rows), pair.baseline, pair.candidate))
        rows.append(
            Row(
                target=target,
                table=pair.table,
                key=pair.key,
                measure=pair.measure,
                baseline=pair.baseline.shown,
                baseline_bound=pair.baseline.bound,
                candidate=pair.candidate.shown,
                candidate_bound=pair.candidate.bound,
                verdict=verdict or Verdict.UNDECIDED,
                reason=reason,
                share=pair.share,
                change_ms=pair.change_ms,
            )
        )
    _judge_samples(rows, tests, baseline.windows, candidate.windows, thresholds)
    return sorted(rows, key=_order)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Number:
    """One number of one side: a sample a complete step, none when it could not be observed."""

    side: str
    observed: bool
    samples: Floats
    present: bool
    bound: Bound
    reasons: frozenset[GapReason]
    windows: int

    @property
    def mean(self) -> float | None:
        """The sum is exact and divided once, so that equal means of whole numbers are equal."""
        return float(self.samples.sum()) / len(self.samples) if len(self.samples) else None

    @property
    def shown(self) -> float | None:
        return self.mean if self.present else None

    @property
    def why_unknown(self) -> str | None:
        if not self.observed:
            return f"no device evidence in the {self.side}"
        return None if len(self.samples) else f"no complete step in the {self.side}"

    @property
    def why_bounded(self) -> str | None:
        if self.bound is Bound.EXACT:
            return None
        reasons = ", ".join(sorted(reason.value for reason in self.reasons))
        return f"the {self.side}'s value is {_BOUND_WORDS[self.bound]}{f' ({reasons})' if reasons else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """The same number of both sides."""

    table: TableName
    key: str | None
    measure: str
    baseline: _Number
    candidate: _Number
    share: float | None
    change_ms: float | None


def _pairs(baseline: StepTables, candidate: StepTables) -> Iterator[_Pair]:
    """Merge the tables of both sides; what neither side has any of is left out."""
    totals = [_mean_times(side.tables.get(TableName.TOTAL)).get(None) for side in (baseline, candidate)]
    for name in TableName:
        tables = (baseline.tables.get(name), candidate.tables.get(name))
        if tables == (None, None):
            continue
        keys = dict.fromkeys(key for table in tables if table is not None for key in table.keys)
        measures = dict.fromkeys(measure for table in tables if table is not None for measure in table.values)
        times = [_mean_times(table) for table in tables]
        for measure in measures:
            before = _numbers("baseline", tables[0], measure, baseline.windows)
            after = _numbers("candidate", tables[1], measure, candidate.windows)
            for key in keys:
                pair = (before(key), after(key))
                if name in (TableName.MODULE, TableName.CALL) and not any(number.mean for number in pair):
                    continue
                own = [time.get(key, 0.0) for time in times]
                shares = [ms / total for ms, total in zip(own, totals, strict=True) if total]
                yield _Pair(
                    table=name,
                    key=key,
                    measure=measure,
                    baseline=pair[0],
                    candidate=pair[1],
                    share=max(shares, default=None),
                    change_ms=own[1] - own[0] if all(total is not None for total in totals) else None,
                )


def _numbers(
    side: str, table: StepTable | None, measure: str, windows: Ints
) -> Callable[[str | None], _Number]:
    """Return the numbers of one measure by key; a key without a row is 0 with its table's bound."""
    values = None if table is None else table.values.get(measure)
    place = {} if table is None else {key: row for row, key in enumerate(table.keys)}
    zeros = np.zeros(len(windows))
    count = len(np.unique(windows))

    def number(key: str | None) -> _Number:
        row = place.get(key, _NO_ROW)
        return _Number(
            side=side,
            observed=values is not None,
            samples=zeros[:0] if values is None else zeros if row == _NO_ROW else values[row],
            present=row != _NO_ROW,
            bound=Bound.UNKNOWN if table is None or values is None else table.bounds[measure],
            reasons=frozenset() if table is None or values is None else table.reasons[measure],
            windows=count,
        )

    return number


def _mean_times(table: StepTable | None) -> dict[str | None, float]:
    values = None if table is None else table.values.get("device_time_ms")
    if table is None or values is None or not values.shape[1]:
        return {}
    return dict(zip(table.keys, values.mean(axis=1).tolist(), strict=True))


def _judge(pair: _Pair, thresholds: Thresholds) -> tuple[Verdict | None, str | None]:
    """Return verdict and reason; the verdict None says that the samples must be tested."""
    before, after = pair.baseline, pair.candidate
    unknown = before.why_unknown or after.why_unknown
    if unknown is not None:
        return Verdict.UNDECIDED, unknown
    verdict, reason = _judge_counts(before, after)
    timed = pair.measure in TIME_MEASURES
    if not timed or verdict in (Verdict.ADDED, Verdict.REMOVED) or not (before.mean or after.mean):
        return verdict, reason
    return _why_untestable(pair, thresholds)


def _judge_counts(before: _Number, after: _Number) -> tuple[Verdict, str | None]:
    """Judge the means by their bounds; a difference must also be larger than that between steps of a side."""
    sides = [(number.mean or 0.0, number) for number in (before, after)]
    verdict = decide(*(interval(mean, mean, bound=number.bound) for mean, number in sides))
    if verdict is Verdict.UNDECIDED:
        return verdict, _join(before.why_bounded, after.why_bounded)
    ranges = [(float(number.samples.min()), float(number.samples.max()), number) for _, number in sides]
    everywhere = decide(*(interval(low, high, bound=number.bound) for low, high, number in ranges))
    if verdict is Verdict.UNCHANGED or everywhere is verdict:
        return verdict, None
    spans = " and ".join(f"{low:g} to {high:g} in the {number.side}" for low, high, number in ranges)
    return Verdict.UNDECIDED, f"differs from step to step: {spans}"


def _why_untestable(pair: _Pair, thresholds: Thresholds) -> tuple[Verdict | None, str | None]:
    before, after = pair.baseline, pair.candidate
    if not any(_supported(verdict, before.bound, after.bound) for verdict in CHANGES):
        return Verdict.UNDECIDED, _join(before.why_bounded, after.why_bounded)
    if (pair.share or 0.0) < thresholds.min_share:
        return Verdict.UNDECIDED, f"below {thresholds.min_share:.0%} of the device time: not tested"
    missing = [
        f"the {number.side} has {text}"
        for number in (before, after)
        if (text := missing_samples(len(number.samples), number.windows, thresholds)) is not None
    ]
    if missing:
        return Verdict.UNDECIDED, "; ".join(missing)
    if not (np.median(before.samples) and np.median(after.samples)):
        return Verdict.UNDECIDED, "absent from half of the steps of a side"
    return None, None


def _supported(verdict: Verdict, baseline: Bound, candidate: Bound) -> bool:
    """Return whether a verdict about observed values also holds for all values that the bounds allow."""
    least, most = (Bound.EXACT, Bound.LOWER), (Bound.EXACT, Bound.UPPER)
    if verdict in (Verdict.INCREASED, Verdict.ADDED):
        return baseline in most and candidate in least
    if verdict in (Verdict.DECREASED, Verdict.REMOVED):
        return baseline in least and candidate in most
    return baseline is candidate is Bound.EXACT


def _judge_samples(
    rows: list[Row],
    tests: list[tuple[int, _Number, _Number]],
    baseline_windows: Ints,
    candidate_windows: Ints,
    thresholds: Thresholds,
) -> None:
    """Complete the rows that need it by what their samples say, all tests together."""
    evidence = time_evidence(
        np.array([before.samples for _, before, _ in tests]),
        np.array([after.samples for _, _, after in tests]),
        baseline_windows=baseline_windows,
        candidate_windows=candidate_windows,
        thresholds=thresholds,
    )
    for (place, before, after), found in zip(tests, evidence, strict=True):
        verdict, reason = judge(found, thresholds)
        if verdict is not Verdict.UNDECIDED and not _supported(verdict, before.bound, after.bound):
            verdict, reason = Verdict.UNDECIDED, _join(before.why_bounded, after.why_bounded)
        rows[place] = replace(
            rows[place],
            verdict=verdict,
            reason=reason,
            ratio=found.ratio,
            ratio_low=found.ratio_low,
            ratio_high=found.ratio_high,
            p_value=found.p_value,
        )


def _order(row: Row) -> tuple[int, int, float, float, str]:
    """Tables in order; in each first what has changed, then the undecided; the most device time first."""
    rank = 0 if row.verdict in CHANGES else 1 if row.verdict is Verdict.UNDECIDED else 2
    # Totals are of different units, so theirs stay in the order of the metrics.
    change = 0.0 if row.key is None else abs((row.candidate or 0.0) - (row.baseline or 0.0))
    return list(TableName).index(row.table), rank, -abs(row.change_ms or 0.0), -change, row.key or ""


def _join(*reasons: str | None) -> str:
    return "; ".join(reason for reason in reasons if reason is not None)

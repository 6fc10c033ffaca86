"""Find what surely got worse, for a check in CI (Comparison -> rows)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tlk_tracking.analysis.comparison import Comparison
from tlk_tracking.analysis.comparison_rows import Row
from tlk_tracking.analysis.step_tables import TIME_MEASURES
from tlk_tracking.analysis.verdicts import Verdict

_MEASURES = frozenset({"launches", *TIME_MEASURES})


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionCheck:
    """Rows that surely got worse, rows of which that cannot be said, and candidates without any row to check."""

    regressions: tuple[Row, ...]
    undecided: tuple[Row, ...]
    unchecked_candidates: tuple[str, ...]


def find_regressions(
    comparison: Comparison,
    *,
    tables: Collection[str] = ("total", "phase"),
    max_time_increase: float = 0.05,
    max_launch_increase: float = 0.0,
) -> RegressionCheck:
    """Return the rows of launches and device time that grew by more than a share (0.05 is 5 %).

    A time must have grown by more with its whole interval; a number that was not there before has grown by any
    share.
    """
    checked = [row for row in comparison.rows if row.table.value in tables and row.measure in _MEASURES]
    return RegressionCheck(
        regressions=tuple(
            row
            for row in checked
            if _grew_more_than(
                row, max_time_increase if row.measure in TIME_MEASURES else max_launch_increase
            )
        ),
        undecided=tuple(row for row in checked if row.verdict is Verdict.UNDECIDED),
        unchecked_candidates=tuple(
            side.label for side in comparison.candidates if all(row.target != side.label for row in checked)
        ),
    )


def _grew_more_than(row: Row, share: float) -> bool:
    if row.verdict is Verdict.ADDED:
        return True
    if row.verdict is not Verdict.INCREASED:
        return False
    if row.ratio_low is not None:
        return row.ratio_low >= 1 + share
    return bool(row.baseline and row.candidate and row.candidate > row.baseline * (1 + share))

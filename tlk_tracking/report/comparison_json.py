"""Give a comparison to other programs (Comparison -> JSON object, CSV)."""

from __future__ import annotations

from tlk_tracking.analysis.comparison import Comparison
from tlk_tracking.analysis.comparison_rows import Row
from tlk_tracking.analysis.step_tables import decode_key
from tlk_tracking.core.text import csv_cell


def comparison_json(comparison: Comparison) -> dict[str, object]:
    """Return `context` and `rows`; with several candidates each entry also names its `target`."""
    several = len(comparison.candidates) > 1
    context = [
        {
            "field": each.field,
            "baseline": each.baseline,
            "candidate": each.candidate,
            **({"target": target} if several else {}),
        }
        for target, differences in comparison.context.items()
        for each in differences
    ]
    return {
        "context": context,
        "rows": [_row(row) | ({"target": row.target} if several else {}) for row in comparison.rows],
    }


def comparison_csv(comparison: Comparison) -> str:
    """Return every field of every row as CSV in which no text is a formula."""
    frame = comparison.frame()
    for name in (
        "target",
        "table",
        "key",
        "measure",
        "baseline_bound",
        "candidate_bound",
        "verdict",
        "reason",
    ):
        frame[name] = [None if text is None else csv_cell(str(text)) for text in _texts(comparison, name)]
    text: str = frame.to_csv(index=False, lineterminator="\n")
    return text


def _texts(comparison: Comparison, name: str) -> list[object]:
    return [getattr(row, name) for row in comparison.rows]


def _row(row: Row) -> dict[str, object]:
    return {
        "table": row.table.value,
        "key": decode_key(row.key),
        "measure": row.measure,
        "baseline": row.baseline,
        "baseline_bound": row.baseline_bound.value,
        "candidate": row.candidate,
        "candidate_bound": row.candidate_bound.value,
        "verdict": row.verdict.value,
        "reason": row.reason,
    }

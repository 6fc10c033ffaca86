"""Put the changes, sides and reasons of a comparison into words (rows -> text)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tlk_tracking.analysis.circumstances import Fact
from tlk_tracking.analysis.comparison import Side
from tlk_tracking.analysis.comparison_rows import CHANGES, Row
from tlk_tracking.analysis.step_tables import TableName
from tlk_tracking.analysis.verdicts import Verdict
from tlk_tracking.core.text import plural, visible

TITLES = {
    TableName.TOTAL: "Totals",
    TableName.PHASE: "Phases",
    TableName.MODULE: "Modules",
    TableName.CALL: "ATen calls",
    TableName.KERNEL: "Kernels",
}


def show_change(row: Row) -> str:
    """Return the relative change: with its interval where samples were tested, as observed otherwise."""
    if row.ratio is not None and row.ratio_low is not None and row.ratio_high is not None:
        return f"{row.ratio - 1:+.1%} [{row.ratio_low - 1:+.1%}, {row.ratio_high - 1:+.1%}]"
    if row.baseline and row.candidate and row.verdict in CHANGES:
        return f"{row.candidate / row.baseline - 1:+.1%}"
    return ""


def show_side(side: Side) -> str:
    """Return which windows and how many steps a side rests on."""
    first_steps = sorted({first for first, _, _ in side.windows})
    shown = ", ".join(str(step) for step in first_steps[:6]) + (", …" if len(first_steps) > 6 else "")
    ranks = sorted({rank for _, _, rank in side.windows})
    parts = [
        plural(side.steps, "complete step"),
        f"{plural(len(first_steps), 'window')} from step {shown}",
        f"rank {', '.join(str(rank) for rank in ranks)}",
    ]
    if side.left_out:
        parts.append(f"{plural(side.left_out, 'window')} without device telemetry left out")
    return ", ".join(parts)


def show_fact(fact: Fact) -> str:
    """Return a circumstance for people; None is unknown."""
    if fact is None:
        return "unknown"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if isinstance(fact, list):
        return ", ".join(show_fact(one) for one in fact) or "none"
    return visible(str(fact))


def why_undecided(rows: Iterable[Row]) -> list[tuple[str, int]]:
    """Return each reason for UNDECIDED with the number of its rows, the commonest first."""
    reasons = Counter(_kind(row.reason or "") for row in rows if row.verdict is Verdict.UNDECIDED)
    return sorted(reasons.items(), key=lambda found: (-found[1], found[0]))


def _kind(reason: str) -> str:
    """Return the reason without the numbers that each row has of its own."""
    if reason.startswith("ratio "):
        return "times too noisy to settle a change"
    if reason.startswith("differs from step to step"):
        return "counts differ from step to step"
    return reason

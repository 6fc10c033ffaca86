"""Show a number with its bound (value, bound -> text)."""

from __future__ import annotations

from tlk_tracking.records import Bound

SIGNS = {Bound.EXACT: "", Bound.LOWER: "≥ ", Bound.UPPER: "≤ ", Bound.UNKNOWN: "? "}


def show_number(value: float | None, bound: Bound) -> str:
    """Return a value with the sign of its bound; a dash for one that is missing, with that of its table's."""
    if value is None:
        return f"{SIGNS[bound]}—"
    return f"{SIGNS[bound]}{value:,.5g}" if abs(value) < 1e5 else f"{SIGNS[bound]}{value:,.0f}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"

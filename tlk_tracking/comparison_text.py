"""Put the numbers and keys of a comparison into words (rows -> text for tables)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tlk_tracking.comparison import Side
from tlk_tracking.comparison_rows import CHANGES, Row
from tlk_tracking.context import Fact
from tlk_tracking.inert_text import short_kernel, visible
from tlk_tracking.intervals import Verdict
from tlk_tracking.records import Bound
from tlk_tracking.step_tables import TableName, decode_key

SIGNS = {Bound.EXACT: "", Bound.LOWER: "≥ ", Bound.UPPER: "≤ ", Bound.UNKNOWN: "? "}
TITLES = {
    TableName.TOTAL: "Totals",
    TableName.PHASE: "Phases",
    TableName.MODULE: "Modules",
    TableName.CALL: "ATen calls",
    TableName.KERNEL: "Kernels",
}
_MISSING = "—"
_SHORT_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
}


def show_number(value: float | None, bound: Bound) -> str:
    """Return a value with the sign of its bound; a missing row is a dash with the sign of its table's bound."""
    if value is not None:
        return f"{SIGNS[bound]}{value:,.5g}" if abs(value) < 1e5 else f"{SIGNS[bound]}{value:,.0f}"
    return _MISSING if bound is not Bound.LOWER else f"{SIGNS[bound]}{_MISSING}"


def show_change(row: Row) -> str:
    """Return the relative change: with its interval where samples were tested, as observed otherwise."""
    if row.ratio is not None and row.ratio_low is not None and row.ratio_high is not None:
        return f"{row.ratio - 1:+.1%} [{row.ratio_low - 1:+.1%}, {row.ratio_high - 1:+.1%}]"
    if row.baseline and row.candidate and row.verdict in CHANGES:
        return f"{row.candidate / row.baseline - 1:+.1%}"
    return ""


def show_key(table: TableName, key: str | None) -> str:
    """Return what a row is about in one line, most telling part first, without control characters."""
    fields = decode_key(key) or {}
    if table is TableName.KERNEL:
        shape = "/".join(f"[{fields[name]}]" for name in ("grid", "block") if fields[name] is not None)
        return f"{short_kernel(str(fields['kernel'] or 'unnamed'))} {shape}".rstrip()
    if table is TableName.CALL:
        return visible(" ".join(part for part in _call_parts(fields) if part))
    return visible(" ".join(str(value) for value in fields.values()))


def show_side(side: Side) -> str:
    """Return which windows and how many steps a side rests on."""
    first_steps = sorted({first for first, _, _ in side.windows})
    shown = ", ".join(str(step) for step in first_steps[:6]) + (", …" if len(first_steps) > 6 else "")
    ranks = sorted({rank for _, _, rank in side.windows})
    parts = [
        _plural(side.steps, "complete step"),
        f"{_plural(len(first_steps), 'window')} from step {shown}",
        f"rank {', '.join(str(rank) for rank in ranks)}",
    ]
    if side.left_out:
        parts.append(f"{_plural(side.left_out, 'window')} without device telemetry left out")
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


def _call_parts(fields: dict[str, object]) -> list[str]:
    name = ".".join(str(fields[part]) for part in ("operator", "overload") if fields[part] is not None)
    inputs = fields["inputs"]
    tensors = ""
    if isinstance(inputs, list):
        tensors = " ".join(
            f"{_SHORT_DTYPES.get(dtype, dtype)}[{','.join(str(size) for size in shape)}]"
            for shape, dtype in inputs
        )
    module = "" if fields["module"] is None else f"in {fields['module']}"
    phase = "" if fields["phase"] is None else str(fields["phase"])
    return [name, phase, module, tensors]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

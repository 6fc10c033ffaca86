"""The tables of `tlk show --by`: one row a module, phase, operator with its inputs, or kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tlk_tracking.analysis.step_counts import count_steps, known_call_keys
from tlk_tracking.analysis.step_tables import TableName, decode_key
from tlk_tracking.annotation.kernel_annotation import module_table
from tlk_tracking.annotation.module_summary import MODULE_MEASURES
from tlk_tracking.cli.terminal import open_console
from tlk_tracking.core.gaps import Bound
from tlk_tracking.core.records import Availability
from tlk_tracking.core.text import show_number, visible
from tlk_tracking.report.row_names import show_key

if TYPE_CHECKING:
    from tlk_tracking.annotation.kernel_annotation import KernelAnnotation

_MEASURES = {"aten_calls": "calls", "launches": "launches", "device_time_ms": "device ms"}
ROOT = "(the model itself)"


class By(StrEnum):
    """What the rows of the table are."""

    MODULE = "module"
    PHASE = "phase"
    OPERATOR = "operator"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One group: its numbers a complete step, None where they are unknown."""

    key: dict[str, object]
    text: str
    values: dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTable:
    """Groups by falling device time; a measure has one bound in all of them."""

    rows: tuple[GroupRow, ...]
    bounds: dict[str, Bound]
    reasons: tuple[str, ...]


def group(annotation: KernelAnnotation, by: By) -> GroupTable:
    """Return the annotation's numbers by what `by` says; no row where that is not known at all."""
    return _modules(annotation) if by is By.MODULE else _steps(annotation, by)


def as_json(table: GroupTable) -> dict[str, object]:
    """Return the table for `--json`."""
    return {
        "rows": [{"key": row.key, **row.values} for row in table.rows],
        "bounds": {measure: bound.value for measure, bound in table.bounds.items()},
        "lower_bound_reasons": list(table.reasons),
    }


def print_groups(table: GroupTable, by: By, *, top: int) -> None:
    """Print the first rows of the table."""
    console = open_console()
    if not table.rows:
        console.print(Text(f"no {by.value} is known in a complete step"))
        return
    shown = Table(f"{by.value} (numbers are a step)", *_titles(table.bounds), box=None, pad_edge=False)
    shown.columns[0].min_width = 30
    for column in shown.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for row in table.rows[:top]:
        numbers = [show_number(row.values[measure], bound) for measure, bound in table.bounds.items()]
        shown.add_row(Text(row.text, overflow="fold"), *numbers)
    console.print(shown)
    if len(table.rows) > top:
        console.print(Text(f"{len(table.rows) - top} more rows (--top {len(table.rows)})"))
    if table.reasons:
        console.print(Text(f"≥ is a lower bound: the truth may be larger ({', '.join(table.reasons)})"))


def _titles(measures: Sequence[str] | dict[str, Bound]) -> list[str]:
    titles = []
    for measure in measures:
        plain = measure.removesuffix("_with_children")
        titles.append(_MEASURES[plain] + ("\n+ children" if plain != measure else ""))
    return titles


def _modules(annotation: KernelAnnotation) -> GroupTable:
    found = module_table(annotation)
    bounded = bool(len(found)) and bool(found["lower_bound"][0].as_py())
    observed = annotation.manifest.availability is not Availability.UNAVAILABLE
    measures = MODULE_MEASURES if observed else MODULE_MEASURES[:1]
    names = {
        f"{measure.replace('_us', '_ms')}{suffix}": (
            f"{measure}_per_step{suffix}",
            1e-3 if measure.endswith("_us") else 1,
        )
        for measure in measures
        for suffix in ("", "_with_children")
    }
    rows = [
        GroupRow(
            key={"module": row["module"]},
            text=visible(row["module"]) or ROOT,
            values={name: row[column] * unit for name, (column, unit) in names.items()},
        )
        for row in found.to_pylist()
    ]
    bound = Bound.LOWER if bounded else Bound.EXACT
    return GroupTable(
        rows=tuple(rows),
        bounds=dict.fromkeys(names, bound),
        reasons=tuple(found["reasons"][0].as_py().split()) if bounded else (),
    )


def _steps(annotation: KernelAnnotation, by: By) -> GroupTable:
    name = TableName.CALL if by is By.OPERATOR else TableName(by.value)
    wanted = {"phase"} if by is By.PHASE else {"operator", "overload", "inputs"}
    tables = count_steps(annotation, call_keys=known_call_keys(annotation) & wanted)
    table = tables.tables.get(name)
    if table is None or not len(tables.windows):
        return GroupTable(rows=(), bounds={}, reasons=())
    means = {
        measure: table.values[measure].mean(axis=1).tolist()
        for measure in _MEASURES
        if measure in table.values
    }
    order = sorted(
        range(len(table.keys)), key=lambda row: tuple(-means[measure][row] for measure in reversed(means))
    )
    reasons = {reason.value for measure in means for reason in table.reasons[measure]}
    return GroupTable(
        rows=tuple(
            GroupRow(
                key={
                    k: v
                    for k, v in (decode_key(table.keys[row]) or {}).items()
                    if by is not By.OPERATOR or k in wanted
                },
                text=show_key(name, table.keys[row]),
                values={measure: means[measure][row] for measure in means},
            )
            for row in order
        ),
        bounds={measure: table.bounds[measure] for measure in means},
        reasons=tuple(sorted(reasons)) if any(table.bounds[m] is not Bound.EXACT for m in means) else (),
    )

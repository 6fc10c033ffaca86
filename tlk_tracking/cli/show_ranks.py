"""`tlk show --ranks`: the ranks of one window side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tlk_tracking.analysis.rank_summary import (
    RankSummary,
    Spread,
    missing_annotations,
    same_window,
    say_missing,
    say_slowest,
    summarize_ranks,
)
from tlk_tracking.analysis.rank_work import RankPart
from tlk_tracking.cli.terminal import open_console
from tlk_tracking.core.gaps import Bound
from tlk_tracking.core.text import short_kernel, show_number, visible

if TYPE_CHECKING:
    from tlk_tracking.annotation.kernel_annotation import KernelAnnotation

_TITLES = {"launches": "launches", "device_time_ms": "device ms"}


def as_json(summary: RankSummary) -> dict[str, object]:
    """Return the ranks for `--json`; the numbers are of a complete step."""
    return {
        "first_step": summary.first_step,
        "world_size": summary.world_size,
        "missing": list(summary.missing),
        "ranks": [_rank_json(part) for part in summary.ranks],
        "spread": [asdict(row) for row in summary.spread],
        "slowest": None if summary.slowest is None else asdict(summary.slowest),
    }


def print_overview(annotations: Sequence[KernelAnnotation], one: KernelAnnotation) -> None:
    """Print the ranks of the window of `one`, if there are to be several, and what any window lacks."""
    summary = summarize_ranks(same_window(annotations, one))
    if len(summary.ranks) + len(summary.missing) > 1:
        print_ranks(summary)
        open_console().print(Text("--ranks says where they differ"))
    window = one.folder_name.partition("/")[0]
    elsewhere = [name for name in missing_annotations(annotations) if not name.startswith(f"{window}/")]
    if elsewhere:
        open_console().print(Text(f"missing in other windows: {', '.join(elsewhere)}", style="yellow"))


def print_ranks(summary: RankSummary) -> None:
    """Print one row a rank, and what to know of them together."""
    console = open_console()
    table = Table("rank (numbers are a step)", box=None, pad_edge=False)
    for title in ("launches", "device ms", "compute ms", "communication ms", "overlapped"):
        table.add_column(title, justify="right", no_wrap=True)
    for part in summary.ranks:
        table.add_row(f"{part.rank}{' (raised)' if part.failed else ''}", *_cells(part))
    for rank in summary.missing:
        table.add_row(Text(f"{rank} (missing)", style="yellow"), *["unknown"] * 5)
    console.print(table)
    for line in (say_missing(summary), say_slowest(summary)):
        if line is not None:
            console.print(Text(line))


def print_spread(summary: RankSummary, *, top: int) -> None:
    """Print smallest, middle and largest value by phase, operator and kernel, and what makes one rank slow."""
    console = open_console()
    for table, rows in groupby(summary.spread, key=lambda row: row.table):
        _print_table(console, table, list(rows), top)
    if summary.slowest is not None and summary.slowest.rows:
        shown = _table(f"what rank {summary.slowest.rank} takes longer for", "ms", "median ms", "more")
        for row in summary.slowest.rows[:top]:
            shown.add_row(
                _name(row.table, row.key),
                show_number(row.time_ms, summary.slowest.bound),
                show_number(row.median_ms, summary.slowest.bound),
                f"{row.excess_ms:,.4g}",
            )
        console.print(shown)


def _print_table(console: Console, table: str, rows: Sequence[Spread], top: int) -> None:
    for measure, found in groupby(rows, key=lambda row: row.measure):
        every = list(found)
        chosen = [row for row in every if row.largest_on is not None or row.bound is not Bound.EXACT]
        if not chosen:
            console.print(Text(f"{table}: {_TITLES[measure]} a step are the same on every rank"))
            continue
        shown = _table(f"{table}: {_TITLES[measure]} a step", "smallest", "median", "largest", "on rank")
        for row in chosen[:top]:
            numbers = [show_number(value, row.bound) for value in (row.minimum, row.median, row.maximum)]
            shown.add_row(
                _name(table, row.key), *numbers, "" if row.largest_on is None else str(row.largest_on)
            )
        console.print(shown)
        if len(chosen) > top:
            console.print(Text(f"{len(chosen) - top} more rows (--top {len(chosen)})"))


def _table(first: str, *others: str) -> Table:
    shown = Table(first, box=None, pad_edge=False)
    for title in others:
        shown.add_column(title, justify="right", no_wrap=True)
    return shown


def _name(table: str, key: str | None) -> Text:
    text = (
        "all" if key is None else short_kernel(key) if table in ("kernel", "communication") else visible(key)
    )
    return Text(text, overflow="fold")


def _cells(part: RankPart) -> list[str]:
    communication = part.communication
    compute = part.compute_time_ms if communication is not None else None
    cells = [
        (part.launches, part.bound("total", time=False)),
        (part.device_time_ms, part.bound("total", time=True)),
        (compute, part.bound("compute", time=True)),
        (communication.time_ms if communication else None, part.bound("communication", time=True)),
    ]
    texts = ["unknown" if value is None else show_number(value, bound) for value, bound in cells]
    share = communication.overlapped_share if communication else None
    sign = "" if communication is None or communication.bound is Bound.EXACT else "? "
    return [*texts, "" if share is None else f"{sign}{share:.1%}"]


def _rank_json(part: RankPart) -> dict[str, object]:
    communication = part.communication
    return {
        "rank": part.rank,
        "availability": part.availability.value,
        "failed": part.failed,
        "lower_bound_reasons": [reason.value for reason in part.reasons],
        "steps": part.steps,
        "launches": part.launches,
        "device_time_ms": part.device_time_ms,
        "compute_time_ms": None if communication is None else part.compute_time_ms,
        "communication": None
        if communication is None
        else asdict(communication) | {"overlapped_share": communication.overlapped_share},
    }

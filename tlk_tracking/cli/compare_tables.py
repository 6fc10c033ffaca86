"""The tables of `tlk compare` on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tlk_tracking.analysis.comparison import Comparison, Side
from tlk_tracking.analysis.comparison_rows import CHANGES, Row
from tlk_tracking.analysis.step_tables import TableName
from tlk_tracking.analysis.verdicts import Verdict
from tlk_tracking.cli.terminal import open_narrow_console
from tlk_tracking.core.text import plural, show_number, visible
from tlk_tracking.report.comparison_text import (
    TITLES,
    show_change,
    show_fact,
    show_side,
    why_undecided,
)
from tlk_tracking.report.row_names import show_key

_STYLES = {
    Verdict.ADDED: "yellow",
    Verdict.REMOVED: "cyan",
    Verdict.INCREASED: "bold red",
    Verdict.DECREASED: "bold green",
    Verdict.UNCHANGED: "dim",
    Verdict.UNDECIDED: "magenta",
}


def print_comparison(comparison: Comparison, *, top: int) -> None:
    """Print each candidate against the baseline: circumstances, totals, then the changed rows of each table."""
    console = open_narrow_console()
    for side in comparison.candidates:
        _print_heading(console, comparison.baseline, side)
        _print_context(console, comparison, side)
        rows = [row for row in comparison.rows if row.target == side.label]
        for name in TableName:
            of_table = [row for row in rows if row.table is name]
            if of_table:
                _print_table(console, name, of_table, top=top)
        _print_undecided(console, rows)


def _print_heading(console: Console, baseline: Side, candidate: Side) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for role, side in (("baseline", baseline), ("candidate", candidate)):
        table.add_row(role, Text(visible(side.label), style="bold"), Text(show_side(side)))
    console.print(table)


def _print_context(console: Console, comparison: Comparison, side: Side) -> None:
    differences = comparison.context[side.label]
    if not differences:
        console.print(Text("recorded under the same circumstances, as far as is known"))
        return
    table = Table("different circumstances", "baseline", "candidate", box=None, pad_edge=False)
    for each in differences:
        table.add_row(each.field, Text(show_fact(each.baseline)), Text(show_fact(each.candidate)))
    console.print(table)


def _print_table(console: Console, name: TableName, rows: list[Row], *, top: int) -> None:
    shown = rows
    if name is not TableName.TOTAL:
        changed = [row for row in rows if row.verdict in CHANGES]
        keys = list(dict.fromkeys(row.key for row in changed))[:top]
        shown = [row for key in keys for row in changed if row.key == key]
    console.print(Text(f"\n{TITLES[name]} (per complete step)", style="bold"))
    if shown:
        table = Table(box=None, pad_edge=False, expand=True)
        if name is not TableName.TOTAL:
            table.add_column("what", ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column("measure", no_wrap=True)
        for title in ("baseline", "candidate", "change"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        before = None
        for row in shown:
            what = show_key(name, row.key)
            cells = [Text("" if row.key == before else what)] if name is not TableName.TOTAL else []
            before = row.key
            table.add_row(
                *cells,
                Text(row.measure),
                show_number(row.baseline, row.baseline_bound),
                show_number(row.candidate, row.candidate_bound),
                show_change(row),
                Text(row.verdict.value, style=_STYLES[row.verdict]),
            )
        console.print(table)
    _print_hidden(console, [row for row in rows if row not in shown])


def _print_hidden(console: Console, rows: list[Row]) -> None:
    if not rows:
        return
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    said = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
    console.print(Text(f"{plural(len(rows), 'row')} not shown: {said}", style="dim"))


def _print_undecided(console: Console, rows: list[Row]) -> None:
    reasons = why_undecided(rows)
    if reasons:
        console.print(Text("\nUNDECIDED because", style="bold"))
    for reason, count in reasons:
        console.print(Text(f"  {plural(count, 'row')}: {visible(reason)}"))

"""Show a comparison as a self-contained HTML page (Comparison -> HTML text)."""

from __future__ import annotations

from collections.abc import Sequence

from tlk_tracking.analysis.comparison import Comparison, Side
from tlk_tracking.analysis.comparison_rows import CHANGES, Row
from tlk_tracking.analysis.step_tables import TableName
from tlk_tracking.core.text import plural, show_number, visible
from tlk_tracking.report.charts import PairOfBars, Span, draw_pairs, draw_spans
from tlk_tracking.report.comparison_text import TITLES, show_change, show_fact, show_side, why_undecided
from tlk_tracking.report.page import (
    Card,
    Cell,
    Chart,
    Column,
    Page,
    PageTable,
    Section,
    key_cells,
    key_titles,
    limited,
    number_cell,
    render_within_limit,
    text_cell,
)
from tlk_tracking.report.row_names import show_key

_BARS = 12
_REST = "`tlk compare --csv` has all of them."
_CARDS = ("launches", "aten_calls", "device_time_ms", "device_busy_ms")


def render_comparison(comparison: Comparison) -> str:
    """Return an HTML page under 1 MB that needs nothing else: circumstances, totals, changes, every table.

    Every number carries the sign of its bound, every UNDECIDED its reason, and every name is escaped.
    """
    charts = {side.label: _charts(_of(comparison, side), side) for side in comparison.candidates}
    return render_within_limit(
        lambda rows: _page(comparison, charts, rows // len(comparison.candidates) or 1)
    )


def _page(comparison: Comparison, charts: dict[str, tuple[Chart, ...]], limit: int) -> Page:
    sections: list[Section] = []
    several = len(comparison.candidates) > 1
    for number, side in enumerate(comparison.candidates, 1):
        prefix = f"c{number}-" if several else ""
        of = f" of {visible(side.label)}" if several else ""
        rows = _of(comparison, side)
        sections.append(_context(comparison, side, f"{prefix}context", f"Circumstances{of}"))
        sections.append(_totals(rows, charts[side.label], f"{prefix}changes", f"What changed{of}"))
        for name in TableName:
            of_table = [row for row in rows if row.table is name]
            if name is not TableName.TOTAL and of_table:
                table = _rows_table(name, of_table, limit)
                sections.append(
                    Section(title=f"{TITLES[name]}{of}", anchor=f"{prefix}{name.value}", tables=(table,))
                )
        sections.append(_undecided(rows, f"{prefix}undecided", f"Why rows are UNDECIDED{of}"))
    names = ", ".join(side.label for side in comparison.candidates)
    return Page(
        title=visible(f"Kernel telemetry: {names} against {comparison.baseline.label}"),
        lines=(
            visible(f"Baseline ({comparison.baseline.label}): {show_side(comparison.baseline)}."),
            *(visible(f"Candidate ({side.label}): {show_side(side)}.") for side in comparison.candidates),
            "Numbers are per complete step. A verdict is said only when it holds for every value that the "
            "bounds allow.",
        ),
        notices=(),
        sections=tuple(sections),
    )


def _of(comparison: Comparison, side: Side) -> list[Row]:
    return [row for row in comparison.rows if row.target == side.label]


def _context(comparison: Comparison, side: Side, anchor: str, title: str) -> Section:
    found = comparison.context[side.label]
    columns = tuple(Column(title=name) for name in ("circumstance", "baseline", "candidate"))
    rows = tuple(
        (
            text_cell(each.field.replace("_", " ")),
            text_cell(show_fact(each.baseline)),
            text_cell(show_fact(each.candidate)),
        )
        for each in found
    )
    return Section(
        title=title,
        anchor=anchor,
        lines=() if found else ("Recorded under the same circumstances, as far as is known.",),
        tables=(PageTable(columns=columns, rows=rows),) if found else (),
    )


def _totals(rows: Sequence[Row], charts: tuple[Chart, ...], anchor: str, title: str) -> Section:
    totals = [row for row in rows if row.table is TableName.TOTAL]
    by_verdict = {row.measure: row for row in totals}
    cards = tuple(
        Card(
            name=f"{measure.replace('_', ' ')}: {by_verdict[measure].verdict.value}",
            text=_from_to(by_verdict[measure]),
            hint=by_verdict[measure].reason,
        )
        for measure in _CARDS
        if measure in by_verdict
    )
    return Section(
        title=title,
        anchor=anchor,
        cards=cards,
        charts=charts,
        tables=(_rows_table(TableName.TOTAL, totals, len(totals)),),
    )


def _charts(rows: Sequence[Row], side: Side) -> tuple[Chart, ...]:
    charts = [
        _time_chart(rows, name, f"Device time, {TITLES[name].lower()}: the largest certain changes", side)
        for name in (TableName.PHASE, TableName.MODULE, TableName.CALL, TableName.KERNEL)
    ]
    return tuple(chart for chart in (*charts, _interval_chart(rows)) if chart is not None)


def _time_chart(rows: Sequence[Row], name: TableName, caption: str, side: Side) -> Chart | None:
    changed = [
        row
        for row in rows
        if row.table is name and row.measure == "device_time_ms" and row.verdict in CHANGES
    ][:_BARS]
    if not changed:
        return None
    pairs = [
        PairOfBars(
            label=show_key(name, row.key),
            baseline=row.baseline,
            candidate=row.candidate,
            text=f"{_from_to(row)} ms",
        )
        for row in changed
    ]
    title = f"{caption} (upper bar: baseline, lower bar: {visible(side.label)})"
    return Chart(caption=title, svg=draw_pairs(pairs, title=title, unit="ms per step"))


def _interval_chart(rows: Sequence[Row]) -> Chart | None:
    spans = [
        Span(
            label=f"{row.table.value} {show_key(row.table, row.key)}".rstrip(),
            ratio=row.ratio,
            low=row.ratio_low,
            high=row.ratio_high,
        )
        for row in sorted(rows, key=lambda row: (row.verdict not in CHANGES, -abs((row.ratio or 1.0) - 1.0)))
        if row.measure == "device_time_ms"
        and row.ratio is not None
        and row.ratio_low is not None
        and row.ratio_high is not None
    ][:_BARS]
    if not spans:
        return None
    title = "Ratio of median device times with its 95 % interval"
    return Chart(caption=title, svg=draw_spans(spans, title=title, unit="candidate / baseline"))


def _rows_table(name: TableName, rows: Sequence[Row], limit: int) -> PageTable:
    titles = () if name is TableName.TOTAL else key_titles(name)
    columns = [
        *(Column(title=title) for title in titles),
        Column(title="measure"),
        Column(title="baseline", is_number=True),
        Column(title="candidate", is_number=True),
        Column(title="change", is_number=True),
        Column(title="verdict"),
        Column(title="reason"),
    ]
    return limited(columns, [(*_about(name, row), *_cells(row)) for row in rows], limit=limit, rest=_REST)


def _about(name: TableName, row: Row) -> list[Cell]:
    return [] if name is TableName.TOTAL else key_cells(name, row.key)


def _cells(row: Row) -> tuple[Cell, ...]:
    change = show_change(row)
    ratio = row.ratio
    if ratio is None and row.baseline and row.candidate and change:
        ratio = row.candidate / row.baseline
    return (
        text_cell(row.measure),
        number_cell(row.baseline, row.baseline_bound),
        number_cell(row.candidate, row.candidate_bound),
        Cell(text=change, order=float("nan") if ratio is None else ratio),
        text_cell(row.verdict.value, style=row.verdict.value.lower()),
        text_cell(row.reason or "", style="long"),
    )


def _undecided(rows: Sequence[Row], anchor: str, title: str) -> Section:
    reasons = why_undecided(rows)
    return Section(
        title=title,
        anchor=anchor,
        lines=tuple(f"{plural(count, 'row')}: {visible(reason)}." for reason, count in reasons)
        or ("No row is.",),
    )


def _from_to(row: Row) -> str:
    before = show_number(row.baseline, row.baseline_bound)
    return f"{before} → {show_number(row.candidate, row.candidate_bound)}"

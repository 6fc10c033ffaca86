"""Show the ranks of one window on an HTML page (RankSummary -> Section)."""

from __future__ import annotations

import math

from tlk_tracking.analysis.rank_summary import RankSummary, say_missing, say_slowest
from tlk_tracking.analysis.rank_work import Communication, RankPart
from tlk_tracking.core.gaps import Bound
from tlk_tracking.core.text import show_number, visible
from tlk_tracking.report.charts import Bar, draw_bars
from tlk_tracking.report.page import Cell, Chart, Column, PageTable, Section, limited, text_cell

_BARS = 16
_ROWS = 100
_MEASURES = {"launches": "launches", "device_time_ms": "device time ms"}
_NUMBERS = ("launches", "device time ms", "compute ms", "communication ms", "overlapped by compute")


def rank_section(summary: RankSummary, *, limit: int) -> Section:
    """Return the section: one row a rank, compute time as bars, and the spread by phase, operator and kernel."""
    said = [line for line in (say_missing(summary), say_slowest(summary)) if line is not None]
    chart = _chart(summary)
    return Section(
        title="Ranks side by side",
        anchor="ranks",
        lines=tuple(said),
        charts=() if chart is None else (chart,),
        tables=(_ranks(summary, min(limit, _ROWS)), _spread(summary, min(limit, _ROWS))),
    )


def _chart(summary: RankSummary) -> Chart | None:
    known = [(part.compute_time_ms, part) for part in summary.ranks if part.communication is not None]
    largest = sorted(((time, part) for time, part in known if time), key=lambda pair: -pair[0])
    if not largest:
        return None
    rest = len(largest) - _BARS
    caption = f"Compute by rank{f' ({rest} faster ones not drawn)' if rest > 0 else ''}"
    bars = [
        Bar(
            label=f"rank {part.rank}",
            value=time,
            text=f"{show_number(time, part.bound('compute', time=True))} ms",
        )
        for time, part in largest[:_BARS]
    ]
    return Chart(caption=caption, svg=draw_bars(bars, title=caption, unit="ms per step"))


def _ranks(summary: RankSummary, limit: int) -> PageTable:
    rows = [_row(part) for part in summary.ranks]
    unknown = Cell(text="unknown", order=math.nan)
    rows += [
        (Cell(text=f"{rank}", order=rank), text_cell("missing"), *[unknown] * len(_NUMBERS))
        for rank in summary.missing
    ]
    columns = [Column(title="rank", is_number=True), Column(title="state")]
    columns += [Column(title=title, is_number=True) for title in _NUMBERS]
    return limited(columns, rows, limit=limit, rest="`tlk show --ranks` has them all.")


def _row(part: RankPart) -> tuple[Cell, ...]:
    communication = part.communication
    known = communication is not None
    cells = (
        _number(part.launches, part.bound("total", time=False)),
        _number(part.device_time_ms, part.bound("total", time=True)),
        _number(part.compute_time_ms if known else None, part.bound("compute", time=True)),
        _number(communication.time_ms if communication else None, part.bound("communication", time=True)),
        _share(communication),
    )
    state = "raised" if part.failed else part.availability.value
    return (Cell(text=str(part.rank), order=part.rank), text_cell(state), *cells)


def _share(communication: Communication | None) -> Cell:
    share = None if communication is None else communication.overlapped_share
    if communication is None or share is None:
        return Cell(text="unknown" if communication is None else "—", order=math.nan)
    sign = "" if communication.bound is Bound.EXACT else "? "
    return Cell(text=f"{sign}{share:.1%}", order=share)


def _number(value: float | None, bound: Bound) -> Cell:
    if value is None:
        return Cell(text="unknown", order=math.nan)
    return Cell(text=show_number(value, bound), order=value)


def _spread(summary: RankSummary, limit: int) -> PageTable:
    rows = [
        (
            text_cell(row.table),
            text_cell("all" if row.key is None else visible(row.key)),
            text_cell(_MEASURES[row.measure]),
            *(_number(value, row.bound) for value in (row.minimum, row.median, row.maximum)),
            text_cell("" if row.largest_on is None else str(row.largest_on)),
        )
        for row in sorted(summary.spread, key=lambda row: row.minimum == row.maximum)
    ]
    columns = [Column(title="table"), Column(title="of"), Column(title="number a step")]
    columns += [Column(title=title, is_number=True) for title in ("smallest", "median", "largest")]
    columns.append(Column(title="largest on rank"))
    return limited(columns, rows, limit=limit, rest="`tlk show --ranks --json` has them all.")

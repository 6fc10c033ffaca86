"""Lay out a self-contained HTML page (sections of numbers, charts and tables -> HTML text)."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version

import jinja2

from tlk_tracking.analysis.step_tables import TableName, decode_key
from tlk_tracking.core.gaps import Bound
from tlk_tracking.core.text import show_number, visible
from tlk_tracking.report.row_names import show_call, show_inputs

MAX_PAGE_BYTES = 1_000_000
_MAX_ROWS = 500
_MAX_CHARACTERS = 600
_LONG = 24  # characters from which on a cell may break anywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of a table; one with an `order` is a number and sorts by it (NaN: no number)."""

    text: str
    order: float | None = None
    style: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The head of one column."""

    title: str
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table that sorts and filters; `left_out` says which rows are not on the page."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One number that is seen first."""

    name: str
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing and what it shows."""

    caption: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of a page; its title is unique on the page."""

    title: str
    anchor: str
    lines: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[PageTable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole page."""

    title: str
    lines: tuple[str, ...]
    notices: tuple[str, ...]
    sections: tuple[Section, ...]


def render_within_limit(make_page: Callable[[int], Page]) -> str:
    """Return the HTML of `make_page(rows a table may have)`, with as many rows as fit under 1 MB."""
    rows = _MAX_ROWS
    while True:
        html = render_page(make_page(rows))
        if len(html.encode()) < MAX_PAGE_BYTES or rows <= 1:
            return html
        rows //= 2


def render_page(page: Page) -> str:
    """Return the page as HTML; all texts of it are escaped, and no script but our own may run."""
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _template().render(
        page=page,
        style=_asset("page.css"),
        script=script,
        script_digest=f"sha256-{digest}",
        version=version("tlk-tracking"),
    )


def text_cell(text: str, *, style: str | None = None, hint: str | None = None) -> Cell:
    """Return a cell of text without control characters; one that is much too long is cut."""
    clean = visible(text)
    cut = clean if len(clean) <= _MAX_CHARACTERS else f"{clean[:_MAX_CHARACTERS]}…"
    return Cell(text=cut, style=style, hint=hint)


def number_cell(value: float | None, bound: Bound, *, hint: str | None = None) -> Cell:
    """Return a cell with a number, its bound visible."""
    return Cell(text=show_number(value, bound), order=float("nan") if value is None else value, hint=hint)


def key_titles(name: TableName) -> tuple[str, ...]:
    """Return the titles of the columns that say what a row is about."""
    if name is TableName.KERNEL:
        return ("kernel", "grid", "block")
    if name is TableName.CALL:
        return ("operator", "phase", "module", "inputs")
    return (name.value,)


def key_cells(name: TableName, key: str | None) -> list[Cell]:
    """Return the cells that say what a row is about, as many as there are titles."""
    fields = decode_key(key) or {}
    if name is TableName.CALL:
        texts = [
            show_call(fields),
            str(fields["phase"] or "—"),
            str(fields["module"] or "—"),
            show_inputs(fields["inputs"]),
        ]
    else:
        texts = ["—" if value is None else str(value) for value in fields.values()]
    return [text_cell(text, style="long" if len(text) > _LONG else None) for text in texts]


def limited(
    columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]], *, limit: int, rest: str
) -> PageTable:
    """Return a table of the first rows; `rest` says where the others are."""
    left = len(rows) - limit
    return PageTable(
        columns=tuple(columns),
        rows=tuple(rows[:limit]),
        left_out=f"{left} more rows are not on this page; {rest}" if left > 0 else None,
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_asset("page.html"))


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")

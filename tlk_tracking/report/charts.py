"""Draw bars for an HTML page (labels + numbers -> inline SVG that takes its colours from the page)."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
# Colours that matplotlib draws with, and what stands for them in the page.
_INK, _FIRST, _SECOND, _GRID = "#010101", "#020202", "#030303", "#040404"
_PAGE_COLOURS = {
    _INK: "currentColor",
    _FIRST: "var(--first)",
    _SECOND: "var(--second)",
    _GRID: "var(--rule)",
}
_WIDTH_IN = 7.2
_ROW_IN = 0.26
_ABOVE_IN, _BELOW_IN, _BESIDE_IN = 0.08, 0.55, 0.15  # below: the numbers of the axis and its unit
_TEXT_POINTS = 8.5
_LABEL_CHARACTERS = 52
# The font of the drawing has these; anything else would make matplotlib warn.
_UNDRAWABLE = re.compile("[^ -~\xa1-\xff…—≥≤→]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: what it is of, how long it is, and the text at its end (value with its bound)."""

    label: str
    value: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOfBars:
    """The same number on both sides of a comparison; None where a side has none."""

    label: str
    baseline: float | None
    candidate: float | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A ratio with its interval; 1 is no change."""

    label: str
    ratio: float
    low: float
    high: float


def draw_bars(bars: Sequence[Bar], *, title: str, unit: str) -> str:
    """Return horizontal bars, the first on top."""
    axes = _axes(len(bars), unit)
    axes.barh(range(len(bars)), [bar.value for bar in bars], color=_FIRST, height=0.72)
    for row, bar in enumerate(bars):
        _annotate(axes, bar.value, row, bar.text)
    return _finish(axes, [bar.label for bar in bars], title)


def draw_pairs(pairs: Sequence[PairOfBars], *, title: str, unit: str) -> str:
    """Return two bars for each label: the baseline's above the candidate's."""
    axes = _axes(len(pairs) * 1.6, unit)
    for side, colour, offset in (("baseline", _FIRST, -0.19), ("candidate", _SECOND, 0.19)):
        values = [getattr(pair, side) or 0.0 for pair in pairs]
        axes.barh([row + offset for row in range(len(pairs))], values, color=colour, height=0.36)
    for row, pair in enumerate(pairs):
        _annotate(axes, max(pair.baseline or 0.0, pair.candidate or 0.0), row, pair.text)
    return _finish(axes, [pair.label for pair in pairs], title)


def draw_spans(spans: Sequence[Span], *, title: str, unit: str) -> str:
    """Return a point with its interval for each label, beside the line of no change."""
    axes = _axes(len(spans), unit)
    for row, span in enumerate(spans):
        axes.plot([span.low, span.high], [row, row], color=_FIRST, linewidth=2.2)
        axes.plot([span.ratio], [row], marker="o", color=_SECOND, markersize=6)
    axes.axvline(1.0, color=_INK, linewidth=0.8)
    return _finish(axes, [span.label for span in spans], title)


def _axes(rows: float, unit: str) -> Axes:
    # Not pyplot: it keeps figures alive and chooses a window system.
    from matplotlib.figure import Figure

    height_in = _ABOVE_IN + _BELOW_IN + _ROW_IN * max(rows, 1)
    figure = Figure(figsize=(_WIDTH_IN, height_in))
    figure.subplots_adjust(top=1 - _ABOVE_IN / height_in, bottom=_BELOW_IN / height_in)
    axes = figure.add_subplot()
    axes.set_xlabel(unit, color=_INK)
    axes.grid(axis="x", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def _annotate(axes: Axes, value: float, row: float, text: str) -> None:
    axes.annotate(
        _drawable(text),
        (value, row),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=_INK,
        fontsize=_TEXT_POINTS,
        parse_math=False,
    )


def _finish(axes: Axes, labels: Sequence[str], title: str) -> str:
    # A kernel's name may hold dollar signs, which would otherwise be mathematics.
    shown = [_drawable(label) for label in labels]
    axes.set_yticks(range(len(labels)), labels=shown, parse_math=False)
    _make_room(axes, shown)
    axes.invert_yaxis()
    axes.margins(x=0.04)
    return _svg(axes, title)


def _make_room(axes: Axes, labels: Sequence[str]) -> None:
    # Only texts vary in width. matplotlib's own layout draws everything once more to find that out.
    from matplotlib import rcParams

    left = _BESIDE_IN + _widest_in(labels, rcParams["font.size"])  # as the labels of an axis have it
    right = _BESIDE_IN + _widest_in([text.get_text() for text in axes.texts], _TEXT_POINTS)
    # Whatever the texts are, a tenth is left for the bars; a name of capitals alone is cut at the edge.
    axes.figure.subplots_adjust(left=min(left / _WIDTH_IN, 0.65), right=1 - min(right / _WIDTH_IN, 0.25))


def _widest_in(texts: Sequence[str], points: float) -> float:
    """Return the inches that the widest of the texts takes."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=points)
    widths = [text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] for text in texts]
    return max(widths, default=0.0) / 72


def _drawable(label: str) -> str:
    short = label if len(label) <= _LABEL_CHARACTERS else f"{label[: _LABEL_CHARACTERS - 1]}…"
    return _UNDRAWABLE.sub("?", short)


def _svg(axes: Axes, title: str) -> str:
    import matplotlib.figure

    figure = axes.figure
    assert isinstance(figure, matplotlib.figure.Figure)  # as _axes made it
    sink = io.StringIO()
    # Text as text: it can be read, searched and printed, and takes the page's font.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(sink.getvalue(), title)


def _for_page(svg: str, title: str) -> str:
    """Take out what a page has already, give the drawing a name, and let the page choose its colours."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(svg)
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    referenced = set(re.findall(r"#([\w-]+)", svg))
    for element in root.iter():
        if element.get("id") not in referenced:
            element.attrib.pop("id", None)
        style = element.get("style")
        if style is not None:
            for drawn, shown in _PAGE_COLOURS.items():
                style = style.replace(drawn, shown)
            element.set("style", style)
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", title)
    return ElementTree.tostring(root, encoding="unicode")

"""Show numbers with their bounds, and names from outside without harm (value or text -> text)."""

from __future__ import annotations

import re

from tlk_tracking.core.gaps import Bound

# The full-width forms too: spreadsheets in some languages take them for the plain ones.
_FORMULA = re.compile(r"^\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")


def visible(text: str) -> str:
    """Return the text with U+FFFD for each character that is not printed.

    Those are controls, line breaks, marks that turn the direction of text, invisible ones, lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def csv_cell(text: str) -> str:
    """Return the text as a cell that no spreadsheet takes for a formula."""
    clean = visible(text)
    return f"'{clean}" if _FORMULA.match(clean) else clean


def short_kernel(name: str) -> str:
    """Return a kernel's name without return type, namespaces, template arguments and parameters, for tables."""
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", bare, maxsplit=1)[0]
    return visible(head.rsplit("::", 1)[-1] or name)


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

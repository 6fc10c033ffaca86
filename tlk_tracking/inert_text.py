"""Make names from outside harmless where people look at them (text -> text)."""

from __future__ import annotations

import re

# C0 and C1 controls, line separators, and the marks that turn the direction of text.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
_FORMULA = re.compile(r"^\s*[=+\-@]")


def visible(text: str) -> str:
    """Return the text with each control character replaced by U+FFFD."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def csv_cell(text: str) -> str:
    """Return the text as a cell that no spreadsheet takes for a formula."""
    clean = visible(text)
    return f"'{clean}" if _FORMULA.match(clean) else clean


def short_kernel(name: str) -> str:
    """Return a kernel's name without return type, namespaces, template arguments and parameters, for tables."""
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", bare, maxsplit=1)[0]
    return visible(head.rsplit("::", 1)[-1] or name)

"""Open the terminal, or the file, that tables are printed on (-> Console)."""

from __future__ import annotations

from rich.console import Console

_WIDTH = 100


def open_console() -> Console:
    """Return a console as wide as the terminal; of 100 columns where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def open_narrow_console() -> Console:
    """Return a console of at most 100 columns."""
    console = open_console()
    console.width = min(_WIDTH, console.width)
    return console

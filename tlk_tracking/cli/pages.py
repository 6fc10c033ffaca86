"""Write the HTML pages that commands make (path, text -> file)."""

from __future__ import annotations

from pathlib import Path

from tlk_tracking.errors import ConfigurationError


def write_page(path: Path, html: str) -> None:
    """Write a page over whatever has its name.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}; give another file") from error

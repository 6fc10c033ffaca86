"""Answer for files that a verb cannot write (path -> context)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tlk_tracking.errors import ConfigurationError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong while the file is written into one line.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}; give another file") from error

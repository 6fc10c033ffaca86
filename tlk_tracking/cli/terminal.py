"""Standard output, tables, files and progress of the command line (text -> terminal)."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tlk_tracking.core.errors import ConfigurationError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console

_WIDTH = 100
_SHOWN_FROM_BYTES = 8 << 20
_ERRORS = "tlk_spelled"
_SPELLED = {
    "≥": ">=",
    "≤": "<=",
    "·": "|",
    "…": "...",
    "→": "->",
    "µ": "u",
    "\u00d7": "x",
    "—": "-",
    "±": "+-",
}


def prepare_output() -> None:
    """Let no sign of ours and no reader who left decide how the program ends.

    A sign that the encoding of the output lacks is spelled. Where a reader leaves, as in `tlk show ... | head`, the
    rest is dropped and the exit code stays that of the verb. A stream that a program put in its place stays.
    """
    codecs.register_error(_ERRORS, _spell)
    stream = sys.stdout
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return
    if stream.isatty():  # Windows writes to a terminal by other means than a file
        stream.reconfigure(errors=_ERRORS)
        return
    stream.flush()
    file = io.BufferedWriter(_Output(stream.fileno(), "wb", closefd=False))
    sys.stdout = io.TextIOWrapper(file, encoding=stream.encoding, errors=_ERRORS, write_through=True)


def open_console() -> Console:
    """Return a console as wide as the terminal; of 100 columns where there is none."""
    from rich.console import Console  # takes a tenth of a second

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def open_narrow_console() -> Console:
    """Return a console of at most 100 columns."""
    console = open_console()
    console.width = min(_WIDTH, console.width)
    return console


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


@contextmanager
def reading(path: Path) -> Iterator[Callable[[int], None] | None]:
    """Show how much of a trace has been read; nothing for a short one or where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if path.stat().st_size < _SHOWN_FROM_BYTES or not console.is_terminal:
        yield None
        return
    # The size of what a .gz holds is not known before its end.
    total = None if path.suffix == ".gz" else path.stat().st_size
    columns = (TextColumn(f"reading {path.name}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("read", total=total)
        yield lambda done: bar.update(task, completed=done)


def opening(targets: Sequence[str]) -> Iterator[str]:
    """Give the targets one by one and show how many are done, where somebody watches."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(
        targets,
        description="reading",
        console=console,
        transient=True,
        disable=not console.is_terminal or not any(target.startswith("runs:/") for target in targets),
    )


class _Output(io.FileIO):
    """A file that takes everything once its reader has left, or once an error was raised."""

    _lost = False

    def write(self, data: ReadableBuffer, /) -> int:
        if self._lost:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except BrokenPipeError:
            self._lost = True
            return memoryview(data).nbytes
        except OSError as error:
            self._lost = True  # what is still buffered would raise again at the interpreter's end
            raise OSError(error.errno, error.strerror, "standard output") from error


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(_SPELLED.get(s, s.encode("ascii", "backslashreplace").decode()) for s in signs), error.end

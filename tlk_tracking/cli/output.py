"""Make standard output one that says what went wrong with it, and only that (file descriptor -> text stream)."""

from __future__ import annotations

import codecs
import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

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

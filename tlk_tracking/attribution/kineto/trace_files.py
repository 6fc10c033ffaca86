"""Open the files that an import reads, plain or gzip, within stated limits, and name them by their content."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from tlk_tracking.core.errors import TraceError

# Traces shrink by 10 to 20 times; what grows far more is made to fill memory or time.
MAX_EXPANSION = 200
_SMALL_BYTES = 64 << 20
_GZIP = b"\x1f\x8b"


@dataclass(slots=True, kw_only=True)
class InputFile:
    """A stream that refuses to give more than its limits; `bytes_read` counts what it has given."""

    path: Path
    stream: IO[bytes]
    max_bytes: int
    bytes_read: int = 0

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, none at the end.

        Raises:
            TraceError: the file cannot be read or exceeds its limits.
        """
        try:
            chunk = self.stream.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(self.path, error) from error
        self.bytes_read += len(chunk)
        if self.bytes_read > self.max_bytes:
            raise TraceError(f"{self.path.name} is larger than {self.max_bytes} bytes, the most that is read")
        return chunk


@contextmanager
def open_input(path: Path, *, max_bytes: int) -> Iterator[InputFile]:
    """Open a plain or gzip file; the content decides which it is, not the name.

    Raises:
        TraceError: it is missing, is not a plain file, or grows beyond `max_bytes` or `MAX_EXPANSION` times.
    """
    try:
        if not path.is_file():  # a pipe would be waited for
            raise TraceError(f"cannot read {path.name}: it is missing or is not a plain file")
        with path.open("rb") as file:
            zipped = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            if zipped:
                max_bytes = min(max_bytes, max(_SMALL_BYTES, MAX_EXPANSION * path.stat().st_size))
            stream = cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if zipped else file
            yield InputFile(path=path, stream=stream, max_bytes=max_bytes)
    except OSError as error:
        raise _unreadable(path, error) from error


def content_session(path: Path) -> str:
    """Return the session of a trace that names none: the same content gives the same session.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:8]
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> TraceError:
    return TraceError(f"cannot read {path.name}: {str(error) or type(error).__name__}")

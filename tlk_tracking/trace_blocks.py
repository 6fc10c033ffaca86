"""Cut a Chrome trace file into blocks of whole events (path -> header, then lists of decoded events).

Kineto writes one event after the other with a fixed indentation, so blocks of a few MiB can be cut and
decoded without holding the file. Any other layout is decoded as a whole.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, cast

import msgspec

from tlk_tracking.errors import TraceError

BLOCK_BYTES = 4 << 20
HEADER_BYTES = 1 << 20
MAX_WHOLE_BYTES = 512 << 20
MAX_TRACE_BYTES = 64 << 30

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class EventArgs(msgspec.Struct, gc=False):
    """The part of an event's `args` that is read; the rest is skipped."""

    external_id: _Int64 | None = msgspec.field(name="External id", default=None)
    correlation: _Int64 | None = None
    device: _Int64 | None = None
    stream: _Int64 | None = None
    bytes: _Int64 | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None


class TraceEvent(msgspec.Struct, gc=False):
    """One event of a Chrome trace; times are in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float | None = None
    dur: float | None = None
    args: EventArgs | None = None


class _DeviceProperties(msgspec.Struct):
    name: str | None = None


class _DistributedInfo(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None


class TraceHeader(msgspec.Struct):
    """What Kineto says once in a file, before or after its events."""

    device_properties: list[_DeviceProperties] = msgspec.field(name="deviceProperties", default_factory=list)
    distributed_info: _DistributedInfo | None = msgspec.field(name="distributedInfo", default=None)
    cuda_driver_version: int | None = None
    cuda_runtime_version: int | None = None
    cupti_version: int | None = None


class _WholeTrace(TraceHeader):
    events: list[msgspec.Raw] = msgspec.field(name="traceEvents", default_factory=list)


@dataclass(slots=True)
class TraceBlocks:
    """One pass over a trace file.

    Iterating gives lists of events; `header` and `unreadable` are final once the iteration has ended.

    Raises:
        TraceError: the file is missing, is no Chrome trace, is cut short or exceeds the stated limits.
    """

    path: Path
    header: TraceHeader = field(default_factory=TraceHeader)
    unreadable: int = 0
    bytes_read: int = 0

    def __iter__(self) -> Iterator[list[TraceEvent]]:
        try:
            with _open(self.path) as file:
                yield from self._blocks(file)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(
                f"cannot read the trace {self.path.name}: {str(error) or type(error).__name__}"
            ) from error

    def _blocks(self, file: IO[bytes]) -> Iterator[list[TraceEvent]]:
        head = self._read(file, HEADER_BYTES)
        begin = re.search(rb'"traceEvents"\s*:\s*\[\s*', head)
        if begin is None or b"\n  },\n  {" not in head[begin.end() :]:
            yield self._whole(head, file)
            return
        self.header = _decode_header(head[: begin.end()] + b"]}", self.path)
        rest = head[begin.end() :]
        while chunk := self._read(file, BLOCK_BYTES):
            rest += chunk
            cut = rest.rfind(b"\n  },\n  {")
            if cut < 0:
                if len(rest) > MAX_WHOLE_BYTES:
                    raise TraceError(f"one event of {self.path.name} is larger than {MAX_WHOLE_BYTES} bytes")
                continue
            yield self._decode(rest[: cut + 4])
            rest = rest[cut + 5 :]
        end = rest.rfind(b"\n  ]")
        if end < 0:
            raise TraceError(f"the trace {self.path.name} ends in the middle; it was not written to its end")
        _decode_header(b"{" + rest[end + 4 :].lstrip(b" \n,"), self.path)
        yield self._decode(rest[:end])

    def _read(self, file: IO[bytes], size: int) -> bytes:
        chunk = file.read(size)
        self.bytes_read += len(chunk)
        if self.bytes_read > MAX_TRACE_BYTES:
            raise TraceError(f"the trace {self.path.name} is larger than {MAX_TRACE_BYTES} bytes")
        return chunk

    def _whole(self, head: bytes, file: IO[bytes]) -> list[TraceEvent]:
        parts = [head]
        while chunk := self._read(file, BLOCK_BYTES):
            parts.append(chunk)
            if self.bytes_read > MAX_WHOLE_BYTES:
                raise TraceError(
                    f"{self.path.name} is not laid out as Kineto writes traces and is larger than "
                    f"{MAX_WHOLE_BYTES} bytes, the most that is read at once"
                )
        body = b"".join(parts)
        try:
            if body.lstrip()[:1] == b"[":
                raws = _decode_strict(body, list[msgspec.Raw])
            else:
                trace = _decode_strict(body, _WholeTrace)
                self.header = trace
                raws = trace.events
        except (msgspec.DecodeError, RecursionError) as error:
            raise TraceError(f"{self.path.name} is not a Chrome trace: {error}") from error
        return self._decode_each([bytes(raw) for raw in raws])

    def _decode(self, block: bytes) -> list[TraceEvent]:
        try:
            return _EVENTS.decode(b"[" + block + b"]")
        except (msgspec.DecodeError, RecursionError):
            return self._decode_each(re.split(rb"(?<=\n  \}),(?=\n  \{)", block))

    def _decode_each(self, raws: list[bytes]) -> list[TraceEvent]:
        events = []
        for raw in raws:
            try:
                events.append(_EVENT.decode(raw))
            except (msgspec.DecodeError, RecursionError):
                try:
                    events.append(_EVENT.decode(_NOT_FINITE.sub(rb"\1null", raw)))
                except (msgspec.DecodeError, RecursionError):
                    self.unreadable += 1
        return events


_EVENTS = msgspec.json.Decoder(list[TraceEvent])
_EVENT = msgspec.json.Decoder(TraceEvent)
# Kineto has written bare inf and nan (kineto#105), which strict JSON refuses.
_NOT_FINITE = re.compile(rb"(:\s*)-?(?:inf|Infinity|nan|NaN)\b")


def _open(path: Path) -> IO[bytes]:
    # The content decides, not the name: two bytes mark gzip.
    with path.open("rb") as file:
        magic = file.read(2)
    return cast("IO[bytes]", gzip.open(path, "rb")) if magic == b"\x1f\x8b" else path.open("rb")


def _decode_strict(body: bytes, kind: Any) -> Any:  # msgspec's decode is typed by its argument
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        return msgspec.json.decode(_NOT_FINITE.sub(rb"\1null", body), type=kind)


def _decode_header(body: bytes, path: Path) -> TraceHeader:
    try:
        return cast("TraceHeader", _decode_strict(body, TraceHeader))
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(f"{path.name} is not a Chrome trace: {error}") from error

"""Cut a Chrome trace file into blocks of whole events (path -> header, then lists of decoded events).

Kineto writes one event after the other with a fixed indentation, so blocks can be cut and decoded without
holding the file. Any other layout is decoded as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec

from tlk_tracking.attribution.kineto.trace_files import InputFile, open_input
from tlk_tracking.core.errors import TraceError

# A block and its events stay in a core's cache: larger ones decode slower and hold more memory.
BLOCK_BYTES = 256 << 10
HEADER_BYTES = 1 << 20
MAX_EVENT_BYTES = 16 << 20
MAX_TRACE_BYTES = 64 << 30
# Of a file that is decoded as a whole: together they keep it below some 2 GB of memory.
MAX_WHOLE_BYTES = 256 << 20
MAX_WHOLE_VALUES = 16 << 20
_EVENTS_AT_ONCE = 10_000

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class EventArgs(msgspec.Struct, gc=False):
    """The part of an event's `args` that is read; the rest is skipped."""

    external_id: _Int64 | None = msgspec.field(name="External id", default=None)
    correlation: _Int64 | None = None
    device: _Int64 | None = None
    stream: _Int64 | None = None
    bytes: _Int64 | None = None
    grid: tuple[_Int64, _Int64, _Int64] | None = None
    block: tuple[_Int64, _Int64, _Int64] | None = None


class TraceEvent(msgspec.Struct, gc=False):
    """One event of a Chrome trace; times are in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: _Int64 | str = 0
    tid: _Int64 | str = 0
    ts: float | None = None
    dur: float | None = None
    args: EventArgs | None = None


class _DeviceProperties(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(max_length=200)] | None = None


class _DistributedInfo(msgspec.Struct):
    rank: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None


class TraceHeader(msgspec.Struct):
    """What Kineto says once in a file, before or after its events."""

    device_properties: list[_DeviceProperties] = msgspec.field(name="deviceProperties", default_factory=list)
    distributed_info: _DistributedInfo | None = msgspec.field(name="distributedInfo", default=None)
    cuda_runtime_version: _Int64 | None = None
    cupti_version: _Int64 | None = None


class _WholeTrace(TraceHeader, kw_only=True):
    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")


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
        with open_input(self.path, max_bytes=MAX_TRACE_BYTES) as file:
            yield from self._blocks(file)

    def _blocks(self, file: InputFile) -> Iterator[list[TraceEvent]]:
        head = b""
        begin = None
        while begin is None and len(head) < HEADER_BYTES and (chunk := self._read(file)):
            head += chunk
            found = _BEGIN.search(head)
            begin = found if found is not None and _BETWEEN in head[found.end() :] else None
        if begin is None:
            yield from self._whole(head, file)
            return
        self.header = _decode_header(head[: begin.end()] + b"]}", self.path)
        # The buffer is always an open array, so that a block is decoded where it lies.
        buffer = bytearray(b"[" + head[begin.end() :])
        while chunk := self._read(file):
            seen = max(len(buffer) - len(_BETWEEN), 0)
            buffer += chunk
            cut = buffer.rfind(_BETWEEN, seen)
            if cut < 0:
                if len(buffer) > MAX_EVENT_BYTES:
                    raise TraceError(f"one event of {self.path.name} is larger than {MAX_EVENT_BYTES} bytes")
                continue
            comma = cut + _BETWEEN.index(b",")
            buffer[comma : comma + 1] = b"]"
            yield self._decode(buffer, comma + 1)
            del buffer[1 : comma + 1]
        end = buffer.rfind(b"\n  ]")
        if end < 0:
            raise TraceError(f"the trace {self.path.name} ends in the middle; it was not written to its end")
        _decode_header(b"{" + bytes(buffer[end + 4 :]).lstrip(b" \n,"), self.path)
        yield self._decode(buffer, end + 4)

    def _read(self, file: InputFile) -> bytes:
        chunk = file.read(BLOCK_BYTES)
        self.bytes_read = file.bytes_read
        return chunk

    def _whole(self, head: bytes, file: InputFile) -> Iterator[list[TraceEvent]]:
        parts = [head]
        while chunk := self._read(file):
            parts.append(chunk)
            if self.bytes_read > MAX_WHOLE_BYTES:
                raise TraceError(
                    f"{self.path.name} is not laid out as Kineto writes traces and is larger than "
                    f"{MAX_WHOLE_BYTES} bytes, the most that is read at once"
                )
        body = b"".join(parts)
        if body.count(b",") > MAX_WHOLE_VALUES:
            raise TraceError(
                f"{self.path.name} is not laid out as Kineto writes traces and holds more than "
                f"{MAX_WHOLE_VALUES} values, the most that are read at once"
            )
        try:
            if body.lstrip()[:1] == b"[":
                raws = _decode_strict(body, list[msgspec.Raw])
            else:
                trace = _decode_strict(body, _WholeTrace)
                self.header = trace
                raws = trace.events
        except (msgspec.DecodeError, RecursionError) as error:
            raise TraceError(f"{self.path.name} is not a Chrome trace: {error}") from error
        if raws and not any(map(_has_phase, raws)):
            raise TraceError(
                f"{self.path.name} is not a Chrome trace: none of its elements is an event, with a ph"
            )
        for begin in range(0, len(raws), _EVENTS_AT_ONCE):
            yield self._decode_each(raws[begin : begin + _EVENTS_AT_ONCE])

    def _decode(self, block: bytearray, end: int) -> list[TraceEvent]:
        try:
            with memoryview(block)[:end] as array:
                return _EVENTS.decode(array)
        except (msgspec.DecodeError, RecursionError):
            return self._decode_each(_COMMA_BETWEEN.split(bytes(block[1 : end - 1])))

    # Any: bytes or msgspec.Raw, which is a buffer.
    def _decode_each(self, raws: list[Any]) -> list[TraceEvent]:
        events = []
        for raw in raws:
            try:
                events.append(_EVENT.decode(raw))
            except (msgspec.DecodeError, RecursionError):
                try:
                    events.append(_EVENT.decode(_NOT_FINITE.sub(rb"\1null", bytes(raw))))
                except (msgspec.DecodeError, RecursionError):
                    self.unreadable += 1
        return events


_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[\s*')
_BETWEEN = b"\n  },\n  {"
_COMMA_BETWEEN = re.compile(rb"(?<=\n  \}),(?=\n  \{)")
_EVENTS = msgspec.json.Decoder(list[TraceEvent])
_EVENT = msgspec.json.Decoder(TraceEvent)
# Kineto has written bare inf and nan (kineto#105), which strict JSON refuses. Only as the value of a key: a
# kernel's name may hold `::nan`.
_NOT_FINITE = re.compile(rb'(?<!\\)(":\s*)-?(?:inf|Infinity|nan|NaN)(?=\s*[,}])')


class _Phased(msgspec.Struct):
    ph: msgspec.Raw


_PHASED = msgspec.json.Decoder(_Phased)


def _has_phase(raw: msgspec.Raw) -> bool:
    """Tell whether this is an event at all: readable or not, it says of what kind it is."""
    try:
        _PHASED.decode(_NOT_FINITE.sub(rb"\1null", bytes(raw)))
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


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

"""Encode a timeline as a Perfetto trace (Timeline -> bytes in packets of Perfetto's protobuf).

The few fields that are used, with their numbers, are those of perfetto/trace/trace_packet.proto and
track_event.proto; tests read the result with the definitions that the `perfetto` package ships.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tlk_tracking.report.timeline import Slice, Timeline, Track, Value

_SEQUENCE = 1
_BEGIN, _END, _INSTANT = 1, 2, 3
_STATE_CLEARED, _NEEDS_STATE = 1, 2
_PROCESS = 1
_EXPLICIT_ORDER = 3


def write_perfetto(timeline: Timeline, path: Path) -> None:
    """Write the trace; gzip-compressed where the name ends with `.gz`. ui.perfetto.dev opens both."""
    packets = _packets(timeline)
    if path.suffix == ".gz":
        with gzip.open(path, "wb") as compressed:
            compressed.writelines(packets)
    else:
        with path.open("wb") as file:
            file.writelines(packets)


def _packets(timeline: Timeline) -> Iterator[bytes]:
    # A process descriptor's track holds the others, in the order in which they are given.
    process = _varint(1, _PROCESS) + _text(6, timeline.name)
    root = _varint(1, _PROCESS) + _message(3, process) + _varint(11, _EXPLICIT_ORDER)
    yield _packet(_varint(13, _STATE_CLEARED) + _message(60, root))
    # Perfetto's clock has no time before 0; launches may come before the first step.
    origin = min((piece.start_ns for track in timeline.tracks for piece in track.slices), default=0)
    names: dict[str, int] = {}
    for order, track in enumerate(timeline.tracks):
        uuid = _PROCESS + 1 + order
        descriptor = _varint(1, uuid) + _text(2, track.name) + _varint(5, _PROCESS) + _varint(12, order)
        yield _packet(_message(60, descriptor))
        yield from _track(track, uuid, names, origin)


def _track(track: Track, uuid: int, names: dict[str, int], origin: int) -> Iterator[bytes]:
    """Begin and end the slices so that each end closes the slice that was begun last."""
    ends: list[int] = []
    for piece in track.slices:
        while ends and ends[-1] <= piece.start_ns:
            yield _event(ends.pop() - origin, _varint(9, _END) + _varint(11, uuid))
        is_instant = piece.end_ns == piece.start_ns
        body = _varint(9, _INSTANT if is_instant else _BEGIN) + _varint(11, uuid) + _content(piece)
        number = names.get(piece.name)
        interned = b""
        if number is None:
            number = names[piece.name] = len(names) + 1
            interned = _message(12, _message(2, _varint(1, number) + _text(2, piece.name)))
        yield _event(piece.start_ns - origin, body + _varint(10, number), interned)
        if not is_instant:
            ends.append(piece.end_ns)
    while ends:
        yield _event(ends.pop() - origin, _varint(9, _END) + _varint(11, uuid))


def _content(piece: Slice) -> bytes:
    # 0 is no flow id.
    arrows = [_fixed64(47, number + 1) for number in piece.leaves]
    arrows += [_fixed64(48, number + 1) for number in piece.arrives]
    return b"".join([*_annotations(piece.facts), *arrows])


def _annotations(facts: Mapping[str, Value]) -> Iterable[bytes]:
    for name, value in facts.items():
        is_count = isinstance(value, int) and value >= 0
        content = _varint(3, int(value)) if is_count else _text(6, str(value))
        yield _message(4, _text(10, name) + content)


def _event(time_ns: int, event: bytes, more: bytes = b"") -> bytes:
    head = _varint(8, time_ns) + _varint(13, _NEEDS_STATE)
    return _packet(head + more + _message(11, event))


def _packet(body: bytes) -> bytes:
    return _message(1, body + _varint(10, _SEQUENCE))


def _varint(field: int, value: int) -> bytes:
    return _base128(field << 3) + _base128(value)


def _fixed64(field: int, value: int) -> bytes:
    return _base128(field << 3 | 1) + value.to_bytes(8, "little")


def _message(field: int, body: bytes) -> bytes:
    return _base128(field << 3 | 2) + _base128(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _base128(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

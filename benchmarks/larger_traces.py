"""Make larger inputs of a real trace: copies one after the other, with shifted times, ids and markers."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

DATA = Path(__file__).parent / "data"
TRACE = DATA / "bench_transformer.trace.json.gz"
OPS = DATA / "bench_transformer.ops.json.gz"

# What tells one copy's events from another's, and whose numbers move together; every other number may repeat.
_MOVES = {
    '"ts": ': "time", '"External id": ': "external", '"correlation": ': "correlation", ', "id": ': "correlation",
    "::op::": "call", "::step::": "step", "ProfilerStep#": "step",
}  # fmt: skip
_NUMBERS = re.compile(f"({'|'.join(map(re.escape, _MOVES))})([0-9]+)")


def write_trace(folder: Path, copies: int) -> Path:
    """Write the benchmark trace, `copies` times as long, as plain JSON; keep a file that exists already."""
    path = folder / f"bench_transformer_{copies}x.trace.json"
    if path.exists():
        return path
    text = gzip.decompress(TRACE.read_bytes()).decode()
    begin = text.index('"traceEvents": [') + len('"traceEvents": [')
    end = text.rindex("\n  ]")
    pieces, numbers, kinds = _split(text[begin:end])
    spans = _spans(numbers, kinds)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text[:begin])
        for copy in range(copies):
            moved = [str(n + copy * spans[kind]) for n, kind in zip(numbers, kinds, strict=True)]
            parts = [part for pair in zip(pieces, [*moved, ""], strict=True) for part in pair]
            file.write("," * (copy > 0) + "".join(parts))
        file.write(text[end:])
    partial.rename(path)
    return path


def write_ops(folder: Path, copies: int) -> Path:
    """Write the dispatch mode's rows for `write_trace(folder, copies)`."""
    path = folder / f"bench_transformer_{copies}x.ops.json"
    if path.exists():
        return path
    said = json.loads(gzip.decompress(OPS.read_bytes()))
    rows, span = said["rows"], 1 + max(row["sequence"] for row in said["rows"])
    said["rows"] = [
        {**row, "sequence": row["sequence"] + copy * span} for copy in range(copies) for row in rows
    ]
    path.write_text(json.dumps(said), encoding="utf-8")
    return path


def _split(events: str) -> tuple[list[str], list[int], list[str]]:
    """Return the text between the numbers that move, those numbers, and the kind of each."""
    pieces, numbers, kinds, last = [], [], [], 0
    for match in _NUMBERS.finditer(events):
        pieces.append(events[last : match.start(2)])
        numbers.append(int(match[2]))
        kinds.append(_MOVES[match[1]])
        last = match.end()
    return [*pieces, events[last:]], numbers, kinds


def _spans(numbers: list[int], kinds: list[str]) -> dict[str, int]:
    """Return for each kind how far its numbers reach, so that copies do not overlap."""
    lowest: dict[str, int] = {}
    highest: dict[str, int] = {}
    for number, kind in zip(numbers, kinds, strict=True):
        lowest[kind] = min(number, lowest.get(kind, number))
        highest[kind] = max(number, highest.get(kind, number))
    spans = {kind: highest[kind] - lowest[kind] + 1 for kind in lowest}
    spans["time"] += 1_000_000  # a second: the last event lasts beyond its start
    return spans

"""Damage bytes and JSON at random, the same way for the same seed; and guard what is done with the result."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from soak_figures import SOAK

# Of each kind.
MUTATIONS = 1_000 if SOAK else 30
# Processor time that one of them may take.
HANG_S = 5.0

HOSTILE_TEXTS = (
    "", " ", "../../../escape", "/etc/passwd", "C:\\Windows\\x", "..", "~", "a\x00b", "\x1b[31m", "\u202eevil",
    "\ud800", "=1+1", "<script>", "{}", "'; --", "x" * 100_000, "tlk::ffffffff::op::0", "tlk::0123abcd::op::1",
    "tlk::0123abcd::step::99999999999999999999", "ProfilerStep#999999999999999", "kernel", "cpu_op",
    "gpu_memcpy", "cuda_runtime", "aten::mm", "complete", "exact", "nan", "\n", "\N{GRINNING FACE}",
)  # fmt: skip
HOSTILE_VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, -0.0,
    0.1, 1e15, 1e18, -1e18, 1e300, 5e-324, float("nan"), float("inf"), float("-inf"), [], {}, [[]], [1, 2, 3],
    [2**70, -1, 0], [1] * 1000, {"a": {"b": []}},
)  # fmt: skip


def scramble_bytes(body: bytes, dice: random.Random) -> bytes:
    """Flip, cut, repeat, move or insert some bytes."""
    data = bytearray(body)
    at, end = sorted((dice.randrange(len(data) + 1), dice.randrange(len(data) + 1)))
    match dice.randrange(7):
        case 0:
            for _ in range(dice.randint(1, 8)):
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        case 1:
            del data[at:]
        case 2:
            del data[at : min(end, at + dice.choice((1, 8, 200)))]
        case 3:
            data[at:at] = data[at : min(end, at + 500)]
        case 4:
            data[at:at] = dice.randbytes(dice.choice((1, 4, 100)))
        case 5:
            data[at:at] = dice.choice(
                (b"\xff", b"\x00", b"{", b"]", b'"', b"NaN", b"\n  },\n  {", b"[" * 5000)
            )
        case _:
            data[at : at + 4] = data[end : end + 4]
    return bytes(data)


def scramble_json(said: Any, dice: random.Random) -> Any:
    """Replace, remove, repeat or rename something somewhere in decoded JSON, in place; return the whole."""
    holder, key = dice.choice(list(_places(said)))
    match dice.randrange(6):
        case 0 | 1:
            holder[key] = deepcopy(dice.choice(HOSTILE_VALUES))
        case 2:
            holder[key] = dice.choice(HOSTILE_TEXTS)
        case 3:
            del holder[key]
        case 4 if isinstance(holder, dict):
            holder[dice.choice(HOSTILE_TEXTS)] = holder.pop(key)
        case 4:
            holder.insert(dice.randrange(len(holder) + 1), holder[key])
        case _:
            other, there = dice.choice(list(_places(said)))
            holder[key], other[there] = deepcopy(other[there]), deepcopy(holder[key])  # never a cycle
    return said


def dump_json(said: Any) -> bytes:
    """Return JSON, with bare NaN and Infinity where they are and lone surrogates escaped."""
    return json.dumps(said).encode()


def _places(said: Any) -> Iterator[tuple[Any, Any]]:
    items = said.items() if isinstance(said, dict) else enumerate(said)
    for key, value in items:
        yield said, key
        if isinstance(value, dict | list):
            yield from _places(value)


@contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Fail when what is done inside takes more processor time than this: it hangs."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"took more than {seconds} s of processor time")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def untouched(folder: Path, *, but: Callable[[Path], bool]) -> Iterator[None]:
    """Check that nothing below the folder is made, changed or removed, except what `but` names."""
    before = _listing(folder, but)
    yield
    assert _listing(folder, but) == before


def _listing(folder: Path, but: Callable[[Path], bool]) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if not but(path)
    }

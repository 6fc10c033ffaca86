"""The shared real traces, their ops files and the facts that a slow reading apart from this package found."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paths import DATA, TOP

_BENCHMARK = TOP / "benchmarks" / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class RealTrace:
    """One real trace."""

    name: str
    trace: Path
    ops: Path
    expected: Path

    def __str__(self) -> str:
        return self.name

    def facts(self) -> dict[str, Any]:
        """Return the expected facts."""
        return dict(json.loads(self.expected.read_text(encoding="utf-8")))


@cache
def real_traces() -> tuple[RealTrace, ...]:
    """Return the small traces in tests/data and the large one of the benchmarks."""
    found = [
        RealTrace(
            name=path.name.removesuffix(".expected.json"),
            trace=Path(str(path).replace(".expected.json", ".trace.json.gz")),
            ops=next(path.parent.glob(path.name.replace(".expected.json", ".ops.json*"))),
            expected=path,
        )
        for folder in (DATA, _BENCHMARK)
        for path in sorted(folder.glob("*.expected.json"))
    ]
    assert len(found) == 11
    return tuple(found)


def real_trace(name: str) -> RealTrace:
    """Return the real trace of this name."""
    return next(each for each in real_traces() if each.name == name)

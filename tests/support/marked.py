"""Run a block under the markers of one step, with no profiler, and give its calls as rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tlk_tracking.core.records import Phase, StepOutcome
from tlk_tracking.recording.call_markers import CallMarkers, call_table
from tlk_tracking.recording.step_brackets import StepBrackets
from tlk_tracking.recording.torch_private import dispatch_mode_stack

SESSION = "0badcafe"


@dataclass
class Marked:
    """The markers of one window; `rows` once the block is over."""

    calls: CallMarkers = field(default_factory=lambda: CallMarkers(SESSION))
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.brackets = StepBrackets(SESSION, calls=self.calls, base=dispatch_mode_stack())

    def column(self, name: str) -> list[Any]:
        """Return one column of the rows."""
        return [row[name] for row in self.rows]


@contextmanager
def marked(step: int = 7) -> Iterator[Marked]:
    """Mark the block as the forward part of one step."""
    found = Marked()
    found.brackets.open(step, phase=Phase.FORWARD)
    try:
        yield found
    finally:
        found.brackets.close(StepOutcome.COMPLETE)
        found.brackets.settle()
        found.rows = call_table(found.calls.noted()).to_pylist()

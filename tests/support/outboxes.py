"""Windows, outboxes and runs that the tests of tracking share."""

from __future__ import annotations

import os
from pathlib import Path

from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.attribution.annotate import annotate
from tlk_tracking.core.gaps import Gap
from tlk_tracking.core.records import StepBracket, StepOutcome, WindowFacts, WindowSource
from tlk_tracking.delivery.outbox import Outbox, RawWindow
from tlk_tracking.tracking.tracking_uri import Destination

SESSION = "ab12cd34"


def window_facts(
    first_step: int = 10, *, rank: int = 0, session: str = SESSION, gaps: tuple[Gap, ...] = ()
) -> WindowFacts:
    """Return the facts of a window of one step on a machine without CUDA."""
    return WindowFacts(
        session=session,
        source=WindowSource.CALLBACK,
        first_step=first_step,
        warmup=1,
        requested=1,
        steps=(StepBracket(step=first_step, outcome=StepOutcome.COMPLETE),),
        synchronized=True,
        device_expected=False,
        unavailable_reason="no CUDA",
        rank=rank,
        world_size=rank + 1,
        global_step=first_step,
        gaps=gaps,
    )


def small_annotation(first_step: int = 10, *, rank: int = 0) -> KernelAnnotation:
    return annotate(None, window_facts(first_step, rank=rank), calls=None)


def seal(outbox: Outbox, facts: WindowFacts, destination: Destination | None) -> RawWindow:
    return outbox.seal_window(outbox.open_window(), facts, destination)


def visible_files(root: Path) -> list[str]:
    """Return all files below, as `a/b`, sorted; hidden and temporary ones too."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def environment_with_tests() -> dict[str, str]:
    """Return the environment for a program of a test that imports what stands beside the tests."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

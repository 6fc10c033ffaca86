"""Whatever ends a fit, wherever and whenever: the caller gets what Lightning alone gives, nothing is left on."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from fault_cells import (
    AFTER_THE_STEP,
    SCHEDULE,
    STEP,
    Cell,
    StatusLogger,
    When,
    Where,
    plain_profiler_events,
    run_cell,
    surroundings,
)
from lightning_fits import Telemetry

from tlk_tracking.annotate import annotate
from tlk_tracking.annotation import load_annotation
from tlk_tracking.outbox import Outbox
from tlk_tracking.records import GapReason

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]

ERRORS: dict[str, type[BaseException]] = {
    "Exception": ZeroDivisionError,
    "OutOfMemoryError": torch.OutOfMemoryError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
}


def raises(error: BaseException) -> Any:
    def strike() -> None:
        raise error

    return strike


def reached(cell: Cell, error: BaseException, *arguments: Any) -> tuple[object, ...]:
    """Return what reaches the caller of a fit: its type, whether it is the error itself, and what it says."""
    before = surroundings()
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - which one is what the test compares
        run_cell(cell, *arguments)
    after = surroundings()
    found = caught.value
    assert cell.struck == 1
    chain = tuple(type(each) for each in (found.__cause__, found.__context__))
    changed = [name for name in before.__slots__ if getattr(before, name) != getattr(after, name)]
    return type(found), found is error, found.args, chain, changed


@functools.cache
def without_telemetry(where: Where, kind: str, folder: Path) -> tuple[object, ...]:
    error = ERRORS[kind]("theirs")
    logger = StatusLogger(lambda: None)
    cell = Cell(where=where, step=5, strike=raises(error))
    return (*reached(cell, error, None, logger, folder), [status for status, _ in logger.finalized])


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("where", Where)
def test_an_error_reaches_the_caller_as_without_telemetry_and_the_window_is_kept(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, where: Where, kind: str, when: When
) -> None:
    outbox = Outbox(tmp_path / "outbox")
    telemetry = Telemetry(outbox.root, **SCHEDULE)
    logger = StatusLogger(lambda: len(outbox.raw_windows()))
    error = ERRORS[kind]("theirs")
    cell = Cell(where=where, step=STEP[when], strike=raises(error))
    with_telemetry = reached(cell, error, telemetry, logger, tmp_path)
    statuses = [status for status, _ in logger.finalized]
    assert (*with_telemetry, statuses) == without_telemetry(where, kind, tmp_path_factory.getbasetemp())
    assert "aten::mm" in plain_profiler_events()

    kept = outbox.raw_windows()
    begun = when not in (When.IDLE, When.WARM_UP) or (where in AFTER_THE_STEP and when is When.WARM_UP)
    assert len(kept) == begun
    assert logger.finalized[-1][1] == len(kept), "the window was not there before the logger was finalized"
    open_still = begun and when is not When.UPLOAD and not (where in AFTER_THE_STEP and when is When.LAST)
    for window in kept:
        assert window.calls is not None
        annotate(window.trace, window.facts(), calls=pq.read_table(window.calls)).save(tmp_path / "annotation")
        gaps = {gap.reason for gap in load_annotation(tmp_path / "annotation").manifest.gaps}
        assert (GapReason.CAPTURE_RAISED in gaps) is open_still

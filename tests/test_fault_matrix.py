"""Whatever ends a fit, wherever and whenever: the caller gets what Lightning alone gives, nothing is left on."""

from __future__ import annotations

import functools
import signal
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
from lightning.pytorch import Callback
from lightning_fits import Telemetry

from tlk_tracking.annotation.kernel_annotation import load_annotation
from tlk_tracking.attribution.annotate import annotate
from tlk_tracking.core.gaps import GapReason
from tlk_tracking.delivery.outbox import Outbox

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
    before, on_interrupt = surroundings(), signal.getsignal(signal.SIGINT)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - which one is what the test compares
        run_cell(cell, *arguments)
    after = surroundings()
    signal.signal(
        signal.SIGINT, on_interrupt
    )  # Lightning leaves it ignored when it is interrupted in `setup`
    found = caught.value
    assert cell.struck == (cell.step >= 0)
    chain = tuple(type(each) for each in (found.__cause__, found.__context__))
    changed = [name for name in before.__slots__ if getattr(before, name) != getattr(after, name)]
    return type(found), found is error, found.args, chain, changed


@functools.cache
def without_telemetry(where: Where, kind: str, folder: Path) -> tuple[object, ...]:
    error = ERRORS[kind]("theirs")
    logger = StatusLogger(lambda: None)
    cell = Cell(where=where, step=5, strike=raises(error))
    return (*reached(cell, error, [], logger, folder), [status for status, _ in logger.finalized])


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
    with_telemetry = reached(cell, error, [telemetry], logger, tmp_path)
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
        annotate(window.trace, window.facts(), calls=pq.read_table(window.calls)).save(
            tmp_path / "annotation"
        )
        gaps = {gap.reason for gap in load_annotation(tmp_path / "annotation").manifest.gaps}
        assert (GapReason.CAPTURE_RAISED in gaps) is open_still


class _FailsAt(Callback):
    """Raise in one hook, the first time."""

    def __init__(self, hook: str, error: BaseException) -> None:
        self.error: BaseException | None = error
        setattr(self, hook, self.fail)

    def fail(self, *arguments: Any, **keywords: Any) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


AROUND = [
    "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end",
    "on_fit_end", "teardown",
]  # fmt: skip


@pytest.mark.parametrize("first", [True, False], ids=["before ours", "after ours"])
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("hook", AROUND)
def test_an_error_around_the_steps_reaches_the_caller_too(
    tmp_path: Path, kind: str, hook: str, first: bool
) -> None:
    def outcome(telemetry: Telemetry | None) -> tuple[object, ...]:
        error = ERRORS[kind]("theirs")
        fails, ours = [_FailsAt(hook, error)], [telemetry] if telemetry is not None else []
        cell = Cell(where=Where.FORWARD, step=-1, strike=lambda: None)
        logger = StatusLogger(lambda: None)
        callbacks = [*fails, *ours] if first else [*ours, *fails]
        return (*reached(cell, error, callbacks, logger, tmp_path), logger.finalized)

    telemetry = Telemetry(tmp_path / "outbox", **SCHEDULE)
    assert outcome(telemetry) == outcome(None)
    assert "aten::mm" in plain_profiler_events()
    assert len(telemetry.facts()) == (hook in AROUND[4:])


@pytest.mark.parametrize("first", [True, False], ids=["before ours", "after ours"])
@pytest.mark.parametrize("when", When)
def test_another_callback_that_fails_in_on_exception_costs_the_window_at_most(
    tmp_path: Path, when: When, first: bool
) -> None:
    def outcome(telemetry: Telemetry | None) -> tuple[object, ...]:
        error, on_the_way_out = ZeroDivisionError("theirs"), OSError("theirs too")
        fails, ours = [_FailsAt("on_exception", on_the_way_out)], [telemetry] if telemetry is not None else []
        cell = Cell(where=Where.FORWARD, step=STEP[when], strike=raises(error))
        callbacks = [*fails, *ours] if first else [*ours, *fails]
        return reached(cell, on_the_way_out, callbacks, False, tmp_path)

    telemetry = Telemetry(tmp_path / "outbox", **SCHEDULE)
    assert outcome(telemetry) == outcome(None)
    assert "aten::mm" in plain_profiler_events()
    assert len(telemetry.facts()) == (when not in (When.IDLE, When.WARM_UP))

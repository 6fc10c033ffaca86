"""At whatever line of ours something goes wrong, or a Ctrl-C comes, training is not harmed."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow.parquet as pq
import pytest
from fault_cells import SCHEDULE, STEPS, Cell, Where, plain_profiler_events, run_cell, surroundings
from lightning.pytorch import Trainer
from soak_figures import SOAK, TIMEOUT_S, tell

import tlk_tracking
import tlk_tracking.callbacks
from tlk_tracking.attribution.annotate import annotate
from tlk_tracking.callbacks import KernelTelemetry
from tlk_tracking.delivery import worker as window_worker
from tlk_tracking.delivery.carriers import Begin
from tlk_tracking.delivery.outbox import Delivery, DeliveryState, Outbox
from tlk_tracking.recording import profiler_session
from tlk_tracking.recording.torch_private import dispatch_mode_stack, pop_dispatch_mode, set_profiler_flag

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.timeout(TIMEOUT_S),
]

OURS = tuple(str(Path(module.__file__ or "").parent) for module in (tlk_tracking, tlk_tracking.callbacks))
# Each line is one fit. scripts/soak takes more of them.
EVERY = 1 if SOAK else 40
# What stands around all the rest: a fault of its own lines nobody catches.
GUARDS = {
    "_guarded.<locals>.run",
    "_wrap_method.<locals>.run",
    "KernelTelemetry._try",
    "KernelTelemetry._give_up",
    "KernelTelemetry._leave",
    "CallMarkers.__torch_dispatch__",
    "ProfilerSession._leave",
    "_OptimizerPhase._before",
    "_OptimizerPhase._after",
    "_OptimizerPhase._enter",
    "_OptimizerPhase._outside.<locals>.run",
    "ModuleTracker._before",
    "ModuleTracker._after",
}
# A tensor that cannot be described has unknown inputs, and nobody is warned.
UNKNOWN = {"CallMarkers._describe", "_Kinds.__missing__", "_describe_subclass"}


@dataclass(frozen=True, kw_only=True)
class Line:
    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number} in {self.function}"


class _Answering:
    """A carrier that says of every window that it was sent."""

    pid = None
    has_ended = False

    def __init__(self, begin: Begin, *, answer: Callable[[Delivery], None], ended: object) -> None:
        self.answer = answer

    def ask(self, name: str) -> None:
        self.answer(Delivery(name=name, state=DeliveryState.SENT))

    def work(self) -> None: ...

    def end(self) -> None: ...


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(window_worker, "start_carrier", _Answering)
    # A process that was started in the background ignores it.
    on_interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, on_interrupt)


def callback(folder: Path) -> KernelTelemetry:
    return KernelTelemetry(
        outbox=folder / "outbox", run_id="a_run", tracking_uri="http://127.0.0.1:1", **SCHEDULE
    )


def fit(folder: Path, telemetry: KernelTelemetry) -> Trainer:
    # Validation makes us pause and go on.
    cell = Cell(where=Where.VALIDATION, step=-1, strike=lambda: None)
    return run_cell(cell, [telemetry], False, folder)


def lines_of(folder: Path) -> list[Line]:
    """Return the lines of ours that a fit runs in the thread that trains, in order of their first time."""
    seen: dict[Line, None] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            code = frame.f_code
            if getline(code.co_filename, frame.f_lineno).strip() == "try:":
                return watch  # it does nothing, and nothing can fail or interrupt there
            seen.setdefault(Line(file=code.co_filename, number=frame.f_lineno, function=code.co_qualname))
        return watch

    telemetry = callback(folder)
    sys.settrace(watch)
    try:
        fit(folder, telemetry)
    finally:
        sys.settrace(None)
    return list(seen)


def raise_at(line: Line, error: type[BaseException]) -> list[Line]:
    """Raise an error the first time that this thread comes to a line; return a list that the line is then in."""
    raised: list[Line] = []

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != line.file:
            return None
        if event == "line" and frame.f_lineno == line.number:
            sys.settrace(None)
            raised.append(line)
            raise error("injected")
        return watch

    sys.settrace(watch)
    return raised


def _check_outbox(root: Path) -> None:
    for window in Outbox(root).raw_windows():
        calls = None if window.calls is None else pq.read_table(window.calls)
        annotate(window.trace, window.facts(), calls=calls)


def _put_right() -> None:
    """Take off what a fit left on, so that the next line is tried on its own."""
    while dispatch_mode_stack():
        pop_dispatch_mode(dispatch_mode_stack()[-1])
    profiler_session._OPEN.clear()
    set_profiler_flag(False)


def test_a_fault_of_ours_at_any_line_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = []
    lines = [line for line in lines_of(tmp_path / "all") if line.function not in GUARDS][::EVERY]
    for number, line in enumerate(lines):
        caplog.clear()
        before = surroundings()
        folder = tmp_path / str(number)
        telemetry = callback(folder)
        try:
            raised = raise_at(line, AttributeError)
            try:
                trainer = fit(folder, telemetry)
            finally:
                sys.settrace(None)
            assert trainer.global_step == STEPS
            assert surroundings() == before
            assert "aten::mm" in plain_profiler_events()
            _check_outbox(folder / "outbox")
            warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
            # A second one says where the files of windows are that the fault kept back.
            warned = [text for text in warned if "`tlk upload" not in text]
            expected = [len(raised)] if line.function not in UNKNOWN else [0, 1]
            assert len(warned) in expected, warned
        except (Exception, SystemExit) as error:  # noqa: BLE001 - all of them are told of below
            wrong.append(f"{line}: {type(error).__name__}: {str(error)[:300]}")
            _put_right()
    tell("faults of our own", lines=len(lines), harmful=len(wrong))
    assert wrong == [], "\n".join(wrong)


def test_a_ctrl_c_at_any_line_of_ours_ends_the_fit_as_ever(tmp_path: Path) -> None:
    wrong = []
    lines = lines_of(tmp_path / "all")[EVERY // 2 :: EVERY]
    for number, line in enumerate(lines):
        before = surroundings()
        folder = tmp_path / str(number)
        telemetry = callback(folder)
        try:
            raised = raise_at(line, KeyboardInterrupt)
            try:
                fit(folder, telemetry)
                assert raised == []  # what is cached runs once in a process
            except SystemExit as left:
                assert left.code == 1  # noqa: PT017 - a line that is cached is not run again, and nothing is raised
            finally:
                sys.settrace(None)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            assert surroundings() == before
            assert "aten::mm" in plain_profiler_events()
            _check_outbox(folder / "outbox")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            wrong.append(f"{line}: {type(error).__name__}: {str(error)[:300]}")
            _put_right()
    tell("Ctrl-C at lines of ours", lines=len(lines), harmful=len(wrong))
    assert wrong == [], "\n".join(wrong)

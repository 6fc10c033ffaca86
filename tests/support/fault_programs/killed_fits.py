"""Kill fits at random points of their windows and saves: killed_fits.py FOLDER RUN_ID TRACKING_URI KILLS.

Each is a forked process that kills itself at some line of ours. Then everything that is left is uploaded, twice.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from fault_cells import SCHEDULE, Cell, Where, run_cell

import tlk_tracking
import tlk_tracking.callbacks
from tlk_tracking.annotation.kernel_annotation import load_annotation
from tlk_tracking.callbacks import KernelTelemetry
from tlk_tracking.delivery.delivery_loop import send, settle
from tlk_tracking.delivery.outbox import DeliveryState, Outbox

OURS = tuple(str(Path(module.__file__ or "").parent) for module in (tlk_tracking, tlk_tracking.callbacks))


def fit(folder: Path, run_id: str, tracking_uri: str, *, die_at: int | None) -> int:
    """Run a fit and return how many lines of ours it ran; at the `die_at`th the process is killed."""
    passed = 0

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal passed
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            passed += 1
            if passed == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return watch

    telemetry = KernelTelemetry(
        outbox=folder / "outbox", run_id=run_id, tracking_uri=tracking_uri, upload_timeout_s=0.0, **SCHEDULE
    )
    cell = Cell(where=Where.FORWARD, step=-1, strike=lambda: None)
    sys.settrace(watch)
    run_cell(cell, [telemetry], False, folder)
    sys.settrace(None)
    return passed


def in_child(work: Callable[[], object]) -> int:
    """Do it in a process of its own; a database that is opened there is opened nowhere else."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - told to who asked
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def upload(outbox: Outbox) -> None:
    """Do what `tlk upload` does, and refuse whatever is half."""
    outbox.sweep()
    for window in outbox.raw_windows():
        assert settle(outbox, window).state is DeliveryState.SAVED, window
    for entry in outbox.entries():
        load_annotation(entry.annotation_folder)
        assert send(outbox, entry).state is DeliveryState.SENT, entry
    assert (outbox.raw_windows(), outbox.entries()) == ((), ())


def main() -> None:
    """Kill, look, upload; print how many windows were kept."""
    folder, run_id, tracking_uri, kills = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    outbox = Outbox(folder / "outbox")
    note = folder / "lines"
    assert in_child(lambda: note.write_text(str(fit(folder, run_id, tracking_uri, die_at=None)))) == 0
    lines, choice, kept = int(note.read_text()), random.Random(kills), [1]
    for number in range(kills):
        # Most lines belong to single calls; so two thirds near the end: where a window is saved, and just after it.
        begin = (1, lines * 7 // 10, lines * 98 // 100)[number % 3]
        at = choice.randrange(begin, lines + 1)
        before = len(outbox.raw_windows())
        assert in_child(lambda: fit(folder, run_id, tracking_uri, die_at=at)) == -signal.SIGKILL, at  # noqa: B023
        kept.append(len(outbox.raw_windows()) - before)
        assert kept[-1] in (0, 1), at
        outbox.sweep()
    for _ in range(2):
        assert in_child(lambda: upload(outbox)) == 0
    sys.stdout.write(json.dumps({"lines": lines, "kills": kills, "kept": sum(kept)}) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    gc.freeze()
    with patch("tlk_tracking.delivery.carriers._PROGRAM", "fault_programs.silent_worker"):
        main()

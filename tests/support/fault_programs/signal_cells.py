"""Send real signals to fits, each in a forked process of its own: signal_cells.py FOLDER < cells > outcomes.

A line in is {"name", "where", "when", "what", "telemetry", "upload_timeout_s"}; a line out is what became of it.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fault_cells import (
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

from tlk_tracking.callbacks import KernelTelemetry
from tlk_tracking.delivery.outbox import Outbox

# A process that has not ended by then is counted as one that does not end. From its start, on a busy machine.
LIMIT_S = 60.0
# Where a signal comes while a window is saved: before or after a call of ours.
SAVING = {
    "before stopping": ("tlk_tracking.recording.profiler_session.ProfilerSession.stop", "before"),
    "after stopping": ("tlk_tracking.recording.profiler_session._stop_without_synchronizing", "after"),
    "before exporting": ("torch.profiler.profile.export_chrome_trace", "before"),
    "after exporting": ("torch.profiler.profile.export_chrome_trace", "after"),
    "before writing calls": ("tlk_tracking.recording.fit_recorder.call_table", "before"),
    "after writing calls": ("tlk_tracking.recording.fit_recorder._write", "after"),
    "before sealing": ("tlk_tracking.delivery.outbox.Outbox.seal_window", "before"),
    "after sealing": ("tlk_tracking.delivery.outbox.Outbox.seal_window", "after"),
    "before submitting": ("tlk_tracking.delivery.worker.WindowWorker.submit", "before"),
}


def send(what: str) -> Callable[[], None]:
    """Return what sends the signals to this process; Python acts on each before `os.kill` returns."""

    def strike() -> None:
        os.kill(os.getpid(), signal.SIGTERM if what == "SIGTERM" else signal.SIGINT)

    return strike


class _SecondInterrupt(StatusLogger):
    """Send SIGINT again when the logger is finalized, after Lightning has handled the first."""

    def finalize(self, status: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        super().finalize(status)


def _striking(target: str, moment: str, strike: Callable[[], None]) -> Any:
    module_name, _, rest = target.partition(".")
    owner: Any = sys.modules[module_name]
    *path, name = rest.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, struck = getattr(owner, name), []

    def run(*arguments: Any, **keywords: Any) -> Any:
        if struck:
            return original(*arguments, **keywords)
        struck.append(True)
        if moment == "before":
            strike()
            return original(*arguments, **keywords)
        done = original(*arguments, **keywords)
        strike()
        return done

    return patch.object(owner, name, run)


def fit_cell(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one cell in this process; return what reached the caller and what it left."""
    outbox = Outbox(folder / "outbox")
    telemetry = KernelTelemetry(
        outbox=outbox.root,
        run_id="a_run",
        tracking_uri="http://127.0.0.1:1",
        upload_timeout_s=asked["upload_timeout_s"],
        **SCHEDULE,
    )
    look = lambda: len(outbox.raw_windows())  # noqa: E731 - shorter than a function with a name
    logger = (_SecondInterrupt if asked["what"] == "SIGINT twice" else StatusLogger)(look)
    strike = send(asked["what"])
    before = surroundings()
    found: BaseException | None = None
    begun = time.monotonic()
    with ExitStack() as stack:
        saving = SAVING.get(asked["where"]) if asked["telemetry"] else None
        if saving is not None:
            stack.enter_context(_striking(*saving, strike))
            cell = Cell(where=Where.FORWARD, step=-1, strike=strike)
        elif asked["where"] in SAVING:  # without telemetry there is no saving: at the same time, elsewhere
            cell = Cell(where=Where.END_BEFORE, step=STEP[When.LAST], strike=strike)
        else:
            cell = Cell(where=Where(asked["where"]), step=STEP[When(asked["when"])], strike=strike)
        try:
            run_cell(cell, [telemetry] if asked["telemetry"] else [], logger, folder)
        except BaseException as error:  # noqa: BLE001 - which one is the result
            found = error
    ended = time.monotonic()
    after = surroundings()
    return {
        "reached": None if found is None else [type(found).__name__, [str(part) for part in found.args]],
        "context": [type(each).__name__ for each in (found.__cause__, found.__context__) if each]
        if found
        else [],
        "changed": [name for name in before.__slots__ if getattr(before, name) != getattr(after, name)],
        "statuses": [status for status, _ in logger.finalized],
        "kept_when_finalized": logger.finalized[-1][1] if logger.finalized else None,
        "profiler_works": "aten::mm" in plain_profiler_events(),
        "fit_s": ended - begun,
    }


def _in_child(asked: dict[str, Any], folder: Path) -> None:
    """Run a cell, note the outcome and end this process as Python ends."""
    os.setsid()
    (folder / "stderr").touch()
    os.dup2(os.open(folder / "stderr", os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    outcome = fit_cell(asked, folder)
    (folder / "outcome.json").write_text(json.dumps(outcome))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "TLK_SOAK" in os.environ:
        sys.exit(7)
    # All that can hold the end of a process, without the second that Python takes to clear a torch away.
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(7)


def _watch(child: int) -> tuple[int | None, float]:
    begun = time.monotonic()
    descriptor = os.pidfd_open(child)
    in_time = bool(select.select([descriptor], [], [], LIMIT_S)[0])
    os.close(descriptor)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return (status if in_time else None), time.monotonic() - begun


def main() -> None:
    """Run every cell that is asked for."""
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        place = folder / asked["name"]
        place.mkdir()
        child = os.fork()
        if child == 0:
            try:
                _in_child(asked, place)
            except Exception:  # noqa: BLE001 - told to who asked
                (place / "stderr").write_text(traceback.format_exc())
                os._exit(1)
        status, seconds = _watch(child)
        outcome = place / "outcome.json"
        told = (
            json.loads(outcome.read_text())
            if outcome.exists()
            else {"stderr": (place / "stderr").read_text()}
        )
        sys.stdout.write(
            json.dumps({**told, "name": asked["name"], "status": status, "seconds": seconds}) + "\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    with patch("tlk_tracking.delivery.carriers._PROGRAM", "fault_programs.silent_worker"):
        main()

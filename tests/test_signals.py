"""Real signals to real fits, each in a process of its own: what Lightning alone does, and the window is kept."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fault_cells import AFTER_THE_STEP, When, Where
from fault_programs.signal_cells import SAVING
from paths import SUPPORT
from soak_figures import SOAK, TIMEOUT_S, tell

from tlk_tracking.annotation.kernel_annotation import load_annotation
from tlk_tracking.attribution.annotate import annotate
from tlk_tracking.core.gaps import GapReason
from tlk_tracking.delivery.outbox import Outbox

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.timeout(TIMEOUT_S),
]

WHAT = ("SIGINT", "SIGINT twice", "SIGTERM")
# A process ends this soon after its fit is over, and a fit waits at most 5 s for an upload that hangs.
END_S = 10.0
UPLOAD_S = 5.0
Cell = tuple[str, str, str]


def _cells() -> list[Cell]:
    """Return every cell for scripts/soak; else each pair of place and time, and each kind of signal at each place."""
    saving = [(place, "while the window is saved") for place in SAVING]
    pairs = [(str(where), str(when)) for where, when in itertools.product(Where, When)]
    if SOAK:
        return [(*pair, what) for pair, what in itertools.product(pairs + saving, WHAT)]
    kinds = itertools.cycle(WHAT)
    return [(*pair, next(kinds)) for pair in pairs[::2] + saving]


CELLS = _cells()


def _run(asked: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "fault_programs.signal_cells", str(folder)],
        input="".join(json.dumps(one) + "\n" for one in asked),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"},
    )
    return {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what became of every cell, and of each place and kind of signal without telemetry."""
    asked = []
    for number, (where, when, what) in enumerate(CELLS):
        cell = {"where": where, "when": when, "what": what}
        asked.append({**cell, "name": str(number), "telemetry": True, "upload_timeout_s": 0.05})
        plain = f"{where} {what}"
        if plain not in {one["name"] for one in asked}:
            asked.append(
                {**cell, "name": plain, "when": When.FIRST, "telemetry": False, "upload_timeout_s": 0.0}
            )
    found = _run(asked, folder)
    ends = [one["seconds"] - one["fit_s"] for one in found.values() if "fit_s" in one]
    tell("signals", cells=len(CELLS), slowest_end_s=round(max(ends), 1))
    return found


def _gaps(outbox: Outbox, folder: Path) -> list[set[GapReason]]:
    found = []
    for window in outbox.raw_windows():
        assert window.calls is not None
        annotate(window.trace, window.facts(), calls=pq.read_table(window.calls)).save(folder / window.name)
        found.append({gap.reason for gap in load_annotation(folder / window.name).manifest.gaps})
    return found


@pytest.mark.parametrize("number", range(len(CELLS)), ids=[", ".join(cell) for cell in CELLS])
def test_a_signal_ends_a_fit_as_without_telemetry_and_the_window_is_kept(
    outcomes: dict[str, dict[str, Any]], folder: Path, tmp_path: Path, number: int
) -> None:
    where, when, what = CELLS[number]
    found, plain = outcomes[str(number)], outcomes[f"{where} {what}"]
    same = ("reached", "context", "statuses", "changed", "profiler_works", "status")
    assert {key: found.get(key, found.get("stderr")) for key in same} == {key: plain[key] for key in same}
    assert found["seconds"] - found["fit_s"] < END_S

    outbox = Outbox(folder / str(number) / "outbox")
    gaps = _gaps(outbox, tmp_path)
    assert list(outbox.root.glob("*/.*")) == []
    if where in SAVING:
        assert len(gaps) == 1
        return
    after = where in {str(place) for place in AFTER_THE_STEP}
    begun = when not in (When.IDLE, When.WARM_UP)
    # On SIGTERM Lightning lets the batch end, on SIGINT nothing more.
    ends_batch = what == "SIGTERM" or after
    assert len(gaps) == (begun or (when == When.WARM_UP and ends_batch))
    assert found["kept_when_finalized"] == len(gaps)
    whole = when == When.UPLOAD or (when == When.LAST and ends_batch)
    assert [GapReason.CAPTURE_RAISED in found for found in gaps] == [not whole] * len(gaps)


def test_an_upload_that_hangs_holds_the_end_no_longer_than_five_seconds(folder: Path) -> None:
    cell = {"where": Where.FORWARD, "when": When.UPLOAD, "what": "SIGINT", "telemetry": True}
    (found,) = _run([{**cell, "name": "hangs", "upload_timeout_s": 600.0}], folder).values()
    tell("an upload that hangs", upload_timeout_s=600, fit_s=round(found["fit_s"], 2))
    # The fit itself takes a tenth of a second; the rest is for a busy machine.
    assert UPLOAD_S <= found["fit_s"] < UPLOAD_S + END_S
    assert found["reached"] == ["SystemExit", ["1"]]

"""Many windows in one process leave nothing behind, and one large window ends before the memory does."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
from fault_cells import Cell, Where, run_cell
from lightning_fits import COMPLETE, Telemetry
from soak_figures import SOAK, TIMEOUT_S, tell

from tlk_tracking.core.gaps import GapReason
from tlk_tracking.recording.call_markers import CallMarkers
from tlk_tracking.recording.window_recorder import WindowRecorder

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.timeout(TIMEOUT_S),
]


def test_a_full_window_ends_with_its_step_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CallMarkers, "most_calls", 30)
    telemetry = Telemetry(tmp_path / "outbox", skip_first=0, warmup=0, active=8)
    trainer = run_cell(Cell(where=Where.FORWARD, step=-1, strike=lambda: None), [telemetry], False, tmp_path)
    assert trainer.global_step == 10
    assert len(telemetry.rows()) == 30
    (facts,) = telemetry.facts()
    complete = sum(outcome is COMPLETE for _, outcome in telemetry.steps()[0])
    assert 0 < complete < 8
    evidence = f"{complete} of 8 steps were recorded; the window is full: it has 30 ATen calls"
    assert [(gap.reason, gap.evidence) for gap in facts.gaps] == [(GapReason.WINDOW_TRUNCATED, evidence)]
    assert "the window is full" in caplog.text


# Windows, each closed, saved and read; or bare sessions of torch.profiler. Prints the resident memory after each.
_MANY = """
import gc, json, os, shutil, sys, warnings, weakref
from pathlib import Path
import torch
from torch.profiler import ProfilerActivity, profile

kind, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def step():
    model(torch.ones(4, 8)).sum().backward()

def bare():
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    profiler.export_chrome_trace(str(folder / "trace.json"))

if kind == "ours":
    from tlk_tracking import record_kernels
    alive = []
    def ours():
        with record_kernels(model=model) as recording:
            step()
        recording.annotation.save(folder / "annotation")
        shutil.rmtree(folder / "annotation")
        alive.extend(map(weakref.ref, (recording, recording.annotation)))

one = ours if kind == "ours" else bare
sizes = []
for number in range(count):
    one()
    sizes.append(resident())
left = 0
if kind == "ours":
    gc.collect()
    left = sum(ref() is not None for ref in alive)
print(json.dumps({"sizes": sizes, "alive": left}))
"""


def _many(kind: str, folder: Path, count: int) -> dict[str, Any]:
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MANY, kind, str(folder), str(count)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ).stdout
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_with_windows_no_more_than_with_bare_profiler_sessions(tmp_path: Path) -> None:
    count, warm = (500, 50) if SOAK else (24, 12)
    ours, bare = (_many(kind, tmp_path / kind, count) for kind in ("ours", "bare"))
    grown = {
        name: found["sizes"][-1] - found["sizes"][warm] for name, found in (("ours", ours), ("bare", bare))
    }
    allowed = 0.05 * ours["sizes"][warm]
    tell("memory after many windows", windows=count, grown_bytes=grown, resident_bytes=ours["sizes"][warm])
    assert grown["ours"] <= grown["bare"] + allowed
    assert ours["alive"] == 0
    assert list((tmp_path / "ours").iterdir()) == []


def test_nothing_of_fifty_windows_of_a_fit_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    class Noted(WindowRecorder):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            made.extend(map(weakref.ref, (self, self._calls, self._brackets, self._session)))

    monkeypatch.setattr("tlk_tracking.recording.fit_recorder.WindowRecorder", Noted)
    monkeypatch.setattr("fault_cells.STEPS", 110)
    before = set(os.listdir(tempfile.gettempdir()))  # noqa: PTH208 - names are all that is wanted
    telemetry = Telemetry(
        tmp_path / "outbox", skip_first=0, every_n_steps=2, warmup=1, active=1, max_windows=50
    )
    run_cell(Cell(where=Where.FORWARD, step=-1, strike=lambda: None), [telemetry], False, tmp_path)
    assert len(telemetry.facts()) == 50
    gc.collect()
    assert (len(made), [ref() for ref in made if ref() is not None]) == (200, [])
    left = set(os.listdir(tempfile.gettempdir())) - before  # noqa: PTH208 - as above
    assert [name for name in left if name.startswith("tlk_")] == []


_LARGE = """
import json, sys, time
from pathlib import Path
import torch
from tlk_tracking import record_kernels

wanted, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)

def most_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

values, begun, before = torch.ones(4), time.monotonic(), most_mb()
with record_kernels() as recording:
    for _ in range(wanted):
        values.add_(1.0)
    inside = most_mb()
recording.annotation.save(folder / "annotation")
print(json.dumps({
    "calls": recording.annotation.call_table.num_rows,
    "in_window_mb": inside - before,
    "closed_and_saved_mb": most_mb() - before,
    "seconds": round(time.monotonic() - begun, 1),
    "saved_mb": sum(path.stat().st_size for path in (folder / "annotation").iterdir()) // 2**20,
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_window_of_many_host_events_is_saved_in_bounded_memory(tmp_path: Path) -> None:
    # Each call is two host events: torch's own range and our marker.
    calls = 250_000 if SOAK else 5_000
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LARGE, str(calls), str(tmp_path)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    found = json.loads(printed)
    tell("a window of many host events", **found)
    assert found["calls"] == calls
    # What docs/reliability.md says: some 10 kB for each call, beside what the libraries take.
    assert found["closed_and_saved_mb"] < 400 + calls * 12 / 1000

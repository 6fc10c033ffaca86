"""Raw windows of small programs as files: trace, rows of the calls, facts, graphs (made on a GPU, read anywhere)."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow.parquet as pq

from tlk_tracking import KernelAnnotation
from tlk_tracking.attribution.annotate import annotate
from tlk_tracking.attribution.fused_notes import decode_window_notes, encode_window_notes
from tlk_tracking.core.records import Phase, StepOutcome, WindowFacts, WindowSource

if TYPE_CHECKING:
    from torch import nn

    from tlk_tracking.recording.fused_kernels import FusedKernels
    from tlk_tracking.recording.window_recorder import WindowRecorder

SESSION = "c0ffee00"


def capture(
    folder: Path,
    name: str,
    program: Callable[[WindowRecorder], object],
    *,
    model: nn.Module | None = None,
    fused: FusedKernels | None = None,
) -> KernelAnnotation:
    """Record `program` as step 3 and write its raw window; return its annotation."""
    from tlk_tracking.recording.call_markers import call_table
    from tlk_tracking.recording.torch_private import dispatch_mode_stack
    from tlk_tracking.recording.window_recorder import WindowPlan, WindowRecorder

    plan = WindowPlan(
        session=SESSION,
        source=WindowSource.CALLBACK,
        first_step=3,
        warmup=0,
        requested=1,
        synchronize=True,
    )
    recorder = WindowRecorder(plan, base=dispatch_mode_stack(), root=model, fused=fused)
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"{name}.trace.json"
    try:
        recorder.warm_up()
        recorder.begin_step(3, phase=Phase.BEFORE_BATCH)
        recorder.enter_phase(Phase.FORWARD)
        program(recorder)
        recorder.end_step(StepOutcome.COMPLETE)
        recorded = recorder.finish(trace, global_step=3)
    finally:
        recorder.close()
    (folder / f"{name}.trace.json.gz").write_bytes(gzip.compress(trace.read_bytes(), mtime=0))
    trace.unlink()
    pq.write_table(call_table(recorded.calls), folder / f"{name}.calls.parquet", compression="zstd")
    (folder / f"{name}.window.json").write_bytes(msgspec.json.encode(recorded.facts))
    if recorded.graphs:
        (folder / f"{name}.graphs.json").write_bytes(encode_window_notes(recorded.graphs))
    return annotate_captured(folder, name)


def annotate_captured(folder: Path, name: str) -> KernelAnnotation:
    """Make the annotation of a raw window that `capture` wrote."""
    facts = msgspec.json.decode((folder / f"{name}.window.json").read_bytes(), type=WindowFacts)
    calls = pq.read_table(folder / f"{name}.calls.parquet")
    notes = folder / f"{name}.graphs.json"
    graphs = decode_window_notes(notes.read_bytes()) if notes.exists() else ()
    return annotate(folder / f"{name}.trace.json.gz", facts, calls=calls, graphs=graphs)

"""Count what a program runs on the GPU with torch.profiler alone: the source that tests compare ours with.

Slow and simple on purpose, and nothing of tlk_tracking is used.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What can be said of one device record without a clock: two runs of one program have the same."""

    kind: str
    name: str
    grid: str | None
    block: str | None
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRecord:
    """One device record and the `ProfilerStep#N` in which it was launched, None outside all of them."""

    work: Work
    step: int | None
    stream: int


def profiled(program: Callable[[], object]) -> tuple[PlainRecord, ...]:
    """Run `program` once under a plain profiler; return its device records."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        program()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_records(path)


def read_records(trace: Path) -> tuple[PlainRecord, ...]:
    """Return the device records of a Chrome export, in the order of the file."""
    events = _events(trace)
    calls: dict[int, float] = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            correlation = event["args"].get("correlation", 0)
            calls[correlation] = min(event["ts"], calls.get(correlation, event["ts"]))
    steps = [
        (int(event["name"].removeprefix("ProfilerStep#")), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#")
    ]
    return tuple(
        PlainRecord(
            work=Work(
                kind=KINDS[event["cat"]],
                name=event["name"],
                grid=_extent(event["args"].get("grid")),
                block=_extent(event["args"].get("block")),
                bytes=event["args"].get("bytes"),
            ),
            step=_step(calls.get(event["args"].get("correlation")), steps),
            stream=event["args"]["stream"],
        )
        for event in events
        if event.get("cat") in KINDS
    )


def work_of(records: tuple[PlainRecord, ...]) -> Counter[Work]:
    """Count equal records."""
    return Counter(record.work for record in records)


def _events(trace: Path) -> list[dict[str, Any]]:
    body = trace.read_bytes()
    text = gzip.decompress(body) if trace.suffix == ".gz" else body
    return [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]


def _step(time: float | None, steps: list[tuple[int, float, float]]) -> int | None:
    if time is None:
        return None
    return next((label for label, start, end in steps if start <= time < end), None)


def _extent(size: list[int] | None) -> str | None:
    return None if size is None else ",".join(str(part) for part in size)

"""Lay a window out in time (KernelAnnotation, its trace if there is one -> Timeline).

An annotation keeps when each kernel launch ran and how long its runtime call came before it; when an ATen call
without a launch ran is only in the trace that it was made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.attribution.correlation import correlate
from tlk_tracking.attribution.kineto.kineto_events import read_trace
from tlk_tracking.core.errors import TraceError
from tlk_tracking.core.records import CallSource
from tlk_tracking.core.text import visible

Value = int | float | str
_CALL_FACTS = ("sequence", "step", "phase", "module", "overload", "inputs", "outcome")
_LAUNCH_FACTS = (
    "launch", "kind", "step", "attribution_status", "gap", "runtime_correlation", "grid", "block", "bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A stretch of time, in nanoseconds from the start of the first step; of length 0 it is a moment.

    `leaves` and `arrives` are numbers of arrows that begin and end here.
    """

    name: str
    start_ns: int
    end_ns: int
    facts: Mapping[str, Value] = field(default_factory=dict)
    leaves: tuple[int, ...] = ()
    arrives: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A row of the timeline; its slices, by start, lie apart or one within the other."""

    name: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A window as tracks. `untimed_calls` and `untimed_launches` are in no track: their time is unknown."""

    name: str
    tracks: tuple[Track, ...]
    untimed_calls: int
    untimed_launches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """When things ran on the host, in nanoseconds from the start of the first step.

    Attributes:
        calls: start and end of ATen calls, by sequence.
        steps: step, start and end of each part of a step bracket.
        runtime_calls: name, thread, correlation, start and end.
    """

    calls: Mapping[int, tuple[int, int]]
    steps: tuple[tuple[int, int, int], ...]
    runtime_calls: tuple[tuple[str, int | None, int | None, int, int], ...]


def times_in_trace(
    annotation: KernelAnnotation, trace: Path, *, progress: Callable[[int], None] | None = None
) -> HostTimes:
    """Read the times of the host from the trace that the annotation was made of.

    Raises:
        TraceError: the trace cannot be read, or is another one's.
    """
    manifest = annotation.manifest
    marked = manifest.call_source is not CallSource.HOST_OPS
    events = read_trace(trace, session=manifest.session if marked else None, progress=progress)
    found = correlate(events)
    origin = found.first_bracket_ns or 0
    recorded = [start for start in annotation.launch_table["start_ns"].to_pylist() if start is not None]
    starts = np.sort(events.records.start_ns - origin).tolist() if recorded else []
    known = set(annotation.call_table["sequence"].to_pylist())
    if starts != recorded or not set(found.calls.label.tolist()) <= known:
        raise TraceError(f"{trace.name} is not the trace that this annotation was made of")
    spans = zip(
        found.calls.label.tolist(),
        (found.calls.start_ns - origin).tolist(),
        (found.calls.end_ns - origin).tolist(),
        strict=True,
    )
    brackets = events.step_markers if len(events.step_markers) else events.profiler_steps
    runtime = events.runtime_calls
    return HostTimes(
        calls={sequence: (start, end) for sequence, start, end in spans},
        steps=tuple(
            zip(
                brackets.label.tolist(),
                (brackets.start_ns - origin).tolist(),
                (brackets.end_ns - origin).tolist(),
                strict=True,
            )
        ),
        runtime_calls=tuple(
            (events.names[name], events.thread_ids[thread], correlation or None, start - origin, end - origin)
            for name, thread, correlation, start, end in zip(
                runtime.name.tolist(),
                runtime.thread.tolist(),
                runtime.correlation.tolist(),
                runtime.start_ns.tolist(),
                runtime.end_ns.tolist(),
                strict=True,
            )
        ),
    )


def times_of_launches(annotation: KernelAnnotation) -> HostTimes:
    """Return what the launches say of the host: when their runtime calls began.

    An ATen call reaches from the first to the last of its runtime calls, a step likewise.
    """
    called: dict[int, int] = {}
    moments: dict[int, tuple[str, int | None, int | None, int, int]] = {}
    steps: dict[int, list[int]] = defaultdict(list)
    columns = ["launch", "step", "start_ns", "launch_latency_ns", "runtime_correlation"]
    for row in annotation.launch_table.select(columns).to_pylist():
        if row["start_ns"] is None or row["launch_latency_ns"] is None:
            continue
        at = called[row["launch"]] = row["start_ns"] - row["launch_latency_ns"]
        moments[row["runtime_correlation"]] = ("runtime call", None, row["runtime_correlation"], at, at)
        if row["step"] is not None:
            steps[row["step"]].append(at)
    of_call: dict[int, list[int]] = defaultdict(list)
    for relation in annotation.relation_table.select(["sequence", "launch"]).to_pylist():
        if relation["launch"] in called:
            of_call[relation["sequence"]].append(called[relation["launch"]])
    return HostTimes(
        calls={sequence: (min(times), max(times)) for sequence, times in of_call.items()},
        steps=tuple((step, min(times), max(times)) for step, times in sorted(steps.items())),
        runtime_calls=tuple(moments.values()),
    )


def lay_out(annotation: KernelAnnotation, times: HostTimes) -> Timeline:
    """Return the window's steps, phases, modules, ATen calls, runtime calls and device streams as tracks.

    An arrow for each relation goes from its ATen call to its kernel launch; its number is the row of the relation.
    """
    calls = annotation.call_table.to_pylist()
    launches = annotation.launch_table.to_pylist()
    timed = {row["launch"] for row in launches if row["start_ns"] is not None}
    leaves, arrives = defaultdict(list), defaultdict(list)
    for number, relation in enumerate(annotation.relation_table.select(["sequence", "launch"]).to_pylist()):
        if relation["sequence"] in times.calls and relation["launch"] in timed:
            leaves[relation["sequence"]].append(number)
            arrives[relation["launch"]].append(number)
    tracks = [Track(name="steps", slices=tuple(_steps(times)))]
    by_thread = defaultdict(list)
    for row in calls:
        if row["sequence"] in times.calls:
            by_thread[row["thread"]].append((row, times.calls[row["sequence"]]))
    for thread, rows in sorted(by_thread.items(), key=lambda item: item[1][0][1]):
        tracks += _thread_tracks("an unknown thread" if thread is None else f"thread {thread}", rows, leaves)
    tracks += _runtime_tracks(times)
    tracks += _device_tracks(launches, arrives)
    manifest = annotation.manifest
    device_rows = [row for row in launches if row["attribution_status"] != "unavailable"]
    return Timeline(
        name=f"rank {manifest.rank}, window {manifest.window.first_step}",
        tracks=tuple(lane for track in tracks for lane in _lanes(track) if lane.slices),
        untimed_calls=sum(row["sequence"] not in times.calls for row in calls),
        untimed_launches=sum(row["launch"] not in timed for row in device_rows),
    )


def _steps(times: HostTimes) -> Iterator[Slice]:
    for step, start, end in times.steps:
        yield Slice(name=f"step {step}", start_ns=start, end_ns=end, facts={"step": step})


def _thread_tracks(
    thread: str, rows: Sequence[tuple[dict[str, Value], tuple[int, int]]], leaves: Mapping[int, list[int]]
) -> Iterator[Track]:
    rows = sorted(rows, key=lambda row: (row[1][0], -row[1][1]))
    yield Track(name=f"{thread}: phases", slices=tuple(_runs(rows, "phase", ("step", "phase"))))
    modules = tuple(_runs(rows, "module", ("step", "phase", "module", "module_call")))
    yield Track(name=f"{thread}: modules", slices=modules)
    slices = (
        Slice(
            name=visible(str(row["operator"] or f"ATen call {row['sequence']}")),
            start_ns=start,
            end_ns=end,
            facts=_known(row, _CALL_FACTS),
            leaves=tuple(leaves.get(int(row["sequence"]), ())),
        )
        for row, (start, end) in rows
    )
    yield Track(name=f"{thread}: ATen calls", slices=tuple(slices))


def _runs(
    rows: Sequence[tuple[dict[str, Value], tuple[int, int]]], name: str, key: tuple[str, ...]
) -> Iterator[Slice]:
    """Join calls that follow each other with the same `key` into one slice, from the first start to the last end."""
    for _, run in groupby(rows, key=lambda row: tuple(row[0][column] for column in key)):
        members = list(run)
        first = members[0][0]
        if first[name] is not None:
            yield Slice(
                name=visible(str(first[name]) or "the model itself"),
                start_ns=members[0][1][0],
                end_ns=max(end for _, (_, end) in members),
                facts=_known(first, key),
            )


def _runtime_tracks(times: HostTimes) -> Iterator[Track]:
    by_thread = defaultdict(list)
    for name, thread, correlation, start, end in times.runtime_calls:
        facts: dict[str, Value] = {} if correlation is None else {"runtime_correlation": correlation}
        by_thread[thread].append(Slice(name=visible(name), start_ns=start, end_ns=end, facts=facts))
    for thread, slices in by_thread.items():
        where = "" if thread is None else f"thread {thread}: "
        yield Track(name=f"{where}runtime calls", slices=tuple(slices))


def _device_tracks(launches: Iterable[dict[str, Value]], arrives: Mapping[int, list[int]]) -> Iterator[Track]:
    by_stream = defaultdict(list)
    for row in launches:
        if row["start_ns"] is not None:
            by_stream[row["device"], row["stream"]].append(row)
    for (device, stream), rows in sorted(by_stream.items(), key=str):
        slices = (
            Slice(
                name=visible(str(row["launch_name"])),
                start_ns=int(row["start_ns"]),
                end_ns=int(row["start_ns"]) + round(1000 * float(row["duration"] or 0)),
                facts=_known(row, _LAUNCH_FACTS),
                arrives=tuple(arrives.get(int(row["launch"]), ())),
            )
            for row in rows
        )
        yield Track(name=f"device {device}, stream {stream}", slices=tuple(slices))


def _known(row: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    return {
        name: visible(v) if isinstance(v := row[name], str) else v for name in names if row[name] is not None
    }


def _lanes(track: Track) -> Iterator[Track]:
    """Give slices that overlap without one being within the other rows of their own."""
    lanes: list[tuple[list[Slice], list[int]]] = []
    for piece in sorted(track.slices, key=lambda one: (one.start_ns, -one.end_ns)):
        for _, ends in lanes:
            while ends and ends[-1] <= piece.start_ns:
                ends.pop()
        fitting = (lane for lane in lanes if not lane[1] or piece.end_ns <= lane[1][-1])
        slices, ends = next(fitting, ([], []))
        if not slices:
            lanes.append((slices, ends))
        slices.append(piece)
        ends.append(piece.end_ns)
    for number, (slices, _) in enumerate(lanes, start=1):
        name = track.name if number == 1 else f"{track.name} ({number})"
        yield replace(track, name=name, slices=tuple(slices))

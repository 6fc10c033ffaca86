"""Correlate a trace's events slowly and plainly, from the written rules alone; the product is compared with it."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LAUNCHES = {"cudaLaunchKernel", "cudaGraphLaunch", "cuLaunchKernel"}
TRANSFERS = {"cudaMemcpyAsync", "cudaMemsetAsync"}
KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
EVERYTHING = {
    "record_without_launch", "mode_paused_interior", "launch_without_record", "unreadable_event",
    "no_device_evidence",
}  # fmt: skip
ATTRIBUTION = {"graph_replay", "foreign_thread", "launched_outside_dispatcher", "link_disagreement"}

Event = dict[str, Any]


@dataclass(kw_only=True)
class SlowAnswer:
    """What the rules say of a trace."""

    launches: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    calls: dict[int, int | None] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Read:
    """The events of a trace, each in its role."""

    ops: dict[int, Event]
    steps: list[tuple[int, Event]]
    profiler_steps: list[tuple[int, Event]]
    host_ops: list[Event]
    calls: list[Event]
    records: list[Event]


def correlate_slowly(events: list[Event], session: str) -> SlowAnswer:
    """Return what the rules say; markers of `session` are ours."""
    read = _read(events, session)
    answer = SlowAnswer()
    for number, op in read.ops.items():
        answer.calls[number] = _step(read, _ns(op["ts"]))
    audit = Counter(agreed=0, disagreed=0, not_audited=0)
    for record in read.records:
        owners, step, gap = _relate(read, record)
        answer.launches[record["name"]] = (
            step,
            owners,
            gap,
            _ns(record["dur"]) > 0 and _ns(record["ts"]) > 0,
        )
        audit[_audit(read, record, owners)] += 1
    gaps = Counter(row[2] for row in answer.launches.values() if row[2] is not None)
    lost, empty, launching = _lost(read)
    gaps["launch_without_record"] += lost
    gaps["invalid_time"] += sum(not row[3] for row in answer.launches.values())
    gaps["link_disagreement"] += audit["disagreed"]
    answer.notes = {"empty_transfers": empty, "launching_calls": launching}
    _sum_up(answer, read, gaps={reason: n for reason, n in gaps.items() if n}, audit=dict(audit))
    return answer


def _read(events: list[Event], session: str) -> _Read:
    read = _Read(ops={}, steps=[], profiler_steps=[], host_ops=[], calls=[], records=[])
    for event in events:
        marker = re.fullmatch(f"tlk::{session}::(op|step)::([0-9]+)", event["name"])
        if event["cat"] in ("cpu_op", "user_annotation") and marker:
            if marker[1] == "op":
                read.ops[int(marker[2])] = event
            else:
                read.steps.append((int(marker[2]), event))
        elif event["cat"] == "user_annotation" and event["name"].startswith("ProfilerStep#"):
            read.profiler_steps.append((int(event["name"].removeprefix("ProfilerStep#")), event))
        elif event["cat"] == "cpu_op":
            read.host_ops.append(event)
        elif event["cat"] in ("cuda_runtime", "cuda_driver"):
            read.calls.append(event)
        elif event["cat"] in KINDS:
            read.records.append(event)
    return read


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _holds(event: Event, time: int) -> bool:
    return _ns(event["ts"]) <= time < _ns(event["ts"]) + _ns(event["dur"])


def _innermost(candidates: list[tuple[Any, Event]], time: int) -> Any:
    """Return the label of the range with the latest start, then the earliest end, then the last one."""
    best: tuple[tuple[int, int], Any] | None = None
    for label, event in candidates:
        if _holds(event, time):
            rank = (_ns(event["ts"]), -_ns(event["ts"]) - _ns(event["dur"]))
            if best is None or rank >= best[0]:
                best = rank, label
    return None if best is None else best[1]


def _owner(read: _Read, thread: Any, time: int) -> int | None:
    on_thread = [(number, op) for number, op in sorted(read.ops.items()) if op["tid"] == thread]
    return _innermost(on_thread, time)


def _step(read: _Read, time: int) -> int | None:
    if read.steps or read.profiler_steps:
        return _innermost(read.steps or read.profiler_steps, time)
    return 0


def _id(event: Event) -> int | None:
    return event["args"].get("correlation") or None


def _calls_of(read: _Read, record: Event) -> list[Event]:
    return [call for call in read.calls if _id(call) is not None and _id(call) == _id(record)]


def _relate(read: _Read, record: Event) -> tuple[tuple[int, ...], int | None, str | None]:
    calls = _calls_of(read, record)
    if not calls:
        return (), None, "record_without_launch"
    owners = {_owner(read, call["tid"], _ns(call["ts"])) for call in calls} - {None}
    first = min(calls, key=lambda call: _ns(call["ts"]))
    step = _step(read, _ns(first["ts"]))
    if owners or step is None:
        return tuple(sorted(owners)), step, None
    if sum(_id(other) == _id(record) for other in read.records) > 1:
        return (), step, "graph_replay"
    ours = [*read.ops.values(), *(event for _, event in read.steps)]
    if first["tid"] not in {event["tid"] for event in ours}:
        return (), step, "foreign_thread"
    host_ops = [(op["name"], op) for op in read.host_ops if op["tid"] == first["tid"]]
    name = _innermost(host_ops, _ns(first["ts"]))
    is_operator = name is not None and re.fullmatch(r"\w+::\w+(\.\w+)?", name)
    return (), step, "mode_paused_interior" if is_operator else "launched_outside_dispatcher"


def _audit(read: _Read, record: Event, owners: tuple[int, ...]) -> str:
    external = record["args"].get("External id") or None
    ranges = [*read.host_ops, *read.ops.values(), *(event for _, event in read.steps)]
    linked = [event for event in ranges if event["args"].get("External id") == external]
    if external is None or len(linked) != 1:
        return "not_audited"
    named = _owner(read, linked[0]["tid"], _ns(linked[0]["ts"]))
    return "agreed" if (named in owners if owners else named is None) else "disagreed"


def _lost(read: _Read) -> tuple[int, int, int]:
    recorded = {_id(record) for record in read.records} - {None}
    with_records = {call["name"] for call in read.calls if _id(call) in recorded}
    kernels = transfers = launching = 0
    for call in read.calls:
        has_record = _id(call) in recorded
        if not has_record and _captured(read, call):
            continue
        transfer = call["name"] in TRANSFERS
        launch = not transfer and (call["name"] in LAUNCHES or call["name"] in with_records)
        launching += launch or transfer
        if not has_record and _step(read, _ns(call["ts"])) is not None:
            kernels += launch
            transfers += transfer
    return (kernels + transfers, 0, launching) if kernels else (0, transfers, launching)


def _captured(read: _Read, call: Event) -> bool:
    depth = 0
    for each in sorted(read.calls, key=lambda c: _ns(c["ts"])):
        if each["tid"] == call["tid"]:
            depth += each["name"] == "cudaStreamBeginCapture"
            depth = max(depth - (each["name"] == "cudaStreamEndCapture"), 0)
        if each is call:
            return depth > 0
    raise AssertionError("the call is one of the trace's")


def _sum_up(answer: SlowAnswer, read: _Read, *, gaps: dict[str, int], audit: dict[str, int]) -> None:
    records = {record["name"]: record for record in read.records}
    inside = {name: row for name, row in answer.launches.items() if row[0] is not None}
    timed = {name: records[name] for name, row in inside.items() if row[3]}
    kinds = Counter(KINDS[records[name]["cat"]] for name in inside)
    attributed = sum(bool(row[1]) for row in inside.values())
    correlations = Counter(_id(records[name]) for name in inside)
    streams: dict[str, list[int]] = {}
    for device, stream in sorted(
        {(r["args"]["device"], r["args"]["stream"]) for n, r in records.items() if n in inside}
    ):
        streams.setdefault(str(device), []).append(stream)
    labels = {label for label, _ in read.steps or read.profiler_steps} or {0}
    answer.facts = {
        "counts": {
            "aten_calls": sum(step is not None for step in answer.calls.values()),
            "aten_calls_with_launches": len({owner for row in inside.values() for owner in row[1]}),
            "launches": len(inside),
            "kernels": kinds["kernel"],
            "memcpys": kinds["memcpy"],
            "memsets": kinds["memset"],
            "attributed": attributed,
            "unattributed": len(inside) - attributed,
            "outside_steps": len(answer.launches) - len(inside),
            "relations": sum(len(row[1]) for row in inside.values()),
        },
        "by_step": {str(label): sum(row[0] == label for row in inside.values()) for label in labels},
        "streams": streams,
        "device_time_us": sum(_ns(record["dur"]) for record in timed.values()) / 1000,
        "device_busy_us": _busy(list(timed.values())) / 1000,
        "max_records_per_launch": max(correlations.values(), default=0),
        "gaps": gaps,
        "audit": audit,
        "bounds": _bounds(set(gaps)),
    }


def _busy(records: list[Event]) -> int:
    total = 0
    for device in {record["args"]["device"] for record in records}:
        moments = sorted({_ns(record["ts"]) + add for record in records for add in (0, _ns(record["dur"]))})
        mine = [record for record in records if record["args"]["device"] == device]
        for begin, end in itertools.pairwise(moments):
            total += (end - begin) * any(_holds(record, begin) for record in mine)
    return total


def _bounds(gaps: set[str]) -> dict[str, str]:
    all_lost, links_lost = bool(gaps & EVERYTHING), bool(gaps & ATTRIBUTION)
    lower = {True: "lower", False: "exact"}
    names = ("launches", "kernels", "memcpys", "memsets", "outside_steps", "max_records_per_launch")
    return {
        **dict.fromkeys(names, lower[all_lost]),
        **dict.fromkeys(
            ("attributed", "relations", "aten_calls_with_launches"), lower[all_lost or links_lost]
        ),
        **dict.fromkeys(("device_time_us", "device_busy_us"), lower[all_lost or "invalid_time" in gaps]),
        "aten_calls": lower[all_lost or "foreign_thread" in gaps],
        "unattributed": "unknown" if all_lost else "upper" if links_lost else "exact",
    }

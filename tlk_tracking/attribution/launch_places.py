"""Say where each device record was launched (EventColumns + Correlation + ATen rows -> phase, module, graph launch).

A record takes the place of the ATen call that launched it. One without a call takes what the ranges around its
runtime call say, on the same thread; what they do not say is null. No relation is made here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tlk_tracking.attribution.correlation import Correlation
from tlk_tracking.attribution.kineto.event_columns import EventColumns, HostRanges, Int64s, Ints
from tlk_tracking.attribution.nested_ranges import NONE, innermost, named_ranges, no_index
from tlk_tracking.core.records import MARKER_PREFIX, Phase

GRAPH_LAUNCH_API = re.compile(r"cu(?:da)?GraphLaunch(?:_v[0-9]+)?(?:_ptsz)?")
# The range that torch's autograd engine puts around the evaluation of each node.
_EVALUATION = "autograd::engine::evaluate_function: "


class Place(NamedTuple):
    """Where in the step something ran; None is unknown."""

    phase: str | None = None
    module: str | None = None
    module_call: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlaces:
    """Columns over the device records; null is unknown.

    Attributes:
        phase, module, module_call: where it was launched.
        graph_launch: number of the launch of a CUDA graph, from 0 in the order of the calls; null without a graph.
    """

    phase: pa.DictionaryArray
    module: pa.DictionaryArray
    module_call: pa.Int64Array
    graph_launch: pa.Int64Array


def place_launches(events: EventColumns, correlation: Correlation, calls: pa.Table) -> LaunchPlaces:
    """Return where each record was launched; `calls` are the annotation's ATen rows, sorted by sequence."""
    rows = calls.select(list(Place._fields))
    row_of_pair = np.searchsorted(calls["sequence"].to_numpy(), correlation.relation_sequence)
    owner = no_index(len(events.records))
    owner[correlation.relation_record] = row_of_pair
    placed = _shared_records(rows, correlation.relation_record, row_of_pair)
    if events.session is not None:
        launched = ~(
            np.ma.getmaskarray(correlation.record_call) | np.ma.getmaskarray(correlation.record_step)
        )
        placed |= _surroundings(events, calls, rows, np.flatnonzero(launched & (owner == NONE)), correlation)
    taken = rows.take(pa.array(owner, mask=owner == NONE))
    columns = [_replaced(taken[name], placed, field) for field, name in enumerate(Place._fields)]
    return LaunchPlaces(
        phase=columns[0].dictionary_encode(),  # nothing to do where it is encoded already
        module=columns[1].dictionary_encode(),
        module_call=columns[2],
        graph_launch=_graph_launches(events, correlation),
    )


def _shared_records(rows: pa.Table, record: Int64s, row: Int64s) -> dict[int, Place]:
    """Return the place of each record that several calls share: what all of them say."""
    found, count = np.unique(record, return_counts=True)
    placed = {}
    for one in found[count > 1].tolist():
        said = [Place(**rows.slice(r, 1).to_pylist()[0]) for r in row[record == one].tolist()]
        placed[one] = _common(said)
    return placed


def _surroundings(
    events: EventColumns, calls: pa.Table, rows: pa.Table, records: Int64s, correlation: Correlation
) -> dict[int, Place]:
    """Return the places of records without an ATen call, from the ranges around their runtime calls."""
    if not len(records):
        return {}
    call = np.ma.getdata(correlation.record_call)[records]
    thread, time_ns = events.runtime_calls.thread[call], events.runtime_calls.start_ns[call]
    ours = f"{MARKER_PREFIX}{events.session}::"
    evaluations, _ = named_ranges(events, lambda name: name if name.startswith(_EVALUATION) else None)
    modules, module_of = named_ranges(
        events, re.compile(f"{ours}module::([0-9]{{1,9}})::(.*)", re.S).fullmatch
    )
    moments, phase_of = named_ranges(events, re.compile(f"{ours}phase::({'|'.join(Phase)})").fullmatch)
    evaluation = innermost(evaluations, thread=thread, time_ns=time_ns)
    module = innermost(modules, thread=thread, time_ns=time_ns)
    moment = _latest(moments, thread=thread, time_ns=time_ns)
    by_evaluation = _agreed(evaluations, np.unique(evaluation), events.op_markers, calls, rows)
    placed = {}
    for record, e, m, p in zip(*(a.tolist() for a in (records, evaluation, module, moment)), strict=True):
        phase = Phase.BACKWARD.value if e != NONE else None if p == NONE else phase_of[p][1]
        if m != NONE and (e == NONE or modules.start_ns[m] >= evaluations.start_ns[e]):
            number, path = module_of[m].groups()
            placed[record] = Place(phase, path, int(number))
        else:
            placed[record] = by_evaluation.get(e, Place())._replace(phase=phase)
    return placed


def _agreed(
    evaluations: HostRanges, chosen: Int64s, markers: HostRanges, calls: pa.Table, rows: pa.Table
) -> dict[int, Place]:
    """Return for each of the chosen evaluations of an autograd node the module of all ATen calls in it."""
    of_marker = innermost(evaluations, thread=markers.thread, time_ns=markers.start_ns)
    inside = np.flatnonzero(np.isin(of_marker, chosen[chosen != NONE]))
    row = np.searchsorted(calls["sequence"].to_numpy(), markers.label[inside])
    said: defaultdict[int, list[Place]] = defaultdict(list)
    for evaluation, place in zip(
        of_marker[inside].tolist(), rows.take(pa.array(row)).to_pylist(), strict=True
    ):
        said[evaluation].append(Place(**place))
    return {evaluation: _common(places) for evaluation, places in said.items()}


def _latest(moments: HostRanges, *, thread: Ints, time_ns: Int64s) -> Int64s:
    """Return for each time the index of the last range of the same thread that began by then, or -1."""
    found = no_index(len(time_ns))
    for each in np.unique(moments.thread):
        ours = np.flatnonzero(moments.thread == each)
        ours = ours[np.argsort(moments.start_ns[ours], kind="stable")]
        asked = np.flatnonzero(thread == each)
        position = np.searchsorted(moments.start_ns[ours], time_ns[asked], "right") - 1
        found[asked] = np.where(position >= 0, ours[position], NONE)
    return found


def _graph_launches(events: EventColumns, correlation: Correlation) -> pa.Int64Array:
    is_graph = np.array([GRAPH_LAUNCH_API.fullmatch(name) is not None for name in events.names], bool)
    call = np.ma.getdata(correlation.record_call)
    launched = ~np.ma.getmaskarray(correlation.record_call)
    launched[launched] = is_graph[events.runtime_calls.name[call[launched]]]
    number = np.zeros(len(call), np.int64)
    graph_calls = np.unique(call[launched])
    in_order = graph_calls[np.argsort(events.runtime_calls.start_ns[graph_calls], kind="stable")]
    place = np.empty(len(in_order), np.int64)
    place[np.searchsorted(graph_calls, in_order)] = np.arange(len(in_order))
    number[launched] = place[np.searchsorted(graph_calls, call[launched])]
    return pa.array(number, mask=~launched)


def _common(places: list[Place]) -> Place:
    """Return what all of them say."""
    phase, module, module_call = (
        values[0] if len(set(values)) == 1 else None for values in zip(*places, strict=True)
    )
    return Place(phase, module, None if module is None else module_call)


def _replaced(column: pa.ChunkedArray, placed: dict[int, Place], field: int) -> pa.Array:
    array = column.combine_chunks()
    if not placed:
        return array
    if pa.types.is_dictionary(array.type):
        array = array.cast(pa.string())
    mask = np.zeros(len(array), bool)
    mask[list(placed)] = True
    values = [placed[record][field] for record in sorted(placed)]
    return pc.replace_with_mask(array, pa.array(mask), pa.array(values, array.type))

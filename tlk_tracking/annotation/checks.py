"""Check that an annotation's tables fit each other and its manifest (tables + manifest -> nothing, or an error)."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tlk_tracking.annotation.manifest import Manifest, Number
from tlk_tracking.annotation.schemas import (
    CALLS_FILE,
    FUSED_FILE,
    LAUNCHES_FILE,
    MAX_DURATION_NS,
    MAX_MODULE_LENGTH,
    MAX_NAME_LENGTH,
    RELATIONS_FILE,
)
from tlk_tracking.annotation.totals import Bounded, count_totals
from tlk_tracking.core.errors import AnnotationError
from tlk_tracking.core.gaps import LAUNCH_GAPS, Bound, GapReason
from tlk_tracking.core.places import MANIFEST_FILE
from tlk_tracking.core.records import (
    AttributionStatus,
    Availability,
    CallOutcome,
    LaunchKind,
    Origin,
    Phase,
    StepOutcome,
)

_LAUNCH_FACTS = (
    "launch_name", "device", "stream", "duration", "runtime_correlation", "kind", "step", "start_ns",
    "time_valid", "launch_latency_ns", "gap", "bytes", "grid", "block", "graph_launch",
    "phase", "module", "module_call",
)  # fmt: skip

MAX_TEXT_BYTES = (2 << 30) - 1  # what one Arrow array of texts holds
_MAX_DURATION_US = MAX_DURATION_NS / 1000
_MAX_START_NS = 2**62  # beyond it sums could overflow
_EXTENT = re.compile(r"-?[0-9]{1,20},-?[0-9]{1,20},-?[0-9]{1,20}")
_SHOWN_LENGTH = 80


def check_tables(
    manifest: Manifest, *, calls: pa.Table, launches: pa.Table, relations: pa.Table, fused: pa.Table
) -> None:
    """Refuse tables that break a rule of the schema or that the manifest contradicts.

    Raises:
        AnnotationError: names the file, and the first row and the field where there is one.
    """
    tables = {CALLS_FILE: calls, LAUNCHES_FILE: launches, RELATIONS_FILE: relations, FUSED_FILE: fused}
    for file, table in tables.items():
        check_lengths(table, file)
    _check_calls(manifest, calls)
    if manifest.availability is Availability.UNAVAILABLE:
        _check_unavailable(launches, relations)
        if len(fused):
            _refuse("has a node of an unavailable annotation", FUSED_FILE, 0)
    else:
        _check_launches(manifest, launches)
        _check_fused(calls, fused)
        _check_relations(calls, launches, relations, fused)
    _check_availability(manifest, launches)
    _check_counts(manifest, calls=calls, launches=launches, relations=relations)


def _check_calls(manifest: Manifest, calls: pa.Table) -> None:
    sequence = _int64s(calls, "sequence")
    bad = np.flatnonzero(np.diff(sequence) <= 0)
    if len(bad):
        _refuse("is not larger than in the row before", CALLS_FILE, int(bad[0]) + 1, "sequence")
    if len(sequence) and sequence[0] < 0:
        _refuse("is negative", CALLS_FILE, 0, "sequence")
    _check_closed(calls, "phase", Phase, CALLS_FILE)
    _check_closed(calls, "outcome", CallOutcome, CALLS_FILE)
    _check_texts(calls, "inputs", CALLS_FILE, _complain_of_inputs)
    _check_steps(manifest, calls, CALLS_FILE)


def _check_unavailable(launches: pa.Table, relations: pa.Table) -> None:
    if len(launches) != 1:
        _refuse(f"has {len(launches)} rows, but an unavailable annotation has exactly one", LAUNCHES_FILE)
    if launches["attribution_status"][0].as_py() != AttributionStatus.UNAVAILABLE.value:
        _refuse("is not `unavailable`", LAUNCHES_FILE, 0, "attribution_status")
    for name in _LAUNCH_FACTS:
        if launches[name].null_count != 1:
            _refuse("states a fact in an unavailable annotation", LAUNCHES_FILE, 0, name)
    if len(relations):
        _refuse("relates launches of an unavailable annotation", RELATIONS_FILE, 0)


def _check_launches(manifest: Manifest, launches: pa.Table) -> None:
    number = _int64s(launches, "launch")
    bad = np.flatnonzero(number != np.arange(len(number)))
    if len(bad):
        _refuse("is not the row number", LAUNCHES_FILE, int(bad[0]), "launch")
    _check_closed(launches, "attribution_status", AttributionStatus, LAUNCHES_FILE, nullable=False)
    _refuse_where(
        pc.equal(_texts(launches, "attribution_status"), AttributionStatus.UNAVAILABLE.value),
        "an unavailable row stands beside others",
        "attribution_status",
    )
    _check_closed(launches, "kind", LaunchKind, LAUNCHES_FILE, nullable=False)
    _check_closed(launches, "phase", Phase, LAUNCHES_FILE)
    _check_closed(launches, "gap", GapReason, LAUNCHES_FILE, allowed={r.value for r in LAUNCH_GAPS})
    _refuse_where(pc.is_null(launches["time_valid"]), "is null", "time_valid")
    duration = launches["duration"]
    _refuse_where(
        pc.and_(
            pc.is_valid(duration),
            pc.invert(pc.and_(pc.greater(duration, 0.0), pc.less_equal(duration, _MAX_DURATION_US))),
        ),
        "is not a positive time",
        "duration",
    )
    _refuse_where(
        pc.and_(launches["time_valid"], pc.is_null(duration)),
        "is null although the time is valid",
        "duration",
    )
    for name in ("launch_latency_ns", "bytes", "device", "stream", "graph_launch", "module_call"):
        _refuse_where(pc.and_(pc.is_valid(launches[name]), pc.less(launches[name], 0)), "is negative", name)
    timed_in_step = pc.and_(launches["time_valid"], pc.is_valid(launches["step"]))
    start = launches["start_ns"]
    _refuse_where(pc.and_(timed_in_step, pc.is_null(start)), "is null", "start_ns")
    in_range = pc.and_(pc.greater(start, -_MAX_START_NS), pc.less(start, _MAX_START_NS))
    _refuse_where(pc.and_(pc.is_valid(start), pc.invert(in_range)), "is no time", "start_ns")
    for name in ("grid", "block"):
        _check_texts(launches, name, LAUNCHES_FILE, _complain_of_extent)
    _check_steps(manifest, launches, LAUNCHES_FILE)


def _check_availability(manifest: Manifest, launches: pa.Table) -> None:
    """Refuse a manifest whose availability, audit or gaps the launches contradict."""
    unavailable = manifest.availability is Availability.UNAVAILABLE
    if not unavailable and (manifest.availability is Availability.EMPTY) != (len(launches) == 0):
        _refuse(
            f"is {manifest.availability} with {len(launches)} launches", MANIFEST_FILE, None, "availability"
        )
    if unavailable != (manifest.availability_reason is not None):
        _refuse("goes with `unavailable`, and only with it", MANIFEST_FILE, None, "availability_reason")
    audit = manifest.audit
    parts = (audit.agreed, audit.disagreed, audit.not_audited)
    if unavailable:
        if parts != (None, None, None):
            _refuse("states a fact in an unavailable annotation", MANIFEST_FILE, None, "audit")
        return
    if None in parts or sum(part or 0 for part in parts) != len(launches):
        _refuse(f"is of {parts} launches, the rows are {len(launches)}", MANIFEST_FILE, None, "audit")
    gaps = {gap.reason: gap.count for gap in manifest.gaps}
    untimed = pc.sum(pc.invert(launches["time_valid"])).as_py() or 0
    for reason, counted in (
        (GapReason.INVALID_TIME, untimed),
        (GapReason.LINK_DISAGREEMENT, audit.disagreed),
    ):
        if gaps.get(reason, 0) != counted:
            said = f"{gaps.get(reason, 0)} times {reason.value}, the rows and the audit say {counted}"
            _refuse(said, MANIFEST_FILE, None, "gaps")


def _check_fused(calls: pa.Table, fused: pa.Table) -> None:
    sequence = _int64s(fused, "sequence")
    bad = np.flatnonzero(np.diff(sequence) <= 0)
    if len(bad):
        _refuse("is not larger than in the row before", FUSED_FILE, int(bad[0]) + 1, "sequence")
    if len(sequence) and len(calls) and sequence[0] <= calls["sequence"][-1].as_py():
        _refuse("is the number of an ATen call or below it", FUSED_FILE, 0, "sequence")


def _check_relations(calls: pa.Table, launches: pa.Table, relations: pa.Table, fused: pa.Table) -> None:
    sequence = _int64s(relations, "sequence")
    launch = _int64s(relations, "launch")
    _check_closed(relations, "origin", Origin, RELATIONS_FILE, nullable=False)
    dispatched = pc.equal(_texts(relations, "origin"), Origin.DISPATCH.value).to_numpy()
    for chosen, table, what in ((dispatched, calls, "ATen call"), (~dispatched, fused, "fused node")):
        bad = np.flatnonzero(chosen & ~np.isin(sequence, table["sequence"].to_numpy()))
        if len(bad):
            _refuse(f"{sequence[bad[0]]} is no {what}", RELATIONS_FILE, int(bad[0]), "sequence")
    bad = np.flatnonzero((launch < 0) | (launch >= len(launches)))
    if len(bad):
        _refuse(f"{launch[bad[0]]} is no kernel launch", RELATIONS_FILE, int(bad[0]), "launch")
    order = np.lexsort((sequence, launch))
    twice = np.flatnonzero((np.diff(launch[order]) == 0) & (np.diff(sequence[order]) == 0))
    if len(twice):
        _refuse("the relation stands there twice", RELATIONS_FILE, int(order[twice[0] + 1]))
    related = np.zeros(len(launches), bool)
    related[launch[dispatched]] = True
    said = pc.equal(_texts(launches, "attribution_status"), AttributionStatus.ATTRIBUTED.value).to_numpy()
    bad = np.flatnonzero(related != said)
    if len(bad):
        _refuse("does not fit the relations", LAUNCHES_FILE, int(bad[0]), "attribution_status")


def _check_counts(manifest: Manifest, *, calls: pa.Table, launches: pa.Table, relations: pa.Table) -> None:
    reasons = frozenset(gap.reason for gap in manifest.gaps)
    if manifest.availability is Availability.UNAVAILABLE:
        reasons |= {GapReason.NO_DEVICE_EVIDENCE}
    totals = count_totals(
        calls=calls,
        launches=launches,
        relations=relations,
        steps=tuple(row.step for row in manifest.window.steps if row.outcome is not StepOutcome.ABANDONED),
        availability=manifest.availability,
        reasons=reasons,
    )
    for said, counted in ((manifest.counts, totals.counts), (manifest.times, totals.times)):
        if set(said) != set(counted):
            _refuse(f"has {sorted(said)}, not {sorted(counted)}", MANIFEST_FILE, None, "counts")
        for name, number in counted.items():
            _check_number(name, said[name], number)
    any_gap = any(n.bound is not Bound.EXACT for n in (*totals.counts.values(), *totals.times.values()))
    if manifest.lower_bound != any_gap:
        _refuse(f"is {manifest.lower_bound}, the numbers say {any_gap}", MANIFEST_FILE, None, "lower_bound")
    if manifest.lower_bound_reasons != tuple(sorted(reasons)):
        _refuse("does not name the gaps", MANIFEST_FILE, None, "lower_bound_reasons")
    rows = {pair["values"]: pair["counts"] for pair in pc.value_counts(_texts(launches, "gap")).to_pylist()}
    for reason in LAUNCH_GAPS:
        counted_gap = next((gap.count for gap in manifest.gaps if gap.reason is reason), 0)
        if rows.get(reason.value, 0) != counted_gap:
            _refuse(
                f"{counted_gap} times {reason.value}, the rows say {rows.get(reason.value, 0)}",
                MANIFEST_FILE, None, "gaps",
            )  # fmt: skip


def _check_number(name: str, said: Number, counted: Bounded) -> None:
    if said.bound is not counted.bound:
        _refuse(f"is said to be {said.bound}, the gaps say {counted.bound}", MANIFEST_FILE, None, name)
    if said.value != counted.value:
        _refuse(f"is {said.value}, the rows say {counted.value}", MANIFEST_FILE, None, name)


def _check_steps(manifest: Manifest, table: pa.Table, file: str) -> None:
    known = [row.step for row in manifest.window.steps if row.outcome is not StepOutcome.ABANDONED]
    step = table["step"]
    wrong = pc.and_(pc.is_valid(step), pc.invert(pc.is_in(step, pa.array(known, pa.int64()))))
    row = pc.index(wrong, True).as_py()
    if row >= 0:
        _refuse(f"{step[row].as_py()} is no step of the window", file, row, "step")


def _check_closed(
    table: pa.Table, name: str, kind: type[StrEnum], file: str, *,
    nullable: bool = True, allowed: set[str] | None = None,
) -> None:  # fmt: skip
    members = allowed if allowed is not None else {member.value for member in kind}
    _check_texts(
        table, name, file, lambda text: None if text in members else f"is not one of {sorted(members)}"
    )
    if not nullable and table[name].null_count:
        _refuse("is null", file, pc.index(pc.is_null(table[name]), True).as_py(), name)


def _check_texts(table: pa.Table, name: str, file: str, complain: Callable[[str], str | None]) -> None:
    """Refuse the first row whose text `complain` has something to say of; each distinct text is looked at once."""
    row = 0
    for chunk in table[name].chunks:
        wrong = {
            code: complaint
            for code, text in enumerate(chunk.dictionary.to_pylist())
            if (complaint := complain(text)) is not None
        }
        codes = pc.fill_null(chunk.indices, -1).to_numpy()
        bad = np.flatnonzero(np.isin(codes, list(wrong)))
        if len(bad):
            text = repr(chunk.dictionary[int(codes[bad[0]])].as_py()[:_SHOWN_LENGTH])
            _refuse(f"{text} {wrong[int(codes[bad[0]])]}", file, row + int(bad[0]), name)
        row += len(chunk)


def _complain_of_inputs(text: str) -> str | None:
    try:
        msgspec.json.decode(text, type=list[tuple[tuple[int, ...], str, str]])
    except (msgspec.DecodeError, RecursionError) as error:
        return f"is no list of [shape, dtype, device]: {error}"
    return None


def _complain_of_length(text: str, *, longest: int) -> str | None:
    return f"has {len(text)} characters" if len(text) > longest else None


def _complain_of_extent(text: str) -> str | None:
    return None if _EXTENT.fullmatch(text) else "is not `x,y,z`"


def check_lengths(table: pa.Table, file: str) -> None:
    """Refuse texts that are too long, or that would not fit into memory when each row's is written out.

    Raises:
        AnnotationError: names the field, and the row of a text that is too long.
    """
    size = 0
    for name in (field.name for field in table.schema if pa.types.is_dictionary(field.type)):
        longest = MAX_MODULE_LENGTH if name == "module" else MAX_NAME_LENGTH
        if name != "inputs":
            _check_texts(table, name, file, partial(_complain_of_length, longest=longest))
        for chunk in table[name].chunks:
            lengths = pc.fill_null(pc.binary_length(chunk.dictionary), 0).to_numpy().astype(np.int64)
            size += int(lengths[chunk.indices.drop_null().to_numpy()].sum())
        if size > MAX_TEXT_BYTES:
            _refuse(f"holds texts of more than {MAX_TEXT_BYTES} bytes", file, None, name)


def _refuse_where(mask: pa.ChunkedArray, what: str, field: str) -> None:
    row = pc.index(mask, True).as_py()
    if row >= 0:
        _refuse(what, LAUNCHES_FILE, row, field)


def _int64s(table: pa.Table, name: str) -> np.typing.NDArray[np.int64]:
    return np.asarray(table[name].to_numpy(), np.int64)


def _texts(table: pa.Table, name: str) -> pa.ChunkedArray:
    return table[name].cast(pa.string())


def _refuse(what: str, file: str, row: int | None = None, field: str | None = None) -> None:
    raise AnnotationError(what, file=file, row=row, field=field)

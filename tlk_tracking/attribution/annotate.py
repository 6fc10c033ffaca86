"""Put trace, ATen rows and window facts together (trace + calls + WindowFacts -> KernelAnnotation)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.annotation.manifest import (
    SCHEMA,
    SCHEMA_VERSION,
    AuditRow,
    EnvironmentRow,
    GapRow,
    Manifest,
    Number,
    StepRow,
    Window,
)
from tlk_tracking.annotation.schemas import ATEN_CALLS, FUSED_NODES, LAUNCH_RELATIONS
from tlk_tracking.annotation.totals import Totals, count_totals
from tlk_tracking.attribution.correlation import Correlation, correlate
from tlk_tracking.attribution.fused_notes import GraphNotes
from tlk_tracking.attribution.fused_relations import FusedRelations, relate_fused
from tlk_tracking.attribution.kineto.event_columns import EventColumns
from tlk_tracking.attribution.kineto.kineto_events import read_trace
from tlk_tracking.attribution.kineto.trace_files import content_session
from tlk_tracking.attribution.launch_tables import make_call_table, make_launch_tables, unavailable_launch
from tlk_tracking.attribution.ops_file import read_ops
from tlk_tracking.core.errors import TraceError
from tlk_tracking.core.gaps import LAUNCH_GAPS, Bound, Gap, GapReason
from tlk_tracking.core.records import (
    Availability,
    CallSource,
    Environment,
    StepBracket,
    StepOutcome,
    WindowFacts,
    WindowSource,
)


def annotate(
    trace: Path | None, window: WindowFacts, *, calls: pa.Table | None, graphs: Sequence[GraphNotes] = ()
) -> KernelAnnotation:
    """Make the annotation of a recorded window.

    Args:
        trace: Kineto's export of the window; None when no profiler could run.
        window: what the recording side knows.
        calls: the ATen rows that the dispatch mode saw (columns `tables.ATEN_CALLS`); None when it kept none.
        graphs: what Inductor said of the compiled graphs; launches of their code are then related to their nodes.

    Raises:
        TraceError: the trace cannot be read.
    """
    if trace is None:
        return _build(window, events=None, correlation=None, calls=calls)
    events = read_trace(trace, session=window.session)
    correlation = correlate(events, steps=_steps(window))
    return _build(window, events=events, correlation=correlation, calls=calls, graphs=graphs)


def import_trace(
    trace: Path | str,
    *,
    ops: Path | str | None = None,
    rank: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> KernelAnnotation:
    """Make an annotation of a trace file that exists already.

    A trace with our markers keeps its session; one without has one made of its content, and its innermost host ops
    as ATen rows (`call_source = host_ops`). Steps are our brackets, else torch's `ProfilerStep#N`, else the whole
    trace is step 0.

    Args:
        trace: Kineto's Chrome export, `.json` or `.json.gz`.
        ops: the rows that a dispatch mode saw, as JSON; without it operators of marked calls are unknown.
        rank: rank to give the annotation; None takes the trace's own, else 0.
        progress: called with the number of bytes read so far.

    Raises:
        TraceError: a file cannot be read or the two do not belong together.
    """
    said = None if ops is None else read_ops(Path(ops))
    session = None if said is None else said.session
    events = read_trace(Path(trace), session=session, progress=progress)
    correlation = correlate(events)
    if said is not None and len(events.op_markers) + len(events.step_markers) == 0:
        raise TraceError(
            f"{Path(trace).name} has no marker of session {said.session}, which {Path(ops or '').name} names"
        )
    header = events.header
    distributed = header.distributed_info
    own_rank = None if distributed is None else distributed.rank
    rank = rank if rank is not None else own_rank or 0
    steps = correlation.step_labels
    window = WindowFacts(
        session=events.session or content_session(Path(trace)),
        source=WindowSource.IMPORT,
        first_step=min(steps, default=0),
        warmup=0,
        requested=len(steps),
        steps=tuple(StepBracket(step=s, outcome=StepOutcome.COMPLETE) for s in steps),
        synchronized=False,
        rank=rank,
        world_size=max(rank + 1, (distributed.world_size if distributed is not None else None) or 1),
        environment=Environment(torch=None if said is None else said.torch),
    )
    return _build(window, events=events, correlation=correlation, calls=None if said is None else said.table)


@contextmanager
def _one_heap() -> Iterator[None]:
    # Arrow's own allocator keeps apart from numpy's what either has freed: a fifth more memory at millions of events.
    usual = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(usual)


@_one_heap()
def _build(
    window: WindowFacts,
    *,
    events: EventColumns | None,
    correlation: Correlation | None,
    calls: pa.Table | None,
    graphs: Sequence[GraphNotes] = (),
) -> KernelAnnotation:
    availability, why = _availability(window, events, correlation)
    gaps = list(window.gaps)
    call_source = CallSource.DISPATCH_MODE
    if events is None or correlation is None:
        call_table = ATEN_CALLS.empty_table() if calls is None else calls
    else:
        call_table, call_source, unmarked = make_call_table(events, correlation, calls)
        gaps += correlation.gaps
        if unmarked:
            gaps.append(
                Gap(
                    reason=GapReason.WINDOW_TRUNCATED,
                    count=unmarked,
                    evidence="ATen calls that the dispatch mode saw and whose range is not in the trace",
                )
            )
        missing = _steps(window).difference(correlation.step_labels)
        if missing:
            gaps.append(
                Gap(
                    reason=GapReason.WINDOW_TRUNCATED,
                    count=len(missing),
                    evidence="steps whose bracket is not in the trace",
                )
            )
    if availability is Availability.UNAVAILABLE or events is None or correlation is None:
        launch_table, relation_table, fused = unavailable_launch(), LAUNCH_RELATIONS.empty_table(), None
    else:
        fused = _relate_fused(events, correlation, call_table, graphs)
        launch_table, relation_table = make_launch_tables(events, correlation, call_table, fused=fused)
    steps = tuple(sorted(_steps(window)))
    call_table = _only_steps(call_table, steps)
    merged = _merge_gaps(gaps, availability)
    reasons = {gap.reason for gap in merged}
    if availability is Availability.UNAVAILABLE:
        reasons.add(GapReason.NO_DEVICE_EVIDENCE)
    totals = count_totals(
        calls=call_table,
        launches=launch_table,
        relations=relation_table,
        steps=steps,
        availability=availability,
        reasons=frozenset(reasons),
    )
    manifest = _manifest(
        window,
        events,
        correlation,
        call_source=call_source,
        availability=(availability, why),
        gaps=merged,
        reasons=reasons,
        totals=totals,
        fused_counts={} if fused is None else fused.counts,
    )
    return KernelAnnotation(
        manifest=manifest,
        call_table=call_table,
        launch_table=launch_table,
        relation_table=relation_table,
        fused_table=FUSED_NODES.empty_table() if fused is None else fused.nodes,
    )


def _relate_fused(
    events: EventColumns, correlation: Correlation, calls: pa.Table, graphs: Sequence[GraphNotes]
) -> FusedRelations | None:
    if not graphs:
        return None
    last = pc.max(calls["sequence"]).as_py()
    return relate_fused(events, correlation, graphs, first_sequence=0 if last is None else last + 1)


def _steps(window: WindowFacts) -> frozenset[int]:
    """The steps of the window; one that was abandoned is none."""
    return frozenset(b.step for b in window.steps if b.outcome is not StepOutcome.ABANDONED)


def _availability(
    window: WindowFacts, events: EventColumns | None, correlation: Correlation | None
) -> tuple[Availability, str | None]:
    if not window.device_expected or events is None or correlation is None:
        return Availability.UNAVAILABLE, window.unavailable_reason or "no device telemetry was recorded"
    if len(events.records):
        return Availability.RECORDED, None
    if correlation.launching_calls:
        return (
            Availability.UNAVAILABLE,
            f"{correlation.launching_calls} launching calls and not one device record",
        )
    if not correlation.runtime_calls_seen:
        return Availability.UNAVAILABLE, "the trace holds no CUDA runtime call: no device session ran"
    return Availability.EMPTY, None


def _only_steps(calls: pa.Table, steps: tuple[int, ...]) -> pa.Table:
    """A step that was abandoned is no step: its calls stay as rows that belong to none."""
    known = pc.is_in(calls["step"], pa.array(steps, pa.int64()))
    if pc.sum(known).as_py() == len(calls) - calls["step"].null_count:
        return calls
    column = pc.if_else(known, calls["step"], pa.scalar(None, pa.int64()))
    return calls.set_column(calls.schema.get_field_index("step"), ATEN_CALLS.field("step"), column)


def _merge_gaps(gaps: list[Gap], availability: Availability) -> tuple[Gap, ...]:
    """One row a reason, counts added; reasons of launch rows hold only where there are launch rows."""
    merged: dict[GapReason, Gap] = {}
    for gap in gaps:
        if availability is Availability.UNAVAILABLE and gap.reason in LAUNCH_GAPS:
            continue
        before = merged.get(gap.reason)
        merged[gap.reason] = (
            gap
            if before is None
            else replace(
                before, count=before.count + gap.count, evidence=f"{before.evidence}; {gap.evidence}"
            )
        )
    return tuple(merged[reason] for reason in GapReason if reason in merged)


def _manifest(
    window: WindowFacts,
    events: EventColumns | None,
    correlation: Correlation | None,
    *,
    call_source: CallSource,
    availability: tuple[Availability, str | None],
    gaps: tuple[Gap, ...],
    reasons: set[GapReason],
    totals: Totals,
    fused_counts: Mapping[str, int],
) -> Manifest:
    recorded = availability[0] is not Availability.UNAVAILABLE
    audit = correlation.audit if correlation is not None and recorded else None
    numbers = (*totals.counts.values(), *totals.times.values())
    return Manifest(
        schema=SCHEMA,
        schema_version=SCHEMA_VERSION,
        session=window.session,
        source=window.source,
        call_source=call_source,
        availability=availability[0],
        availability_reason=availability[1],
        lower_bound=any(number.bound is not Bound.EXACT for number in numbers),
        lower_bound_reasons=tuple(sorted(reasons)),
        window=Window(
            first_step=window.first_step,
            warmup=window.warmup,
            requested=window.requested,
            steps=tuple(StepRow(step=b.step, outcome=b.outcome) for b in window.steps),
            synchronized=None if window.source is WindowSource.IMPORT else window.synchronized,
        ),
        rank=window.rank,
        world_size=window.world_size,
        recording_ranks=window.recording_ranks,
        global_step=window.global_step,
        counts={name: Number(value=n.value, bound=n.bound) for name, n in totals.counts.items()},
        times={name: Number(value=n.value, bound=n.bound) for name, n in totals.times.items()},
        gaps=tuple(GapRow(reason=g.reason, count=g.count, evidence=g.evidence) for g in gaps),
        notes=_notes(events, correlation, fused_counts),
        audit=AuditRow(
            agreed=audit.agreed if audit else None,
            disagreed=audit.disagreed if audit else None,
            not_audited=audit.not_audited if audit else None,
        ),
        environment=_environment(window.environment, events),
    )


def _notes(
    events: EventColumns | None, correlation: Correlation | None, fused_counts: Mapping[str, int]
) -> dict[str, int]:
    if events is None or correlation is None:
        return {}
    return {
        "empty_transfers": correlation.empty_transfers,
        "launching_calls": correlation.launching_calls,
        **({"renumbered_steps": len(correlation.step_labels)} if events.steps_renumbered else {}),
        **{f"fused_{name}": count for name, count in fused_counts.items()},
    }


def _environment(known: Environment, events: EventColumns | None) -> EnvironmentRow:
    """What the recording side knows, completed from the trace's header."""
    facts = {name: getattr(known, name) for name in EnvironmentRow.__struct_fields__}
    if events is not None:
        header = events.header
        models = {device.name for device in header.device_properties if device.name}
        runtime, cupti = header.cuda_runtime_version, header.cupti_version
        from_header = {
            "cuda": None if runtime is None else f"{runtime // 1000}.{runtime % 1000 // 10}",
            "cupti": None if cupti is None else f"{cupti // 10000}.{cupti % 10000 // 100}.{cupti % 100}",
            "gpu_model": models.pop() if len(models) == 1 else None,
            "gpu_count": len(header.device_properties) or None,
            "world_size": None if header.distributed_info is None else header.distributed_info.world_size,
        }
        facts = {name: from_header.get(name) if value is None else value for name, value in facts.items()}
    return EnvironmentRow(**facts)

"""Turn an annotation into the numbers that are tracked and shown (KernelAnnotation -> metrics, facts, tables)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tlk_tracking.annotation.kernel_annotation import KernelAnnotation, summary_table
from tlk_tracking.annotation.totals import count_totals, relations_of_calls
from tlk_tracking.core.gaps import (
    LOSES_ANYTHING,
    LOSES_ATTRIBUTION,
    LOSES_CALLS,
    LOSES_TIME,
    Bound,
    GapReason,
)
from tlk_tracking.core.records import AttributionStatus, Availability, LaunchKind, Phase, StepOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One tracked number: its name without prefix, what its bound is and which gaps make it one."""

    name: str
    value: float
    bound: Bound
    reasons: tuple[GapReason, ...]


# What each metric loses to which gaps; the order is the order in which they are shown.
METRIC_GAPS: dict[str, frozenset[GapReason]] = {
    "launches": LOSES_ANYTHING,
    "kernels": LOSES_ANYTHING,
    "memcpys": LOSES_ANYTHING,
    "memsets": LOSES_ANYTHING,
    "memcpy_bytes": LOSES_ANYTHING,
    "attributed_launches": LOSES_ATTRIBUTION,
    "aten_calls": LOSES_CALLS,
    "aten_calls_with_launches": LOSES_ATTRIBUTION,
    "device_time_ms": LOSES_TIME,
    "device_busy_ms": LOSES_TIME,
    **{f"launches_{phase.value}": LOSES_ATTRIBUTION for phase in Phase},
    **{f"device_time_ms_{phase.value}": LOSES_ATTRIBUTION | LOSES_TIME for phase in Phase},
    "distinct_kernels": LOSES_ANYTHING,
    "max_launches_per_aten_call": LOSES_ATTRIBUTION,
    "steps_recorded": LOSES_ANYTHING,
}


# These gaps hide a launch's ATen call; its phase may be known all the same.
_PLACED = frozenset({GapReason.GRAPH_REPLAY, GapReason.FOREIGN_THREAD, GapReason.LAUNCHED_OUTSIDE_DISPATCHER})


def metrics(annotation: KernelAnnotation) -> tuple[Metric, ...]:
    """Return the metrics of one annotation, those per step over its complete steps.

    A number that is not known is absent: device metrics without device telemetry, per-step metrics without a
    complete step, phases where no ATen call has one.
    """
    reasons = frozenset(annotation.manifest.lower_bound_reasons)
    values = {"steps_recorded": float(len(annotation.complete_steps))}
    incomplete: set[str] = set()
    complete: set[str] = set()
    if annotation.complete_steps:
        values["aten_calls"] = _calls_per_step(annotation)
        if annotation.manifest.availability is not Availability.UNAVAILABLE:
            values |= _device_values(annotation)
            phases, all_known = _phase_values(annotation)
            values |= phases
            (complete if all_known else incomplete).update(phases)
            if _transfers_without_bytes(annotation):
                incomplete.add("memcpy_bytes")
    found = []
    for name, lossy in METRIC_GAPS.items():
        if name in values:
            present = reasons & (lossy - _PLACED if name in complete else lossy)
            bound = Bound.LOWER if name in incomplete or present else Bound.EXACT
            found.append(Metric(name=name, value=values[name], bound=bound, reasons=tuple(sorted(present))))
    return tuple(found)


def launch_summary(annotation: KernelAnnotation) -> pd.DataFrame:
    """Return the rows of `launch_summary.csv` as a frame: see `launch_summary.summarize_launches`."""
    return summary_table(annotation).to_pandas()


def facts(annotation: KernelAnnotation) -> dict[str, object]:
    """Return what `tlk show --json` prints: counts, times, streams, gaps, audit and the bound of each number."""
    manifest = annotation.manifest
    totals = count_totals(
        calls=annotation.call_table,
        launches=annotation.launch_table,
        relations=annotation.relation_table,
        steps=tuple(row.step for row in manifest.window.steps if row.outcome is not StepOutcome.ABANDONED),
        availability=manifest.availability,
        reasons=frozenset(manifest.lower_bound_reasons),
    )
    counts = {name: number.value for name, number in totals.counts.items()}
    bounds = {name: number.bound.value for name, number in (*totals.counts.items(), *totals.times.items())}
    return {
        "availability": manifest.availability.value,
        "lower_bound": manifest.lower_bound,
        "lower_bound_reasons": [reason.value for reason in manifest.lower_bound_reasons],
        "max_records_per_launch": counts.pop("max_records_per_launch"),
        "counts": counts,
        "by_step": None
        if totals.by_step is None
        else {str(step): launches for step, launches in totals.by_step.items()},
        "streams": None
        if totals.streams is None
        else {str(device): streams for device, streams in totals.streams.items()},
        "device_time_us": totals.times["device_time_us"].value,
        "device_busy_us": totals.times["device_busy_us"].value,
        "gaps": {gap.reason.value: gap.count for gap in manifest.gaps},
        "audit": {
            "agreed": manifest.audit.agreed,
            "disagreed": manifest.audit.disagreed,
            "not_audited": manifest.audit.not_audited,
        },
        "bounds": bounds,
    }


def _complete(annotation: KernelAnnotation, table: pa.Table) -> pa.Table:
    return table.filter(pc.is_in(table["step"], pa.array(annotation.complete_steps, pa.int64())))


def _calls_per_step(annotation: KernelAnnotation) -> float:
    return len(_complete(annotation, annotation.call_table)) / len(annotation.complete_steps)


def _device_values(annotation: KernelAnnotation) -> dict[str, float]:
    steps = annotation.complete_steps
    launches = _complete(annotation, annotation.launch_table)
    relations = relations_of_calls(annotation.relation_table)
    relations = relations.filter(pc.is_in(relations["launch"], launches["launch"].combine_chunks()))
    totals = count_totals(
        calls=_complete(annotation, annotation.call_table),
        launches=launches.set_column(0, "launch", pa.array(np.arange(len(launches)))),
        relations=relations.slice(0, 0),
        steps=steps,
        availability=annotation.manifest.availability,
        reasons=frozenset(),
    )
    per_step = {
        name: float(totals.counts[name].value or 0) / len(steps)
        for name in ("launches", "kernels", "memcpys", "memsets")
    }
    kinds = launches["kind"].cast(pa.string())
    copied = launches.filter(pc.equal(kinds, LaunchKind.MEMCPY.value))["bytes"]
    per_call = np.unique(relations["sequence"].to_numpy(), return_counts=True)[1]
    status = launches["attribution_status"].cast(pa.string())
    kernels = launches.filter(pc.equal(kinds, LaunchKind.KERNEL.value))["launch_name"]
    return per_step | {
        "memcpy_bytes": float(pc.sum(copied).as_py() or 0) / len(steps),
        "attributed_launches": float(
            pc.sum(pc.equal(status, AttributionStatus.ATTRIBUTED.value)).as_py() or 0
        )
        / len(steps),
        "aten_calls_with_launches": len(per_call) / len(steps),
        "device_time_ms": float(totals.times["device_time_us"].value or 0) / 1000 / len(steps),
        "device_busy_ms": float(totals.times["device_busy_us"].value or 0) / 1000 / len(steps),
        "distinct_kernels": float(pc.count_distinct(kernels.cast(pa.string())).as_py()),
        "max_launches_per_aten_call": float(per_call.max()) if len(per_call) else 0.0,
    }


def _phase_values(annotation: KernelAnnotation) -> tuple[dict[str, float], bool]:
    """Return launches and device time by phase, and whether each launch's phase is known."""
    calls, launches = annotation.call_table, annotation.launch_table
    if calls["phase"].null_count == len(calls):
        return {}, True
    phase = launches["phase"]
    inside = pc.is_in(launches["step"], pa.array(annotation.complete_steps, pa.int64())).to_numpy()
    known = np.asarray(pc.is_valid(phase), bool)
    names = np.asarray(phase.to_pylist(), object)
    time_ns: npt.NDArray[np.int64] = np.rint(
        pc.fill_null(launches["duration"], 0.0).to_numpy() * 1000
    ).astype(np.int64)
    time_ns[~launches["time_valid"].to_numpy().astype(bool)] = 0
    steps = len(annotation.complete_steps)
    values: dict[str, float] = {}
    for each in Phase:
        rows = inside & (names == each.value)
        values[f"launches_{each.value}"] = float(rows.sum()) / steps
        values[f"device_time_ms_{each.value}"] = float(time_ns[rows].sum()) / 1e6 / steps
    return values, not (inside & ~known).any()


def _transfers_without_bytes(annotation: KernelAnnotation) -> bool:
    launches = _complete(annotation, annotation.launch_table)
    copies = pc.equal(launches["kind"].cast(pa.string()), LaunchKind.MEMCPY.value)
    return bool(launches.filter(copies)["bytes"].null_count)

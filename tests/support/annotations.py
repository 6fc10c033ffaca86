"""Annotations for tests, made of real ones: their steps repeated, their rows changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from paths import DATA

from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.annotation.manifest import GapRow, Number, StepRow
from tlk_tracking.annotation.totals import count_totals
from tlk_tracking.attribution.annotate import import_trace
from tlk_tracking.core.gaps import GapReason
from tlk_tracking.core.records import Availability, StepOutcome


@cache
def real(name: str) -> KernelAnnotation:
    """Return the annotation of one of the real traces in tests/data."""
    return import_trace(DATA / f"{name}.trace.json.gz", ops=DATA / f"{name}.ops.json")


def repeated(
    annotation: KernelAnnotation,
    *,
    steps: int,
    noise: float = 0.0,
    seed: int = 0,
    session: str | None = None,
    first_step: int = 100,
) -> KernelAnnotation:
    """Return a window whose steps are all the annotation's first one, device times spread by a log-normal noise."""
    source = annotation.complete_steps[0]
    calls = annotation.call_table.filter(pc.equal(annotation.call_table["step"], source))
    launches = annotation.launch_table.filter(pc.equal(annotation.launch_table["step"], source))
    place = np.full(len(annotation.launch_table), -1)
    place[launches["launch"].to_numpy()] = np.arange(len(launches))
    rank = {sequence: row for row, sequence in enumerate(calls["sequence"].to_pylist())}
    pairs = [
        (rank[sequence], int(place[launch]))
        for sequence, launch in zip(
            annotation.relation_table["sequence"].to_pylist(),
            annotation.relation_table["launch"].to_pylist(),
            strict=True,
        )
        if sequence in rank and place[launch] >= 0
    ]
    generator = np.random.default_rng(seed)
    length_ns = int(pc.max(launches["start_ns"]).as_py()) + 10_000_000 if len(launches) else 1
    parts = range(steps)
    call_table = pa.concat_tables(
        _set(
            calls,
            sequence=np.arange(len(calls)) + part * len(calls),
            step=np.full(len(calls), first_step + part),
        )
        for part in parts
    )
    launch_table = pa.concat_tables(
        _set(
            launches,
            launch=np.arange(len(launches)) + part * len(launches),
            step=np.full(len(launches), first_step + part),
            start_ns=launches["start_ns"].to_numpy() + part * length_ns,
            duration=np.round(
                launches["duration"].to_numpy() * generator.lognormal(sigma=noise, size=len(launches)), 3
            ),
        )
        for part in parts
    )
    relation_table = pa.table(
        {
            "sequence": [call + part * len(calls) for part in parts for call, _ in pairs],
            "launch": [launch + part * len(launches) for part in parts for _, launch in pairs],
            "origin": pa.array(["dispatch"] * len(pairs) * steps).dictionary_encode(),
        },
        schema=annotation.relation_table.schema,
    )
    window = msgspec.structs.replace(
        annotation.manifest.window,
        first_step=first_step,
        requested=steps,
        steps=tuple(StepRow(step=first_step + part, outcome=StepOutcome.COMPLETE) for part in parts),
    )
    manifest = msgspec.structs.replace(
        annotation.manifest, window=window, session=session or f"{seed + first_step * 1000:08x}"
    )
    return with_tables(
        KernelAnnotation(
            manifest=manifest,
            call_table=call_table.unify_dictionaries().combine_chunks(),
            launch_table=launch_table.unify_dictionaries().combine_chunks(),
            relation_table=relation_table,
        )
    )


def with_tables(
    annotation: KernelAnnotation,
    *,
    calls: pa.Table | None = None,
    launches: pa.Table | None = None,
    relations: pa.Table | None = None,
) -> KernelAnnotation:
    """Return the annotation with other tables and the counts that follow from them."""
    changed = KernelAnnotation(
        manifest=annotation.manifest,
        call_table=annotation.call_table if calls is None else calls,
        launch_table=annotation.launch_table if launches is None else launches,
        relation_table=annotation.relation_table if relations is None else relations,
    )
    return _recounted(changed)


def with_gap(annotation: KernelAnnotation, *reasons: GapReason) -> KernelAnnotation:
    """Return the annotation as if its window had had these gaps."""
    gaps = tuple(GapRow(reason=reason, count=1, evidence="made for a test") for reason in reasons)
    manifest = msgspec.structs.replace(
        annotation.manifest,
        gaps=(*annotation.manifest.gaps, *gaps),
        lower_bound=True,
        lower_bound_reasons=tuple(sorted({*annotation.manifest.lower_bound_reasons, *reasons})),
    )
    return _recounted(_with_manifest(annotation, manifest))


def with_environment(annotation: KernelAnnotation, **facts: object) -> KernelAnnotation:
    """Return the annotation with other circumstances."""
    environment = msgspec.structs.replace(annotation.manifest.environment, **facts)
    return _with_manifest(annotation, msgspec.structs.replace(annotation.manifest, environment=environment))


def with_manifest(annotation: KernelAnnotation, **fields: object) -> KernelAnnotation:
    """Return the annotation with other fields of the manifest."""
    return _with_manifest(annotation, msgspec.structs.replace(annotation.manifest, **fields))


def with_durations(
    annotation: KernelAnnotation, slower: Callable[[dict[str, object]], float]
) -> KernelAnnotation:
    """Return the annotation with each launch's duration multiplied by what `slower` says of its row."""
    rows = annotation.launch_table.to_pylist()
    durations = [round(row["duration"] * slower(row), 3) for row in rows]
    return with_tables(annotation, launches=_set(annotation.launch_table, duration=np.array(durations)))


def _with_manifest(annotation: KernelAnnotation, manifest: object) -> KernelAnnotation:
    return KernelAnnotation(
        manifest=manifest,  # type: ignore[arg-type]  # msgspec's replace is untyped
        call_table=annotation.call_table,
        launch_table=annotation.launch_table,
        relation_table=annotation.relation_table,
    )


def _recounted(annotation: KernelAnnotation) -> KernelAnnotation:
    totals = count_totals(
        calls=annotation.call_table,
        launches=annotation.launch_table,
        relations=annotation.relation_table,
        steps=annotation.complete_steps,
        availability=Availability(annotation.manifest.availability),
        reasons=frozenset(annotation.manifest.lower_bound_reasons),
    )
    audit, launches = annotation.manifest.audit, len(annotation.launch_table)
    if audit.disagreed is not None:
        audit = msgspec.structs.replace(audit, agreed=launches - audit.disagreed, not_audited=0)
    return with_manifest(
        annotation,
        audit=audit,
        counts={name: Number(value=n.value, bound=n.bound) for name, n in totals.counts.items()},
        times={name: Number(value=n.value, bound=n.bound) for name, n in totals.times.items()},
    )


def _set(table: pa.Table, **columns: np.ndarray) -> pa.Table:
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        field = table.schema.field(name)
        table = table.set_column(place, field, pa.array(values, field.type))
    return table

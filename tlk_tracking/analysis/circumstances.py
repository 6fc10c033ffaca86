"""Say under which circumstances experiments were recorded, and where those differ (annotations -> facts)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tlk_tracking.analysis.step_counts import known_call_keys
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.core.records import CallSource, LaunchKind

# What decides most about whether numbers can be compared comes first.
_ENVIRONMENT = ("gpu_model", "gpu_count", "driver", "cuda", "cupti", "torch", "precision", "strategy")
_VERSIONS = ("lightning", "python", "mlflow", "tlk_tracking", "os_family")

Fact = str | int | bool | None | list["Fact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextDifference:
    """One circumstance that is not the same on both sides; a list where a side's own windows differ."""

    field: str
    baseline: Fact
    candidate: Fact


def describe_context(annotations: Sequence[KernelAnnotation]) -> dict[str, Fact]:
    """Return the circumstances of one side, in the order of their weight; None is unknown."""
    facts = [_facts(annotation) for annotation in annotations]
    return {name: _common(fact[name] for fact in facts) for name in facts[0]}


def differences(baseline: Mapping[str, Fact], candidate: Mapping[str, Fact]) -> tuple[ContextDifference, ...]:
    """Return the circumstances that differ; unknown differs from known."""
    return tuple(
        ContextDifference(field=name, baseline=baseline[name], candidate=candidate[name])
        for name in baseline
        if baseline[name] != candidate[name]
    )


def why_times_cannot_be_compared(baseline: Mapping[str, Fact], candidate: Mapping[str, Fact]) -> str | None:
    """Return the reason when the GPU models are not one and the same, else None."""
    before, after = baseline["gpu_model"], candidate["gpu_model"]
    if before == after and not isinstance(before, list):
        return None
    return f"times of different GPU models: {_show(before)} and {_show(after)}"


def why_calls_cannot_be_compared(baseline: Mapping[str, Fact], candidate: Mapping[str, Fact]) -> str | None:
    """Return the reason when rows of `aten_calls` are not the same kind of thing on both sides, else None."""
    before, after = baseline["call_source"], candidate["call_source"]
    if before != after and CallSource.HOST_OPS.value in (*_listed(before), *_listed(after)):
        return f"ATen calls from different sources: {_show(before)} and {_show(after)}"
    return None


def _facts(annotation: KernelAnnotation) -> dict[str, Fact]:
    manifest = annotation.manifest
    known = known_call_keys(annotation)
    environment = manifest.environment
    return {
        **{name: getattr(environment, name) for name in _ENVIRONMENT},
        "world_size": environment.world_size or manifest.world_size,
        "compiled": environment.compiled,
        "batch_shapes": _host_inputs(annotation) if "inputs" in known else None,
        "availability": manifest.availability.value,
        "gaps": [gap.reason.value for gap in sorted(manifest.gaps, key=lambda gap: gap.reason)],
        "rank": manifest.rank,
        "source": manifest.source.value,
        "call_source": manifest.call_source.value,
        "synchronized": manifest.window.synchronized,
        "phase_known": "phase" in known,
        "module_known": "module" in known,
        "operator_known": "operator" in known,
        "inputs_known": "inputs" in known,
        **{name: getattr(environment, name) for name in _VERSIONS},
    }


def _host_inputs(annotation: KernelAnnotation) -> list[Fact]:
    """Return shape and dtype of the host tensors in the calls that copied memory: the batch, mostly."""
    launches, relations, calls = (
        annotation.launch_table,
        annotation.relation_table,
        annotation.call_table,
    )
    copies = pc.equal(launches["kind"].cast(pa.string()), LaunchKind.MEMCPY.value)
    copying = relations.filter(pc.take(pc.fill_null(copies, False), relations["launch"]))["sequence"]
    rows = np.searchsorted(calls["sequence"].to_numpy(), copying.to_numpy())
    texts = pc.unique(calls["inputs"].cast(pa.string()).take(pa.array(rows))).drop_null().to_pylist()
    tensors = {
        f"{dtype}{json.dumps(shape, separators=(',', ':'))}"
        for text in texts
        for shape, dtype, device in json.loads(text)
        if device == "cpu"
    }
    return [*sorted(tensors)]


def _common(values: Iterable[Fact]) -> Fact:
    """Return the value that all windows of a side share, or the list of all that it has."""
    distinct: list[Fact] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct[0] if len(distinct) == 1 else distinct


def _listed(value: Fact) -> list[Fact]:
    return value if isinstance(value, list) else [value]


def _show(value: Fact) -> str:
    return " and ".join("unknown" if one is None else str(one) for one in _listed(value))

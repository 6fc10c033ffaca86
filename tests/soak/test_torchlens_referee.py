"""An independent referee: torchlens validates our annotation as its own payload, and finds the same relations."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tlk_tracking import KernelAnnotation, import_trace

pytest.importorskip("torchlens", reason="torchlens is only in the environment of scripts/referee")
from paths import DATA
from torchlens._io.forgery_validation import _validate_kernel_telemetry
from torchlens.kernel_telemetry import _payload_from_events, _TelemetryPayload
from torchlens.observability._kineto import NormalizedEvent, _normalize_chrome_event

TRACES = sorted(path.name.removesuffix(".ops.json") for path in DATA.glob("*.ops.json"))

# (ATen call, runtime correlation, launch name, µs)
Related = Counter[tuple[int, int, str, float]]


def payload_of(annotation: KernelAnnotation) -> dict[str, Any]:
    """Return the annotation in the shape of torchlens' own: a mapping of three fields."""
    launches = [
        {
            "launch_name": launch.launch_name,
            "device": None if launch.device is None else str(launch.device),
            "stream": launch.stream,
            "duration": launch.duration,
            "runtime_correlation": launch.runtime_correlation,
            "attribution_status": launch.attribution_status.value,
        }
        for launch in annotation.iter_launches()
    ]
    pairs = annotation.relation_table.select(["sequence", "launch"]).to_pylist()
    return {
        "_available": annotation.manifest.availability != "unavailable",
        "_launches": launches,
        "_relations": [(pair["sequence"], pair["launch"]) for pair in pairs],
    }


def validate(annotation: KernelAnnotation) -> None:
    """Have torchlens refuse a payload that breaks its rules."""
    calls = [SimpleNamespace(sequence=number) for number in annotation.call_table["sequence"].to_pylist()]
    trace = SimpleNamespace(
        annotations={"_kernel_telemetry": payload_of(annotation)},
        _primitive_op_profile=SimpleNamespace(primitive_ops=calls),
    )
    _validate_kernel_telemetry(trace)


def torchlens_payload(trace: Path) -> _TelemetryPayload:
    """Have torchlens relate the events of a trace, our markers standing in for its own."""
    events: list[NormalizedEvent] = []
    sequences: dict[str, int] = {}
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        normalized = _normalize_chrome_event(event) if event.get("ph") == "X" else None
        if normalized is None:
            continue
        parts = normalized.name.split("::")
        if parts[0] == "tlk" and parts[2] == "op":
            sequences[normalized.name] = int(parts[3])
            normalized = replace(normalized, is_user_annotation=True)
        events.append(normalized)
    return _payload_from_events(events, sequences, telemetry_available=True)


def related(launches: list[dict[str, Any]], relations: list[tuple[int, int]]) -> Related:
    return Counter(
        (
            sequence,
            launches[launch]["runtime_correlation"],
            launches[launch]["launch_name"],
            round(launches[launch]["duration"], 2),
        )
        for sequence, launch in relations
    )


@pytest.mark.parametrize("name", TRACES)
def test_torchlens_accepts_the_annotation_as_its_own(name: str) -> None:
    validate(import_trace(DATA / f"{name}.trace.json.gz", ops=DATA / f"{name}.ops.json"))


@pytest.mark.parametrize("name", TRACES)
def test_torchlens_relates_the_same_launches_to_the_same_calls(name: str) -> None:
    annotation = import_trace(DATA / f"{name}.trace.json.gz", ops=DATA / f"{name}.ops.json")
    ours = payload_of(annotation)
    theirs = torchlens_payload(DATA / f"{name}.trace.json.gz")
    launches = [
        {field: getattr(launch, field) for field in ("runtime_correlation", "launch_name", "duration")}
        for launch in theirs._launches
    ]
    assert related(ours["_launches"], ours["_relations"]) == related(launches, list(theirs._relations))
    assert Counter(launch["attribution_status"] for launch in ours["_launches"]) == Counter(
        launch.attribution_status for launch in theirs._launches
    )


def test_torchlens_refuses_a_relation_to_no_call() -> None:
    annotation = import_trace(
        DATA / "raises_in_backward.trace.json.gz", ops=DATA / "raises_in_backward.ops.json"
    )
    with pytest.raises(Exception, match="primitive profile row"):
        validate(replace(annotation, call_table=annotation.call_table.slice(0, 0)))

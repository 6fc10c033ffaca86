from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_traces import RealTrace, real_trace, real_traces
from synthetic_trace import BACKWARD, MAIN, SESSION, WINDOW, SyntheticTrace, one_step, ops_json, table_of

from tlk_tracking.analysis.metrics import facts, metrics
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.annotation.schemas import ATEN_CALLS
from tlk_tracking.attribution.annotate import annotate, import_trace
from tlk_tracking.core.errors import TraceError
from tlk_tracking.core.gaps import Gap, GapReason
from tlk_tracking.core.records import Environment, StepBracket, StepOutcome


def _measured(annotation: KernelAnnotation, real: RealTrace) -> dict[str, Any]:
    """Return what was measured in the shape of an expected.json, without its notes."""
    said = facts(annotation)
    counts, launches = said["counts"], annotation.launches
    inside = launches[launches["step"].notna()]
    return {
        "op_markers": int(annotation.manifest.counts["aten_calls"].value or 0),
        "step_markers": len(said["by_step"]),
        "records": len(launches),
        "in_window": counts["launches"],
        "by_kind": {kind: count for kind, count in inside["kind"].value_counts().items() if count},
        "by_status": {s: n for s, n in inside["attribution_status"].value_counts().items() if n},
        "by_step": said["by_step"],
        "streams": sorted({stream for streams in said["streams"].values() for stream in streams}),
        "device_time_us": said["device_time_us"],
        "max_records_per_launch": said["max_records_per_launch"],
        "ops_with_launches": counts["aten_calls_with_launches"],
        "relations": counts["relations"],
        "gaps": said["gaps"],
    }


@pytest.mark.parametrize("real", real_traces(), ids=str)
def test_every_fact_of_a_real_trace_is_found(real: RealTrace) -> None:
    expected = {k: v for k, v in real.facts().items() if k not in ("raised", "note", "relation_pairs")}
    assert _measured(import_trace(real.trace, ops=real.ops), real) == expected


@pytest.mark.parametrize("real", [r for r in real_traces() if "relation_pairs" in r.facts()], ids=str)
def test_every_relation_of_a_real_trace_is_found(real: RealTrace) -> None:
    annotation = import_trace(real.trace, ops=real.ops)
    pairs = annotation.relations.merge(annotation.launches, on="launch")
    pairs = pairs[pairs["step"].notna()]
    found = sorted(zip(pairs["sequence"].tolist(), pairs["runtime_correlation"].tolist(), strict=True))
    assert found == sorted(map(tuple, real.facts()["relation_pairs"]))


@pytest.mark.parametrize("real", real_traces(), ids=str)
def test_kinetos_own_link_agrees_on_every_real_trace(real: RealTrace) -> None:
    assert facts(import_trace(real.trace, ops=real.ops))["audit"]["disagreed"] == 0


def test_the_two_ranks_of_a_run_keep_apart(tmp_path: Path) -> None:
    """T16: the ranks' correlation numbers are the same; rank and world size come from the trace."""
    ranks = [import_trace(real_trace(name).trace) for name in ("ddp_rank0", "ddp_rank1")]
    assert set(ranks[0].launches["runtime_correlation"]) & set(ranks[1].launches["runtime_correlation"])
    assert [(a.manifest.rank, a.manifest.world_size) for a in ranks] == [(0, 2), (1, 2)]
    for each in ranks:
        each.save(tmp_path / each.folder_name)
    assert sorted(p.name for p in tmp_path.glob("window_*/*")) == ["rank_0", "rank_1"]


def test_an_import_says_what_the_header_knows_of_the_machine() -> None:
    real = real_trace("multi_stream_memcpy")
    environment = import_trace(real.trace, ops=real.ops).manifest.environment
    known = {n: v for n in environment.__struct_fields__ if (v := getattr(environment, n)) is not None}
    assert known == {
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "cupti": "13.0.1",
        "gpu_model": "NVIDIA H200",
        "gpu_count": 1,
    }


def test_rows_of_the_ops_file_get_step_and_thread_from_their_markers(tmp_path: Path) -> None:
    ops = tmp_path / "ops.json"
    ops.write_text(
        ops_json(
            [
                {"sequence": 1, "operator": "aten.add.Tensor", "phase": "backward", "outcome": "raised"},
                {"sequence": 0, "operator": "aten.mm.default", "inputs": [[[2, 3], "float32", "cuda:0"]]},
            ]
        )
    )
    annotation = import_trace(one_step().write(tmp_path), ops=ops)
    assert annotation.call_table.drop_columns(["module", "module_call"]).to_pylist() == [
        {
            "sequence": 0, "step": 5, "phase": None, "operator": "aten.mm", "overload": "default",
            "inputs": '[[[2,3],"float32","cuda:0"]]', "thread": MAIN, "outcome": None,
        },
        {
            "sequence": 1, "step": 5, "phase": "backward", "operator": "aten.add", "overload": "Tensor",
            "inputs": None, "thread": BACKWARD, "outcome": "raised",
        },
    ]  # fmt: skip


def test_every_row_of_the_ops_file_is_kept_and_one_without_a_marker_truncates_the_window(
    tmp_path: Path,
) -> None:
    ops = tmp_path / "ops.json"
    operators = ["aten.mm.default", "aten.add.Tensor", "profiler._record_function_enter_new.default"]
    ops.write_text(ops_json([{"sequence": n, "operator": name} for n, name in enumerate(operators)]))
    annotation = import_trace(one_step().write(tmp_path), ops=ops)
    assert annotation.call_table["operator"].to_pylist() == [n.rsplit(".", 1)[0] for n in operators]
    assert facts(annotation)["gaps"] == {"window_truncated": 1}


def test_a_marker_without_a_row_is_a_call_of_unknown_operator(tmp_path: Path) -> None:
    ops = tmp_path / "ops.json"
    ops.write_text(ops_json([{"sequence": 1, "operator": "aten.add.Tensor"}]))
    annotation = import_trace(one_step().write(tmp_path), ops=ops)
    rows = annotation.call_table.select(["sequence", "step", "operator"]).to_pylist()
    assert rows == [
        {"sequence": 0, "step": 5, "operator": None},
        {"sequence": 1, "step": 5, "operator": "aten.add"},
    ]


def test_marked_calls_without_an_ops_file_are_rows_of_unknown_operator(tmp_path: Path) -> None:
    annotation = import_trace(one_step().write(tmp_path))
    assert annotation.manifest.call_source == "markers_only"
    assert annotation.call_table["operator"].null_count == 2
    assert facts(annotation)["counts"]["aten_calls"] == 2


@pytest.mark.parametrize("session", ["0123abcd", "ffffffff"])
def test_an_ops_file_chooses_its_session_among_several(tmp_path: Path, session: str) -> None:
    trace = one_step()
    trace.step(9, 2000, 3000, session="ffffffff")
    trace.op(0, 2100, 2200, session="ffffffff")
    trace.launch(13, 2120)
    ops = tmp_path / "ops.json"
    ops.write_text(ops_json([{"sequence": 0, "operator": "aten.mm.default"}], session=session))
    annotation = import_trace(trace.write(tmp_path), ops=ops)
    assert annotation.manifest.session == session
    assert facts(annotation)["by_step"] == ({"5": 2} if session == SESSION else {"9": 1})


def test_an_ops_file_of_another_trace_is_refused(tmp_path: Path) -> None:
    ops = tmp_path / "ops.json"
    ops.write_text(ops_json([], session="ffffffff"))
    with pytest.raises(TraceError, match="no marker of session ffffffff"):
        import_trace(one_step().write(tmp_path), ops=ops)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("{", "cannot read the ops file"),
        ("[]", "cannot read the ops file"),
        (ops_json([{"sequence": 0}]), "operator"),
        (ops_json([{"sequence": -1, "operator": "aten.mm.default"}]), "sequence"),
        (ops_json([{"sequence": 0, "operator": "a.b.c", "phase": "sideways"}]), "phase"),
        (ops_json([{"sequence": 0, "operator": "a.b.c"}] * 2), "two rows with sequence 0"),
        (ops_json([], session="short"), "session"),
    ],
)
def test_a_damaged_ops_file_is_refused(tmp_path: Path, body: str, complaint: str) -> None:
    ops = tmp_path / "ops.json"
    ops.write_text(body)
    with pytest.raises(TraceError, match=complaint):
        import_trace(one_step().write(tmp_path), ops=ops)


# What a trace without markers gives


def _plain_trace() -> SyntheticTrace:
    trace = SyntheticTrace()
    trace.host("aten::linear", 100, 400)
    trace.host("aten::addmm", 150, 300)
    trace.launch(11, 200)
    trace.host("aten::view", 320, 330)
    trace.host("aten::relu", 500, 600)
    return trace


def test_a_trace_without_markers_has_its_innermost_host_ops_as_rows(tmp_path: Path) -> None:
    annotation = import_trace(_plain_trace().write(tmp_path))
    assert annotation.manifest.call_source == "host_ops"
    assert annotation.call_table["operator"].to_pylist() == ["aten::addmm", "aten::view", "aten::relu"]
    assert annotation.relation_table.select(["sequence", "launch"]).to_pylist() == [
        {"sequence": 0, "launch": 0}
    ]
    assert facts(annotation)["by_step"] == {"0": 1}


def test_a_host_op_that_launches_beside_its_children_is_a_row_too(tmp_path: Path) -> None:
    trace = _plain_trace()
    trace.launch(12, 350)  # in aten::linear itself, after its children
    annotation = import_trace(trace.write(tmp_path))
    assert annotation.call_table["operator"].to_pylist() == [
        "aten::linear",
        "aten::addmm",
        "aten::view",
        "aten::relu",
    ]
    assert facts(annotation)["counts"]["attributed"] == 2


def test_profiler_steps_serve_where_there_are_no_brackets(tmp_path: Path) -> None:
    trace = _plain_trace()
    trace.host("ProfilerStep#7", 50, 350, cat="user_annotation")
    trace.host("ProfilerStep#8", 350, 700, cat="user_annotation")
    trace.launch(12, 550)
    annotation = import_trace(trace.write(tmp_path))
    assert facts(annotation)["by_step"] == {"7": 1, "8": 1}
    assert annotation.manifest.window.first_step == 7


def test_step_brackets_go_before_profiler_steps(tmp_path: Path) -> None:
    trace = one_step()
    trace.host("ProfilerStep#77", 0, 1000, cat="user_annotation")
    assert facts(import_trace(trace.write(tmp_path)))["by_step"] == {"5": 2}


def test_without_any_bracket_the_whole_trace_is_step_0(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.op(0, 100, 200)
    trace.launch(11, 120)
    assert facts(import_trace(trace.write(tmp_path)))["by_step"] == {"0": 1}


# Availability


def test_a_trace_of_a_cpu_run_is_unavailable(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.op(0, 100, 200)
    annotation = import_trace(trace.write(tmp_path))
    assert _unavailable(annotation) == (
        "the trace holds no CUDA runtime call: no device session ran",
        {"aten_calls": (1.0, "lower", ("no_device_evidence",)), "steps_recorded": (1.0, "lower")},
    )


def test_launching_calls_without_a_single_record_are_unavailable_with_that_evidence(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.call(11, 100)
    trace.call(12, 200)
    annotation = import_trace(trace.write(tmp_path))
    assert annotation.manifest.availability_reason == "2 launching calls and not one device record"
    assert annotation.manifest.availability == "unavailable"


def test_unavailable_is_one_row_without_a_fact_and_in_no_count(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.op(0, 100, 200)
    annotation = import_trace(trace.write(tmp_path))
    row = annotation.launch_table.to_pylist()
    assert row == [dict.fromkeys(row[0]) | {"launch": 0, "attribution_status": "unavailable"}]
    said = facts(annotation)
    assert {name: n for name, n in said["counts"].items() if n is not None} == {"aten_calls": 1}
    assert [said[n] for n in ("by_step", "streams", "device_time_us", "device_busy_us")] == [None] * 4
    assert said["audit"] == {"agreed": None, "disagreed": None, "not_audited": None}
    assert said["lower_bound_reasons"] == ["no_device_evidence"]
    assert {n for n, bound in said["bounds"].items() if bound != "unknown"} == {"aten_calls"}


def test_a_session_that_saw_nothing_is_empty_and_its_zeros_are_true(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.op(0, 100, 200)
    trace.call(None, 300, name="cudaDeviceSynchronize")
    said = facts(import_trace(trace.write(tmp_path)))
    assert (said["availability"], said["lower_bound"], said["gaps"]) == ("empty", False, {})
    assert said["counts"] == dict.fromkeys(said["counts"], 0) | {"aten_calls": 1}
    assert (said["by_step"], said["streams"], said["device_time_us"]) == ({"5": 0}, {}, 0)
    assert set(said["bounds"].values()) == {"exact"}


def test_calls_into_a_capture_launch_nothing_so_such_a_window_is_empty(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.call(1, 100, name="cudaStreamBeginCapture")
    trace.call(11, 200)
    trace.call(2, 300, name="cudaStreamEndCapture")
    assert facts(import_trace(trace.write(tmp_path)))["availability"] == "empty"


# Live windows


def test_a_live_window_keeps_what_the_recording_side_says(tmp_path: Path) -> None:
    window = replace(
        WINDOW,
        warmup=2,
        requested=3,
        steps=(StepBracket(step=5, outcome=StepOutcome.RAISED),),
        synchronized=False,
        rank=1,
        world_size=4,
        global_step=77,
        gaps=(Gap(reason=GapReason.CAPTURE_RAISED, count=1, evidence="ValueError"),),
        environment=Environment(torch="2.13.0", precision="16-mixed"),
    )
    calls = table_of(
        ATEN_CALLS, {"sequence": 0, "step": 5, "operator": "aten.mm"}, {"sequence": 1, "step": 5}
    )
    annotation = annotate(one_step().write(tmp_path), window, calls=calls)
    manifest = annotation.manifest
    assert (manifest.rank, manifest.world_size, manifest.global_step) == (1, 4, 77)
    assert (manifest.window.warmup, manifest.window.requested, manifest.window.synchronized) == (2, 3, False)
    assert (manifest.environment.torch, manifest.environment.precision) == ("2.13.0", "16-mixed")
    assert facts(annotation)["gaps"] == {"capture_raised": 1}
    assert facts(annotation)["by_step"] == {"5": 2}
    assert annotation.complete_steps == ()


def test_an_abandoned_step_is_no_step_and_in_no_total(tmp_path: Path) -> None:
    trace = one_step()
    trace.step(6, 1000, 2000)
    trace.op(2, 1100, 1200)
    trace.launch(13, 1120)
    steps = (*WINDOW.steps, StepBracket(step=6, outcome=StepOutcome.ABANDONED))
    window = replace(WINDOW, requested=2, steps=steps)
    calls = table_of(ATEN_CALLS, *({"sequence": n, "step": 6 if n == 2 else 5} for n in range(3)))
    annotation = annotate(trace.write(tmp_path), window, calls=calls)
    said = facts(annotation)
    assert (said["by_step"], said["counts"]["outside_steps"]) == ({"5": 2}, 1)
    assert (said["counts"]["aten_calls"], said["counts"]["relations"]) == (2, 2)
    assert annotation.launches["step"].isna().sum() == 1
    annotation.save(tmp_path / "saved")


def test_a_step_whose_bracket_is_not_in_the_trace_truncates_the_window(tmp_path: Path) -> None:
    """Torch's own `ProfilerStep#N` does not stand in for it: its numbers are not the Trainer's."""
    trace = SyntheticTrace()
    trace.op(0, 100, 200)
    trace.launch(11, 120)
    trace.host("ProfilerStep#5", 0, 1000, cat="user_annotation")
    annotation = annotate(trace.write(tmp_path), WINDOW, calls=table_of(ATEN_CALLS, {"sequence": 0}))
    said = facts(annotation)
    assert said["gaps"] == {"window_truncated": 1}
    assert (said["by_step"], said["counts"]["outside_steps"]) == ({"5": 0}, 1)


def test_a_bracket_of_a_step_that_the_window_does_not_know_is_none(tmp_path: Path) -> None:
    trace = one_step()
    trace.step(9, 1000, 2000)
    trace.launch(13, 1120)
    annotation = annotate(trace.write(tmp_path), WINDOW, calls=None)
    assert facts(annotation)["by_step"] == {"5": 2}
    assert facts(annotation)["counts"]["outside_steps"] == 1


def test_gaps_of_one_reason_are_added_and_both_pieces_of_evidence_are_kept(tmp_path: Path) -> None:
    truncated = Gap(reason=GapReason.WINDOW_TRUNCATED, count=1, evidence="1 of 2 steps")
    window = replace(WINDOW, requested=2, gaps=(truncated,))
    calls = table_of(ATEN_CALLS, {"sequence": 0}, {"sequence": 1}, {"sequence": 2})
    gaps = annotate(one_step().write(tmp_path), window, calls=calls).manifest.gaps
    assert [(gap.reason.value, gap.count, gap.evidence) for gap in gaps] == [
        (
            "window_truncated",
            2,
            "1 of 2 steps; ATen calls that the dispatch mode saw and whose range is not in the trace",
        )
    ]


def test_a_window_without_cuda_is_unavailable_whatever_its_trace_holds(tmp_path: Path) -> None:
    window = replace(WINDOW, device_expected=False, unavailable_reason="no CUDA")
    annotation = annotate(
        one_step().write(tmp_path), window, calls=table_of(ATEN_CALLS, {"sequence": 0, "step": 5})
    )
    assert _unavailable(annotation)[0] == "no CUDA"
    assert facts(annotation)["gaps"] == {}


def test_a_window_without_a_trace_keeps_its_calls(tmp_path: Path) -> None:
    annotation = annotate(None, WINDOW, calls=table_of(ATEN_CALLS, {"sequence": 0, "step": 5}))
    assert _unavailable(annotation) == (
        "no device telemetry was recorded",
        {"aten_calls": (1.0, "lower", ("no_device_evidence",)), "steps_recorded": (1.0, "lower")},
    )


def _unavailable(annotation: KernelAnnotation) -> tuple[str | None, dict[str, Any]]:
    assert annotation.manifest.availability == "unavailable"
    return annotation.manifest.availability_reason, {
        m.name: (m.value, m.bound.value)
        if m.name == "steps_recorded"
        else (m.value, m.bound.value, m.reasons)
        for m in metrics(annotation)
    }

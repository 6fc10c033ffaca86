from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_traces import RealTrace, real_trace, real_traces
from synthetic_trace import BACKWARD, WINDOW, SyntheticTrace, one_step, ops_json

from tlk_tracking.analysis.metrics import METRIC_GAPS, facts, launch_summary, metrics
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation, summary_table
from tlk_tracking.annotation.launch_summary import encode_summary
from tlk_tracking.attribution.annotate import annotate, import_trace
from tlk_tracking.core.records import Phase, StepBracket, StepOutcome
from tlk_tracking.core.text import csv_cell, short_kernel, visible

FACTS = {
    "availability", "lower_bound", "lower_bound_reasons", "counts", "by_step", "streams", "device_time_us",
    "device_busy_us", "max_records_per_launch", "gaps", "audit", "bounds",
}  # fmt: skip
COUNTS = {
    "aten_calls", "aten_calls_with_launches", "launches", "kernels", "memcpys", "memsets", "attributed",
    "unattributed", "outside_steps", "relations",
}  # fmt: skip


def _phased(folder: Path, trace: SyntheticTrace, **phases: str) -> KernelAnnotation:
    """Import a trace whose calls have phases: `call_0="forward"`."""
    rows = [
        {
            "sequence": int(name.removeprefix("call_")),
            "operator": f"aten.op{name[5:]}.default",
            "phase": phase,
        }
        for name, phase in phases.items()
    ]
    ops = folder / "ops.json"
    ops.write_text(ops_json(rows, session=trace.session))
    return import_trace(trace.write(folder), ops=ops)


def _values(annotation: KernelAnnotation) -> dict[str, tuple[float, str, tuple[str, ...]]]:
    return {m.name: (m.value, m.bound.value, tuple(m.reasons)) for m in metrics(annotation)}


# Facts


@pytest.mark.parametrize("real", real_traces(), ids=str)
def test_the_facts_have_the_keys_of_the_contract_and_nothing_else(real: RealTrace) -> None:
    said: dict[str, Any] = facts(import_trace(real.trace, ops=real.ops))
    assert set(said) == FACTS
    assert set(said["counts"]) == COUNTS
    assert set(said["audit"]) == {"agreed", "disagreed", "not_audited"}
    assert set(said["bounds"]) == COUNTS | {"max_records_per_launch", "device_time_us", "device_busy_us"}
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert all(count > 0 for count in said["gaps"].values())


# Metrics


def test_metrics_are_per_complete_step(tmp_path: Path) -> None:
    trace = one_step()  # step 5: two launches of 5 µs on two threads
    trace.step(6, 1000, 2000)
    trace.op(2, 1100, 1200)
    trace.launch(13, 1120, name="kernel_b")
    trace.call(14, 1130, name="cudaMemcpyAsync")
    trace.record(14, 1145, duration=2, cat="gpu_memcpy", bytes=300)
    trace.launch(15, 3000)  # in no step
    annotation = _phased(tmp_path, trace, call_0="forward", call_1="backward", call_2="forward")
    assert {name: value for name, (value, _, _) in _values(annotation).items()} == {
        "launches": 2, "kernels": 1.5, "memcpys": 0.5, "memsets": 0, "memcpy_bytes": 150,
        "attributed_launches": 2, "aten_calls": 1.5, "aten_calls_with_launches": 1.5,
        "device_time_ms": 0.0085, "device_busy_ms": 0.0085,
        "launches_before_batch": 0, "launches_forward": 1.5, "launches_backward": 0.5,
        "launches_optimizer": 0, "launches_other": 0,
        "device_time_ms_before_batch": 0, "device_time_ms_forward": 0.006, "device_time_ms_backward": 0.0025,
        "device_time_ms_optimizer": 0, "device_time_ms_other": 0,
        "distinct_kernels": 2, "max_launches_per_aten_call": 2, "steps_recorded": 2,
    }  # fmt: skip


def test_the_metrics_are_a_fixed_list_of_tens(tmp_path: Path) -> None:
    """T38: never one per kernel name."""
    trace = one_step()
    for number in range(300):
        trace.launch(100 + number, 500 + number, name=f"kernel_{number}")
    annotation = _phased(tmp_path, trace, call_0="forward")
    assert [m.name for m in metrics(annotation)] == [
        name for name in METRIC_GAPS if name in _values(annotation)
    ]
    assert len(METRIC_GAPS) <= 40
    assert {name for name in METRIC_GAPS if name.startswith("launches_")} == {f"launches_{p}" for p in Phase}


def test_only_complete_steps_are_in_a_metric(tmp_path: Path) -> None:
    trace = one_step()
    trace.step(6, 1000, 2000)
    trace.launch(13, 1120)
    steps = (
        StepBracket(step=5, outcome=StepOutcome.COMPLETE),
        StepBracket(step=6, outcome=StepOutcome.RAISED),
    )
    annotation = annotate(trace.write(tmp_path), replace(WINDOW, requested=2, steps=steps), calls=None)
    values = _values(annotation)
    assert (values["launches"][0], values["steps_recorded"][0]) == (2, 1)
    assert facts(annotation)["by_step"] == {"5": 2, "6": 1}


def test_without_a_complete_step_only_that_is_said(tmp_path: Path) -> None:
    window = replace(WINDOW, steps=(StepBracket(step=5, outcome=StepOutcome.RAISED),))
    assert _values(annotate(one_step().write(tmp_path), window, calls=None)) == {
        "steps_recorded": (0.0, "exact", ())
    }


def test_where_device_telemetry_is_unavailable_no_device_metric_is_there(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.op(0, 100, 200)
    assert set(_values(_phased(tmp_path, trace, call_0="forward"))) == {"aten_calls", "steps_recorded"}


def test_true_zeros_are_logged(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.call(None, 100, name="cudaDeviceSynchronize")
    values = _values(import_trace(trace.write(tmp_path)))
    assert values["launches"] == (0.0, "exact", ())
    assert values["device_busy_ms"] == (0.0, "exact", ())


def test_where_no_phase_is_known_no_phase_is_said(tmp_path: Path) -> None:
    values = _values(import_trace(one_step().write(tmp_path)))
    assert not [name for name in values if name.endswith(tuple(Phase))]


def test_where_some_phases_are_unknown_those_that_are_known_are_lower_bounds(tmp_path: Path) -> None:
    values = _values(_phased(tmp_path, one_step(), call_0="forward"))
    assert values["launches_forward"][:2] == (1.0, "lower")
    assert values["launches"][:2] == (2.0, "exact")


def test_copies_of_unknown_size_make_a_lower_bound(tmp_path: Path) -> None:
    trace = one_step()
    trace.call(14, 130, name="cudaMemcpyAsync")
    trace.record(14, 145, cat="gpu_memcpy")
    assert _values(import_trace(trace.write(tmp_path)))["memcpy_bytes"][:2] == (0.0, "lower")


def test_every_metric_of_a_real_window_is_finite_and_says_why_it_is_a_bound() -> None:
    for real in real_traces():
        for metric in metrics(import_trace(real.trace, ops=real.ops)):
            assert math.isfinite(metric.value)
            assert metric.value >= 0
            assert (metric.bound.value == "lower") == bool(metric.reasons), metric


def test_a_gap_bounds_the_metrics_that_it_bears_on(tmp_path: Path) -> None:
    trace = one_step()
    trace.host("triton_kernel", 500, 600)
    trace.launch(50, 550)
    values = _values(_phased(tmp_path, trace, call_0="forward", call_1="backward"))
    bounded = {name for name, (_, bound, _) in values.items() if bound == "lower"}
    assert bounded == {
        "attributed_launches",
        "aten_calls_with_launches",
        "max_launches_per_aten_call",
        *(f"{what}_{phase}" for what in ("launches", "device_time_ms") for phase in Phase),
    }
    assert {values[name][2] for name in bounded} == {("launched_outside_dispatcher",)}


# The launch summary


def test_the_launch_summary_has_a_row_for_each_caller_and_kernel(tmp_path: Path) -> None:
    trace = one_step()
    trace.call(21, 140)
    trace.record(21, 150, duration=15, grid=[2, 1, 1], block=[64, 1, 1])
    trace.call(22, 150)
    trace.record(22, 170, duration=15, grid=[2, 1, 1], block=[64, 1, 1])
    rows = summary_table(_phased(tmp_path, trace, call_0="forward", call_1="backward")).to_pylist()
    row = {"phase": "forward", "operator": "aten.op0", "launch_name": "kernel_a", "kind": "kernel"}
    said = {"lower_bound": False, "reasons": "", "distinct_calls": 1, "grid": None, "block": None}
    assert rows == [
        row | said | {"grid": "2,1,1", "block": "64,1,1"}
        | {"launches_per_step": 2.0, "device_time_us_per_step": 30.0, "share": 0.75},
        row | said | {"launches_per_step": 1.0, "device_time_us_per_step": 5.0, "share": 0.125},
        row | said | {"phase": "backward", "operator": "aten.op1"}
        | {"launches_per_step": 1.0, "device_time_us_per_step": 5.0, "share": 0.125},
    ]  # fmt: skip


def test_a_launch_that_several_calls_share_names_them_all_and_counts_each(tmp_path: Path) -> None:
    """T12: no last-wins map."""
    trace = one_step()
    trace.call(77, 150)
    trace.call(77, 350, thread=BACKWARD)
    trace.record(77, 500, name="shared", duration=99)
    row = launch_summary(_phased(tmp_path, trace, call_0="forward", call_1="backward")).iloc[0]
    assert (row["launch_name"], row["operator"], row["distinct_calls"]) == (
        "shared",
        "aten.op0 + aten.op1",
        2,
    )


def test_a_launch_of_very_many_calls_names_some_and_counts_the_rest(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 100_000)
    for number in range(20):
        trace.op(number, 100 * number, 100 * number + 50)
        trace.call(7, 100 * number + 10)
    trace.record(7, 5000)
    annotation = _phased(tmp_path, trace, **{f"call_{number}": "forward" for number in range(20)})
    row = launch_summary(annotation).iloc[0]
    assert row["operator"].endswith("aten.op14 + aten.op15 + 12 more")
    assert row["distinct_calls"] == 20


def test_every_row_of_the_summary_says_whether_it_is_a_bound(tmp_path: Path) -> None:
    trace = one_step()
    trace.record(999, 50)
    rows = launch_summary(import_trace(trace.write(tmp_path)))
    assert rows["lower_bound"].tolist() == [True]
    assert rows["reasons"].tolist() == ["record_without_launch"]


def test_the_summary_of_an_unavailable_annotation_has_no_row(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.op(0, 100, 200)
    assert len(launch_summary(import_trace(trace.write(tmp_path)))) == 0


def test_the_summary_adds_up_on_a_real_trace() -> None:
    real = real_trace("eager_transformer")
    annotation = import_trace(real.trace, ops=real.ops)
    rows, expected = launch_summary(annotation), real.facts()
    assert rows["launches_per_step"].sum() * 2 == expected["in_window"]
    assert rows["device_time_us_per_step"].sum() * 2 == pytest.approx(expected["device_time_us"], abs=0.1)
    assert rows["share"].sum() == pytest.approx(1, abs=1e-4)


# Names of others are shown inert

HOSTILE_NAMES = (
    "=cmd|' /C calc'!A0",
    "+1+2",
    "-2+3",
    "@SUM(A1)",
    " \t=1",
    "\r\n=1",
    "\uff1dHYPERLINK(1)",
    "<script>alert('x')</script>",
    "a\x00b\x07c\x1b[31md\x7f",
    "line one\nline two\r\u2028three",
    "\u202eevil\u202c \u2066x\u2069 \u200f",
    "zero\u200bwidth\ufeff \u00ad \U000e0041",
    'quote " comma , semicolon ;',
    "[bold red]markup[/bold red]",
    "x" * 100_000,
)


def test_a_csv_of_hostile_names_has_no_formula_and_no_control_character(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 100_000)
    for number, name in enumerate(HOSTILE_NAMES):
        trace.launch(number + 1, 100 * number, name=name)
    annotation = import_trace(trace.write(tmp_path))
    annotation.save(tmp_path / "saved")
    text = (tmp_path / "saved" / "launch_summary.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == len(HOSTILE_NAMES)
    assert len(text.splitlines()) == len(HOSTILE_NAMES) + 1
    for row in rows:
        assert row["launch_name"].isprintable()
        assert row["launch_name"].lstrip()[:1] not in tuple("=+-@\uff1d")
    assert encode_summary(summary_table(annotation)) == text.encode()


def test_no_kernel_name_is_ever_part_of_a_key_or_a_file_name(tmp_path: Path) -> None:
    """T31: names hold `<>(),:*&` and worse."""
    trace = one_step()
    for number, name in enumerate((*HOSTILE_NAMES, "../../escape", "a<b>(c, *d)::e&")):
        trace.launch(100 + number, 500 + number, name=name)
    annotation = import_trace(trace.write(tmp_path))
    annotation.save(tmp_path / "out" / annotation.folder_name)
    names = [path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")]
    assert all(re.fullmatch(r"[a-z0-9_./]+", str(name)) for name in names)
    assert all(re.fullmatch(r"[a-z_]+", metric.name) for metric in metrics(annotation))


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_what_is_shown_is_printable_and_a_cell_is_no_formula(name: str) -> None:
    for shown in (visible(name), csv_cell(name), short_kernel(name)):
        assert shown.isprintable()
    assert csv_cell(name).lstrip()[:1] not in tuple("=+-@\uff1d")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::F<float>>(int, F)",
            "vectorized_elementwise_kernel",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float>(float*)", "softmax_warp_forward"),
        ("sm80_xmma_gemm_f32f32", "sm80_xmma_gemm_f32f32"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD "),
        ("(weird)", "(weird)"),
        ("", ""),
    ],
)
def test_a_kernels_name_is_short_in_tables(name: str, short: str) -> None:
    assert short_kernel(name) == short

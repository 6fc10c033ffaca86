"""Each reason of an observation gap: how it comes about, what is counted, and which numbers it bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_trace import BACKWARD, FOREIGN, WINDOW, SyntheticTrace, one_step

from tlk_tracking.analysis.metrics import facts
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.attribution.annotate import annotate, import_trace
from tlk_tracking.core.gaps import Gap, GapReason

EXACT = dict.fromkeys(
    (
        "aten_calls", "aten_calls_with_launches", "launches", "kernels", "memcpys", "memsets", "attributed",
        "unattributed", "outside_steps", "relations", "max_records_per_launch", "device_time_us",
        "device_busy_us",
    ),
    "exact",
)  # fmt: skip
EVERYTHING = dict.fromkeys(EXACT, "lower") | {"unattributed": "unknown"}
ATTRIBUTION = EXACT | {
    "attributed": "lower",
    "relations": "lower",
    "aten_calls_with_launches": "lower",
    "unattributed": "upper",
}
TIMES = EXACT | {"device_time_us": "lower", "device_busy_us": "lower"}


def _facts(trace: SyntheticTrace, folder: Path) -> dict[str, Any]:
    return facts(import_trace(trace.write(folder)))


def _gaps_of_rows(annotation: KernelAnnotation) -> list[Any]:
    return list(annotation.launch_table["gap"].to_pylist())


def _seen(trace: SyntheticTrace, folder: Path) -> tuple[dict[str, int], dict[str, str], list[Any]]:
    """Return the gaps, the bounds and the reason of each launch row."""
    annotation = import_trace(trace.write(folder))
    said = facts(annotation)
    assert said["lower_bound"] == (said["bounds"] != EXACT)
    assert said["lower_bound_reasons"] == sorted(said["gaps"])
    return said["gaps"], said["bounds"], _gaps_of_rows(annotation)


def test_a_window_without_a_gap_is_exact(tmp_path: Path) -> None:
    assert _seen(one_step(), tmp_path) == ({}, EXACT, [None, None])


# Reasons of one launch


def test_a_record_without_a_launch_is_kept_and_in_no_total(tmp_path: Path) -> None:
    trace = one_step()
    trace.record(999, 50)
    assert _seen(trace, tmp_path) == (
        {"record_without_launch": 1},
        EVERYTHING,
        ["record_without_launch", None, None],
    )
    said = _facts(trace, tmp_path)
    assert (said["counts"]["launches"], said["counts"]["outside_steps"]) == (2, 1)


@pytest.mark.parametrize("correlation", [0, None])
def test_a_correlation_of_0_is_no_id(tmp_path: Path, correlation: int | None) -> None:
    """T12: a call and a record that both carry 0 have nothing to do with each other."""
    trace = one_step()
    trace.call(correlation, 500, name="cudaDeviceSynchronize")
    trace.record(correlation, 600)
    assert _seen(trace, tmp_path)[0] == {"record_without_launch": 1}


def test_an_external_id_is_no_correlation(tmp_path: Path) -> None:
    """The ids of host ops and of runtime calls are two spaces: 999 of the one is not 999 of the other."""
    trace = one_step()
    trace.host("aten::add", 500, 600, external_id=999)
    trace.record(999, 550)
    assert _seen(trace, tmp_path)[0] == {"record_without_launch": 1}


def test_a_graph_replay_has_several_records_of_one_call_outside_every_marker(tmp_path: Path) -> None:
    trace = one_step()
    trace.call(50, 500, name="cudaGraphLaunch")
    for start in (510, 520, 530):
        trace.record(50, start)
    assert _seen(trace, tmp_path) == (
        {"graph_replay": 3},
        ATTRIBUTION,
        [None, None, *["graph_replay"] * 3],
    )
    assert _facts(trace, tmp_path)["max_records_per_launch"] == 3


def test_a_graph_that_an_aten_call_replays_is_no_gap(tmp_path: Path) -> None:
    """Several records of one correlation share its owner, and each is a launch."""
    trace = one_step()
    trace.call(50, 150, name="cudaGraphLaunch")
    for start in (160, 170, 180):
        trace.record(50, start)
    assert _seen(trace, tmp_path)[:2] == ({}, EXACT)
    counts = _facts(trace, tmp_path)["counts"]
    assert (counts["launches"], counts["relations"], counts["attributed"]) == (5, 5, 5)


def test_a_launch_from_a_foreign_thread_is_never_given_to_a_marker_that_overlaps(tmp_path: Path) -> None:
    """T14: nor is the thread's own ATen call, of which the mode saw nothing, counted."""
    trace = one_step()
    trace.launch(50, 150, thread=FOREIGN)
    assert _seen(trace, tmp_path) == (
        {"foreign_thread": 1},
        ATTRIBUTION | {"aten_calls": "lower"},
        [None, "foreign_thread", None],
    )


def test_a_thread_with_a_marker_anywhere_in_the_window_is_not_foreign(tmp_path: Path) -> None:
    trace = one_step()
    trace.launch(50, 600, thread=BACKWARD)
    assert _seen(trace, tmp_path)[0] == {"launched_outside_dispatcher": 1}


@pytest.mark.parametrize("name", ["aten::mm", "c10d::allreduce_", "my_lib::op.out"])
def test_a_dispatcher_operator_that_the_mode_did_not_see_bounds_everything(tmp_path: Path, name: str) -> None:
    trace = one_step()
    trace.host(name, 500, 600)
    trace.launch(50, 550)
    assert _seen(trace, tmp_path) == (
        {"mode_paused_interior": 1},
        EVERYTHING,
        [None, None, "mode_paused_interior"],
    )


@pytest.mark.parametrize(
    "name", ["triton_poi_fused_add_0", "PythonDispatchMode", "autograd::engine::evaluate_function: X", ""]
)
def test_a_launch_in_no_dispatcher_operator_bounds_attribution(tmp_path: Path, name: str) -> None:
    trace = one_step()
    trace.host(name, 500, 600)
    trace.launch(50, 550)
    assert _seen(trace, tmp_path) == (
        {"launched_outside_dispatcher": 1},
        ATTRIBUTION,
        [None, None, "launched_outside_dispatcher"],
    )


def test_only_the_innermost_host_op_says_whether_the_mode_was_paused(tmp_path: Path) -> None:
    trace = one_step()
    trace.host("aten::outer", 500, 700)
    trace.host("triton_kernel", 550, 600)
    trace.launch(50, 560)
    assert _seen(trace, tmp_path)[0] == {"launched_outside_dispatcher": 1}


def test_a_launch_outside_every_step_has_no_reason_and_is_in_no_total(tmp_path: Path) -> None:
    trace = one_step()
    trace.launch(50, 2000, thread=FOREIGN)
    assert _seen(trace, tmp_path) == ({}, EXACT, [None, None, None])
    assert _facts(trace, tmp_path)["counts"]["outside_steps"] == 1


def test_the_first_reason_that_fits_is_the_reason_of_a_launch(tmp_path: Path) -> None:
    """In one order: no launch, graph replay, foreign thread, paused mode, outside the dispatcher."""
    trace = one_step()
    trace.host("aten::mm", 500, 600, thread=FOREIGN)
    trace.call(50, 510, thread=FOREIGN)
    trace.record(50, 515)
    trace.record(50, 520)  # a replay, from a foreign thread, in an operator that the mode did not see
    trace.call(51, 550, thread=FOREIGN)
    trace.record(51, 560)  # a foreign thread, in an operator that the mode did not see
    trace.record(52, 570)
    trace.record(52, 580)  # several records of one correlation that no call has
    assert _seen(trace, tmp_path)[2] == [
        None, None, "graph_replay", "graph_replay", "foreign_thread", "record_without_launch",
        "record_without_launch",
    ]  # fmt: skip


# Launches without records


def test_a_launch_without_a_record_bounds_everything(tmp_path: Path) -> None:
    """T04, T06: the first kernels of a session, or all after the buffer was full, have no record."""
    trace = one_step()
    trace.call(50, 500)
    trace.call(51, 510, name="cuLaunchKernel", cat="cuda_driver")
    assert _seen(trace, tmp_path) == ({"launch_without_record": 2}, EVERYTHING, [None, None])


@pytest.mark.parametrize(
    "name",
    [
        "cudaLaunchKernelExC",
        "cudaGraphLaunch",
        "cuLaunchKernelEx",
        "cudaLaunchKernel_v7000",
        "cudaGraphLaunch_v10000",
    ],
)
def test_every_launch_api_launches(tmp_path: Path, name: str) -> None:
    trace = one_step()
    trace.call(50, 500, name=name)
    assert _seen(trace, tmp_path)[0] == {"launch_without_record": 1}


@pytest.mark.parametrize(
    "name",
    ["cudaDeviceSynchronize", "cudaMalloc", "cudaEventRecord", "cudaStreamIsCapturing", "some_new_api"],
)
def test_a_call_that_never_has_a_record_is_no_launch(tmp_path: Path, name: str) -> None:
    trace = one_step()
    trace.call(50, 500, name=name)
    assert _seen(trace, tmp_path)[:2] == ({}, EXACT)


def test_an_api_of_an_unknown_name_launches_when_it_has_records_elsewhere(tmp_path: Path) -> None:
    trace = one_step()
    trace.call(50, 500, name="some_new_api")
    trace.record(50, 510)
    trace.call(51, 600, name="some_new_api")
    gaps, bounds, _ = _seen(trace, tmp_path)
    assert gaps == {"launched_outside_dispatcher": 1, "launch_without_record": 1}
    assert bounds == EVERYTHING


@pytest.mark.parametrize(
    "name", ["cudaMemsetAsync", "cudaMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cuMemsetD8Async"]
)
def test_a_transfer_of_no_bytes_is_noted_and_bounds_nothing(tmp_path: Path, name: str) -> None:
    trace = one_step()
    trace.call(50, 500, name=name)
    assert _seen(trace, tmp_path)[:2] == ({}, EXACT)
    assert import_trace(trace.write(tmp_path)).manifest.notes["empty_transfers"] == 1


def test_a_transfer_without_a_record_is_a_loss_where_kernel_launches_lost_records_too(tmp_path: Path) -> None:
    trace = one_step()
    trace.call(50, 500, name="cudaMemsetAsync")
    trace.call(51, 510)
    annotation = import_trace(trace.write(tmp_path))
    assert facts(annotation)["gaps"] == {"launch_without_record": 2}
    assert annotation.manifest.notes["empty_transfers"] == 0


def test_a_launch_outside_every_step_may_lack_its_record(tmp_path: Path) -> None:
    trace = one_step()
    trace.call(50, 2000)
    assert _seen(trace, tmp_path)[:2] == ({}, EXACT)


def test_a_launch_into_a_stream_capture_needs_no_record(tmp_path: Path) -> None:
    trace = one_step()
    trace.call(1, 500, name="cudaStreamBeginCapture")
    trace.call(50, 510)
    trace.call(51, 520, name="cudaMemsetAsync")
    trace.call(2, 530, name="cudaStreamEndCapture")
    annotation = import_trace(trace.write(tmp_path))
    assert facts(annotation)["bounds"] == EXACT
    assert annotation.manifest.notes == {"empty_transfers": 0, "launching_calls": 2}


def test_a_capture_ends_where_it_ends_and_holds_its_own_thread_only(tmp_path: Path) -> None:
    trace = one_step()
    trace.call(3, 450, name="cudaStreamEndCapture")  # began before the trace
    trace.call(1, 500, name="cudaStreamBeginCapture_v10000")
    trace.call(50, 510)  # captured
    trace.call(51, 515, thread=BACKWARD)  # not sure to be: another thread
    trace.call(2, 530, name="cudaStreamEndCapture_v10000")
    trace.call(52, 540)
    assert _seen(trace, tmp_path)[0] == {"launch_without_record": 2}


# Times


@pytest.mark.parametrize("duration", [0, -5])
def test_a_record_without_a_positive_duration_is_launched_and_in_no_time(
    tmp_path: Path, duration: int
) -> None:
    """T10: kept as launched, out of times, counted."""
    trace = one_step()
    trace.call(50, 150)
    trace.record(50, 160, duration=duration)
    annotation = import_trace(trace.write(tmp_path))
    said = facts(annotation)
    assert (said["gaps"], said["bounds"]) == ({"invalid_time": 1}, TIMES)
    assert (said["counts"]["launches"], said["device_time_us"]) == (3, 10)
    row = annotation.launch_table.slice(1, 1).select(["duration", "time_valid", "gap"]).to_pylist()
    assert row == [{"duration": None, "time_valid": False, "gap": None}]


def test_a_record_that_starts_at_0_is_launched_and_in_no_time(tmp_path: Path) -> None:
    trace = one_step()
    trace.call(50, 150)
    trace.record(50, 160)["ts"] = 0
    annotation = import_trace(trace.write(tmp_path))
    said = facts(annotation)
    assert (said["gaps"], said["bounds"]) == ({"invalid_time": 1}, TIMES)
    row = annotation.launch_table.slice(0, 1).select(["start_ns", "time_valid", "launch_latency_ns"])
    assert row.to_pylist() == [{"start_ns": None, "time_valid": False, "launch_latency_ns": None}]


def test_a_kernel_that_overruns_its_successor_is_no_alarm(tmp_path: Path) -> None:
    """T10: two kernels of one stream may seem to overlap; busy time counts the union once."""
    trace = one_step()
    trace.call(50, 140)
    trace.record(
        50, 132, duration=6
    )  # before its own call, and over the first kernel of its stream (130 to 135)
    annotation = import_trace(trace.write(tmp_path))
    said = facts(annotation)
    assert (said["gaps"], said["bounds"]) == ({}, EXACT)
    assert (said["device_time_us"], said["device_busy_us"]) == (16, 13)
    assert annotation.launch_table["launch_latency_ns"].to_pylist() == [10_000, None, 10_000]


# Kineto's link


def _linked(external_id: int) -> SyntheticTrace:
    """Return a step in which marker 0 launched 50, and Kineto links the record to `external_id`."""
    trace = one_step()
    trace.host("aten::add", 210, 220, external_id=9)  # in no marker
    trace.launch(50, 150, external_id=external_id)
    return trace


@pytest.mark.parametrize(
    ("external_id", "audit"),
    [
        (2, {"agreed": 3, "disagreed": 0, "not_audited": 0}),  # our own range of call 0
        (3, {"agreed": 3, "disagreed": 0, "not_audited": 0}),  # a host op inside it
        (4, {"agreed": 2, "disagreed": 1, "not_audited": 0}),  # our own range of call 1
        (9, {"agreed": 2, "disagreed": 1, "not_audited": 0}),  # a host op in no marker
        (1, {"agreed": 2, "disagreed": 1, "not_audited": 0}),  # the step's range, which is in no op marker
        (0, {"agreed": 2, "disagreed": 0, "not_audited": 1}),  # none
        (77, {"agreed": 2, "disagreed": 0, "not_audited": 1}),  # none found
    ],
)
def test_kinetos_link_is_an_audit(tmp_path: Path, external_id: int, audit: dict[str, int]) -> None:
    said = _facts(_linked(external_id), tmp_path)
    assert said["audit"] == audit
    assert said["gaps"] == ({"link_disagreement": 1} if audit["disagreed"] else {})
    assert said["bounds"] == (ATTRIBUTION if audit["disagreed"] else EXACT)
    assert said["counts"]["attributed"] == 3  # a disagreement is no choice


def test_where_marker_and_link_both_name_no_call_they_agree(tmp_path: Path) -> None:
    trace = one_step()
    trace.host("triton_kernel", 500, 600, external_id=9)
    trace.launch(50, 550, external_id=9)
    said = _facts(trace, tmp_path)
    assert said["audit"] == {"agreed": 3, "disagreed": 0, "not_audited": 0}


def test_a_link_to_a_marker_where_ours_name_none_disagrees(tmp_path: Path) -> None:
    trace = one_step()
    trace.launch(50, 550, external_id=3)
    assert _facts(trace, tmp_path)["gaps"] == {"launched_outside_dispatcher": 1, "link_disagreement": 1}


def test_an_external_id_of_two_ranges_links_to_neither(tmp_path: Path) -> None:
    trace = one_step()
    trace.host("aten::add", 310, 320, thread=BACKWARD, external_id=3)
    assert _facts(trace, tmp_path)["audit"] == {"agreed": 1, "disagreed": 0, "not_audited": 1}


# What the file itself lost


def test_an_unreadable_event_bounds_everything(tmp_path: Path) -> None:
    trace = one_step()
    trace.record(50, 160)["ts"] = "soon"
    assert _seen(trace, tmp_path) == ({"unreadable_event": 1}, EVERYTHING, [None, None])


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("key", ["ts", "dur"])
def test_a_time_that_is_no_number_makes_its_event_unreadable(tmp_path: Path, key: str, value: str) -> None:
    """T11: bare inf and nan are read, and what they say is not taken for a time."""
    trace = one_step()
    trace.record(50, 160)[key] = "@@"
    path = trace.write(tmp_path)
    path.write_text(path.read_text().replace('"@@"', value))
    assert facts(import_trace(path))["gaps"] == {"unreadable_event": 1}


def test_inf_where_it_does_not_matter_loses_nothing(tmp_path: Path) -> None:
    trace = one_step()
    trace.record(50, 160, name="ns::nan, ns::inf<a>", bandwidth="@@")
    trace.call(50, 150)
    path = trace.write(tmp_path)
    path.write_text(path.read_text().replace('"@@"', "inf"))
    annotation = import_trace(path)
    assert facts(annotation)["bounds"] == EXACT
    assert annotation.launch_table["launch_name"].to_pylist()[1] == "ns::nan, ns::inf<a>"


# What the recording side says


@pytest.mark.parametrize(
    "reason",
    [
        GapReason.MODE_DISPLACED,
        GapReason.CAPTURE_RAISED,
        GapReason.WINDOW_TRUNCATED,
        GapReason.WINDOW_SKIPPED,
    ],
)
def test_what_the_recording_side_missed_bounds_everything(tmp_path: Path, reason: GapReason) -> None:
    window = replace(WINDOW, gaps=(Gap(reason=reason, count=1, evidence="what it saw of it"),))
    annotation = annotate(one_step().write(tmp_path), window, calls=None)
    assert [(g.reason, g.count, g.evidence) for g in annotation.manifest.gaps] == [
        (reason, 1, "what it saw of it")
    ]
    assert facts(annotation)["bounds"] == EVERYTHING
    annotation.save(tmp_path / "saved")


def test_every_reason_but_the_disclosure_has_its_evidence_in_words(tmp_path: Path) -> None:
    trace = one_step()
    trace.record(999, 50)  # no launch
    trace.call(50, 500, name="cudaGraphLaunch")
    trace.record(50, 510)
    trace.record(50, 520, duration=0)
    trace.launch(51, 530, thread=FOREIGN)
    trace.launch(52, 540, external_id=3)  # and a link to a marker
    trace.host("aten::mm", 600, 700)
    trace.launch(53, 610)
    trace.call(54, 800)
    trace.record(55, 900)["ts"] = None
    gaps = import_trace(trace.write(tmp_path)).manifest.gaps
    assert [(gap.reason.value, gap.count) for gap in gaps] == [
        ("record_without_launch", 1),
        ("graph_replay", 2),
        ("foreign_thread", 1),
        ("mode_paused_interior", 1),
        ("launched_outside_dispatcher", 1),
        ("launch_without_record", 1),
        ("invalid_time", 1),
        ("link_disagreement", 1),
        ("unreadable_event", 1),
    ]
    assert len({gap.evidence for gap in gaps}) == len(gaps)

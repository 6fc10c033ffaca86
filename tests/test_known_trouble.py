"""Trouble that others met with profilers and trackers: which test shows that it is right here.

Below each trouble stand its tests, as `file::function` in tests/, both without `test_`. What no other file tests
is tested below the table.
"""

from __future__ import annotations

import ast
import json
import re
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from fault_cells import Cell, Where, plain_profiler_events, run_cell, surroundings
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from lightning_fits import COMPLETE, RAISED, SilentWorker, Small, Telemetry, batches, fit
from mlflow import MlflowClient
from paths import TESTS
from torch import Tensor

from tlk_tracking.analysis.metrics import metrics
from tlk_tracking.attribution.annotate import annotate
from tlk_tracking.callbacks import KernelTelemetry
from tlk_tracking.core.gaps import Bound
from tlk_tracking.delivery.outbox import Outbox
from tlk_tracking.delivery.worker import WindowWorker
from tlk_tracking.tracking.tracking_uri import Destination

TABLE = """
T01 an exception leaves the profiler on
    fault_matrix::an_error_reaches_the_caller_as_without_telemetry_and_the_window_is_kept
    fault_matrix::an_error_around_the_steps_reaches_the_caller_too
T02 stopping what did not start, or somebody else stopped
    profiler_session::closing_is_idempotent_in_any_state
    profiler_session::a_session_that_was_taken_over_and_left_is_cleared_away
T03 two fits in two threads, teardown from another thread
    kernel_telemetry::of_two_fits_in_two_threads_one_has_the_window
    profiler_session::another_thread_leaves_the_session_to_its_owner
T04 the first kernels of a session have no record
    gaps::a_launch_without_a_record_bounds_everything
T05 another tool holds CUPTI
    annotate::launching_calls_without_a_single_record_are_unavailable_with_that_evidence
    doctor::a_tool_that_is_switched_on_is_named_without_its_value
T06 the device buffer is full
    gaps::a_launch_without_a_record_bounds_everything
T07 memory grows with every session
    bounded::memory_grows_with_windows_no_more_than_with_bare_profiler_sessions
    bounded::nothing_of_fifty_windows_of_a_fit_is_alive
T08 a large window is slow to parse
    correlation::a_hundred_thousand_nested_ranges_take_no_quadratic_time
    bounded::a_window_of_many_host_events_is_saved_in_bounded_memory
T09 training ends in the warm-up or in the active part
    kernel_telemetry::a_fit_that_ends_before_a_recorded_step_has_no_window_and_says_so
    kernel_telemetry::a_fit_that_ends_in_a_window_leaves_a_partial_one
T10 negative durations, overruns on one stream
    gaps::a_record_without_a_positive_duration_is_launched_and_in_no_time
    gaps::a_kernel_that_overruns_its_successor_is_no_alarm
T11 bare inf and nan in a trace
    gaps::a_time_that_is_no_number_makes_its_event_unreadable
    gaps::inf_where_it_does_not_matter_loses_nothing
T12 correlation 0, repeated or on one side
    gaps::a_correlation_of_0_is_no_id
    correlation::several_records_of_one_correlation_share_its_owner_and_each_is_a_launch
    correlation::several_owners_of_one_correlation_each_get_a_relation
T13 CUDA graphs around a session
    profiler_session::no_session_begins_while_a_graph_is_captured
    outside_dispatcher::replays_of_a_graph
T14 a user thread launches
    gaps::a_launch_from_a_foreign_thread_is_never_given_to_a_marker_that_overlaps
    outside_dispatcher::a_thread_of_the_user
T15 workers forked inside a window
    kernel_telemetry::workers_forked_inside_a_window_have_nothing_of_ours
    call_markers::a_forked_child_has_no_mode_of_ours
    worker::a_forked_child_leaves_the_worker_to_its_parent
T16 equal correlations on two ranks
    rank_summary::ranks_of_equal_correlations_are_never_mixed
    mlflow_tracking::the_ranks_of_a_window_are_joined_and_never_mixed
T17 a mode turns torch.compile off
    call_markers::a_compiled_model_stays_compiled_and_is_not_compiled_again
    harmless::a_compiled_model_is_compiled_as_often_and_computes_the_same
T18 fullgraph fails or compiles again
    harmless::a_compiled_model_is_compiled_as_often_and_computes_the_same
    module_tracker::windows_compile_nothing_again_and_break_no_graph
T19 higher-order operators under a mode
    harmless::everything_computed_is_bit_identical
    call_markers::a_higher_order_operator_is_one_call
T20 replicas in threads do not see the mode
    known_trouble::calls_in_another_thread_are_not_seen_and_no_count_is_called_complete
    gaps::a_launch_from_a_foreign_thread_is_never_given_to_a_marker_that_overlaps
T21 inference mode changes what is seen
    kernel_telemetry::validation_is_no_part_of_a_step
    known_trouble::validation_in_inference_mode_is_no_step_and_the_next_step_is_whole
T22 the dispatch path keeps tensors alive
    call_markers::no_tensor_is_kept
    module_tracker::nothing_of_a_step_is_kept_alive
T23 an exception across a graph break leaves a mode
    known_trouble::an_error_across_a_graph_break_leaves_nothing_on
T24 no teardown after an exception
    fault_matrix::an_error_reaches_the_caller_as_without_telemetry_and_the_window_is_kept
    fault_matrix::another_callback_that_fails_in_on_exception_costs_the_window_at_most
T25 SIGTERM; one of two ranks dies
    signals::a_signal_ends_a_fit_as_without_telemetry_and_the_window_is_kept
    rank_fits::one_rank_is_killed_in_a_window_and_the_other_keeps_its_own
T26 nothing left to do, fast_dev_run, second fit
    kernel_telemetry::a_resumed_fit_counts_on
    kernel_telemetry::a_fit_without_a_step_has_no_window
    kernel_telemetry::fast_dev_run_is_one_line_and_no_window
    kernel_telemetry::validating_alone_needs_no_run
    kernel_telemetry::a_second_fit_with_one_object_begins_afresh
T27 the run's status is wrong after a crash
    fault_matrix::an_error_reaches_the_caller_as_without_telemetry_and_the_window_is_kept
    mlflow_tracking::a_run_that_has_ended_stays_as_it_ended
T28 the server is down, fails or hangs
    worker::what_a_fault_kept_back_stays_whole_and_arrives_once_later
    signals::an_upload_that_hangs_holds_the_end_no_longer_than_five_seconds
T29 nowhere to log, several loggers
    kernel_telemetry::nowhere_to_log_is_an_error_that_names_both_ways
    rank_fits::without_a_run_every_rank_says_so_and_none_waits
    known_trouble::the_run_is_that_of_the_mlflow_logger_wherever_it_stands
T30 LightningCLI, second run, resume with a run id
    lightning_cli::the_callback_comes_in_by_its_class_path
    kernel_telemetry::a_resumed_fit_counts_on
T31 kernel names in keys and file names
    mlflow_tracking::metrics_are_those_of_the_summary_at_the_global_step
    mlflow_tracking::artifacts_lie_under_window_and_rank
T32 over-long keys and tags
    mlflow_tracking::every_metric_and_every_artifact_has_its_lower_bound_tag
    mlflow_tracking::more_metrics_or_tags_than_a_batch_holds_are_refused
T33 a repeated batch after a timeout
    mlflow_tracking::the_same_sent_again_leaves_one_value_for_each_metric
T34 a large upload is cut
    mlflow_tracking::metrics_and_tags_go_in_one_batch_and_before_any_artifact
    worker::what_a_fault_kept_back_stays_whole_and_arrives_once_later
T35 retries block for minutes
    worker::the_environment_of_the_training_is_not_changed_and_that_of_the_worker_ends_requests_in_time
    worker::a_drain_waits_no_longer_than_it_may_and_the_worker_goes_on
T36 the default store moved
    known_trouble::the_run_is_that_of_the_mlflow_logger_wherever_it_stands
    mlflow_tracking::a_store_that_is_not_there_is_not_made
T37 a hostile run
    mlflow_tracking::a_hostile_server_makes_nothing_outside_and_gets_a_typed_error
    mlflow_tracking::links_in_a_local_artifact_store_are_not_followed
    hostile_annotations::a_mutated_annotation_is_refused_or_valid
T38 thousands of metric keys
    mlflow_tracking::metrics_are_those_of_the_summary_at_the_global_step
T39 asynchronous logging lost at exit
    worker::a_closed_worker_ends_and_leaves_no_zombie
    worker::a_worker_whose_training_is_killed_sends_what_it_holds_and_ends
    killed::what_killed_fits_kept_is_whole_and_arrives_once
T40 counts double under a mode, ranges cross
    known_trouble::calls_are_counted_from_our_own_rows_and_ranges_nest
"""
ROWS = [row.split("\n    ") for row in re.split(r"\n(?=T)", TABLE.strip())]

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    # torch's own, when Dynamo looks at a tensor.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@cache
def _functions(file: str) -> frozenset[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in TESTS.rglob(file)]
    return frozenset(node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_trouble_has_a_row() -> None:
    assert [row[0].split()[0] for row in ROWS] == [f"T{number:02}" for number in range(1, 41)]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_tests_of_a_row_exist(row: list[str]) -> None:
    assert len(row) > 1
    for named in row[1:]:
        module, _, function = named.partition("::")
        assert f"test_{function}" in _functions(f"test_{module}.py"), named


# What no other file tests


def _quiet() -> Cell:
    return Cell(where=Where.FORWARD, step=-1, strike=lambda: None)


def test_calls_in_another_thread_are_not_seen_and_no_count_is_called_complete(tmp_path: Path) -> None:
    def replicas() -> None:
        threads = [threading.Thread(target=lambda: torch.erf(torch.ones(2))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    telemetry = Telemetry(tmp_path / "outbox")
    run_cell(Cell(where=Where.FORWARD, step=4, strike=replicas), [telemetry], False, tmp_path)
    assert telemetry.steps() == [[(3, COMPLETE), (4, COMPLETE)]]
    assert "aten.erf" not in {row["operator"] for row in telemetry.rows()}
    (window,) = telemetry.box.raw_windows()
    annotation = annotate(window.trace, window.facts(), calls=pq.read_table(str(window.calls)))
    assert {metric.bound for metric in metrics(annotation) if metric.name == "aten_calls"} == {Bound.LOWER}


def test_validation_in_inference_mode_is_no_step_and_the_next_step_is_whole(tmp_path: Path) -> None:
    class Inferring(Small):
        @torch.inference_mode()
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            torch.erf(self.layers(batch[0]))

    telemetry = Telemetry(tmp_path / "outbox", active=4)
    fit(tmp_path, [telemetry], model=Inferring(), validation=batches(2), val_check_interval=2)
    assert telemetry.steps() == [[(step, COMPLETE) for step in (3, 4, 5, 6)]]
    operators = [
        [row["operator"] for row in telemetry.rows() if row["step"] == step] for step in (3, 4, 5, 6)
    ]
    assert operators[1:] == operators[:-1]
    assert "aten.erf" not in operators[0]


def test_an_error_across_a_graph_break_leaves_nothing_on(tmp_path: Path) -> None:
    error = ZeroDivisionError("theirs")

    class Breaking(torch.nn.Module):
        calls = 0

        def forward(self, values: Tensor) -> Tensor:
            values = values.sin()
            torch._dynamo.graph_break()
            self.fail()
            return values.cos()

        @torch.compiler.disable
        def fail(self) -> None:
            self.calls += 1
            if self.calls == 5:
                raise error

    class Compiled(Small):
        def __init__(self) -> None:
            super().__init__()
            self.breaking = Breaking()
            self.compiled = torch.compile(self.breaking, backend="eager")

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return self.compiled(self.layers(batch[0])).mean()

    before = surroundings()
    telemetry = Telemetry(tmp_path / "outbox")
    with pytest.raises(ZeroDivisionError) as caught:
        fit(tmp_path, [telemetry], model=Compiled())
    torch._dynamo.reset()
    assert caught.value is error
    assert telemetry.steps() == [[(3, COMPLETE), (4, RAISED)]]
    assert surroundings() == before
    assert "aten::mm" in plain_profiler_events()


def test_the_run_is_that_of_the_mlflow_logger_wherever_it_stands(
    tmp_path: Path, mlflow_sqlite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    found: list[Destination] = []

    class Noting(KernelTelemetry):
        def _make_worker(self, outbox: Outbox, destination: Destination) -> WindowWorker:
            found.append(destination)
            return SilentWorker(outbox, destination, upload_timeout_s=0.0)

    logger = MLFlowLogger(tracking_uri=mlflow_sqlite)
    fit(tmp_path, [Noting(outbox=tmp_path / "outbox")], logger=[CSVLogger(tmp_path), logger], steps=1)
    assert found == [Destination(run_id=str(logger.run_id), tracking_uri=mlflow_sqlite)]
    client = MlflowClient(tracking_uri=mlflow_sqlite)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert [(run.info.run_id, run.info.status) for run in runs] == [(logger.run_id, "FINISHED")]


def test_calls_are_counted_from_our_own_rows_and_ranges_nest(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "outbox")
    run_cell(_quiet(), [telemetry], False, tmp_path)
    rows = telemetry.rows()
    assert [row["operator"] for row in rows if row["step"] == 3].count("aten.addmm") == 1
    (window,) = telemetry.box.raw_windows()
    assert window.trace is not None
    events = json.loads(window.trace.read_text())["traceEvents"]
    ours = sorted(
        (event["tid"], event["ts"], -event["dur"], event["name"])
        for event in events
        if event.get("ph") == "X" and event["name"].startswith("tlk::")
    )
    assert sum("::op::" in name for *_, name in ours) == len(rows)
    open_until: list[tuple[int, float]] = []
    for thread, start, minus_duration, name in ours:
        while open_until and (open_until[-1][0] != thread or open_until[-1][1] <= start):
            open_until.pop()
        end = start - minus_duration
        assert not open_until or end <= open_until[-1][1], name
        open_until.append((thread, end))

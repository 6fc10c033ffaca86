from __future__ import annotations

import json
from dataclasses import asdict

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from annotations import (
    real,
    repeated,
    with_durations,
    with_environment,
    with_gap,
    with_manifest,
    with_tables,
)

from tlk_tracking.analysis.circumstances import ContextDifference
from tlk_tracking.analysis.comparison import Comparison, compare_annotations
from tlk_tracking.analysis.comparison_rows import CHANGES, Row
from tlk_tracking.analysis.step_tables import CALL_MEASURES, TIME_MEASURES, TableName
from tlk_tracking.analysis.verdicts import Verdict
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.core.errors import ComparisonError
from tlk_tracking.core.gaps import LOSES_ANYTHING, Bound, GapReason
from tlk_tracking.core.records import Availability, CallSource, StepOutcome

REAL = (
    "eager_transformer",
    "compiled_transformer",
    "cuda_graph_replay",
    "multi_stream_memcpy",
    "raises_in_backward",
    "paused_interior",
    "warmup_leak",
    "lightning_fit",
    "ddp_rank0",
)


def _window(steps: int = 9, *, seed: int = 0, noise: float = 0.02, first_step: int = 100) -> KernelAnnotation:
    return repeated(real("eager_transformer"), steps=steps, noise=noise, seed=seed, first_step=first_step)


def _rows(comparison: Comparison, **wanted: object) -> list[Row]:
    return [
        row for row in comparison.rows if all(getattr(row, name) == value for name, value in wanted.items())
    ]


def _total(comparison: Comparison, measure: str) -> Row:
    (row,) = _rows(comparison, table=TableName.TOTAL, measure=measure)
    return row


def _verdicts(rows: list[Row]) -> set[Verdict]:
    return {row.verdict for row in rows}


def _unavailable(annotation: KernelAnnotation) -> KernelAnnotation:
    gone = with_tables(
        annotation,
        launches=annotation.launch_table.slice(0, 0),
        relations=annotation.relation_table.slice(0, 0),
    )
    hidden = with_manifest(
        gone, availability=Availability.UNAVAILABLE, lower_bound_reasons=(GapReason.NO_DEVICE_EVIDENCE,)
    )
    return with_tables(hidden)


@pytest.mark.parametrize("name", REAL)
def test_a_window_and_itself_differ_in_nothing(name: str) -> None:
    comparison = compare_annotations(real(name), real(name))
    assert comparison.changes == ()
    assert comparison.context == {"candidate": ()}


@pytest.mark.parametrize("before", REAL)
@pytest.mark.parametrize("after", REAL)
def test_a_loss_on_either_side_never_adds_a_claim(before: str, after: str) -> None:
    plain = {
        (row.table, row.key, row.measure): row.verdict
        for row in compare_annotations(real(before), real(after)).rows
    }
    for reason in (GapReason.LAUNCH_WITHOUT_RECORD, GapReason.GRAPH_REPLAY, GapReason.INVALID_TIME):
        for sides in (
            (with_gap(real(before), reason), real(after)),
            (real(before), with_gap(real(after), reason)),
        ):
            for row in compare_annotations(*sides).rows:
                claimed = plain[row.table, row.key, row.measure]
                assert row.verdict in (claimed, Verdict.UNDECIDED)


def test_totals_of_real_windows_are_told_apart() -> None:
    comparison = compare_annotations(real("eager_transformer"), real("compiled_transformer"))
    totals = {
        row.measure: (row.baseline, row.baseline_bound, row.candidate, row.candidate_bound, row.verdict)
        for row in _rows(comparison, table=TableName.TOTAL)
        if row.measure not in TIME_MEASURES
    }
    exact, lower = Bound.EXACT, Bound.LOWER
    assert totals == {
        "aten_calls": (338, exact, 123, exact, Verdict.DECREASED),
        "launches": (138, exact, 117, exact, Verdict.DECREASED),
        "kernels": (128, exact, 115, exact, Verdict.DECREASED),
        "memcpys": (8, exact, 2, exact, Verdict.DECREASED),
        "memsets": (2, exact, 0, exact, Verdict.REMOVED),
        "memcpy_bytes": (2097152, exact, 524288, exact, Verdict.DECREASED),
        "attributed_launches": (138, exact, 63, lower, Verdict.UNDECIDED),
        "aten_calls_with_launches": (105, exact, 44, lower, Verdict.UNDECIDED),
    }


def test_kernels_of_generated_code_are_added_and_those_they_replace_removed() -> None:
    comparison = compare_annotations(real("eager_transformer"), real("compiled_transformer"))
    kernels = _rows(comparison, table=TableName.KERNEL, measure="launches")
    added = {json.loads(row.key or "")["kernel"] for row in kernels if row.verdict is Verdict.ADDED}
    assert {name for name in added if name.startswith("triton_")}
    assert all(row.baseline is None and row.candidate for row in kernels if row.verdict is Verdict.ADDED)
    assert all(row.candidate is None and row.baseline for row in kernels if row.verdict is Verdict.REMOVED)


def test_launches_without_an_aten_call_make_rows_by_phase_and_call_lower_bounds_but_not_rows_by_kernel() -> (
    None
):
    comparison = compare_annotations(real("eager_transformer"), real("compiled_transformer"))
    bounds = {
        (row.table, row.measure): row.candidate_bound
        for row in comparison.rows
        if row.table in (TableName.PHASE, TableName.CALL, TableName.KERNEL)
    }
    assert bounds == {
        (TableName.PHASE, "aten_calls"): Bound.EXACT,
        (TableName.PHASE, "launches"): Bound.LOWER,
        (TableName.PHASE, "device_time_ms"): Bound.LOWER,
        (TableName.CALL, "aten_calls"): Bound.EXACT,
        (TableName.CALL, "launches"): Bound.LOWER,
        (TableName.CALL, "device_time_ms"): Bound.LOWER,
        (TableName.KERNEL, "launches"): Bound.EXACT,
        (TableName.KERNEL, "device_time_ms"): Bound.EXACT,
    }


@pytest.mark.parametrize("reason", sorted(LOSES_ANYTHING))
def test_after_a_loss_in_the_candidate_nothing_is_removed_decreased_or_unchanged(reason: GapReason) -> None:
    comparison = compare_annotations(
        real("eager_transformer"), with_gap(real("compiled_transformer"), reason)
    )
    assert _verdicts(list(comparison.rows)) <= {Verdict.ADDED, Verdict.INCREASED, Verdict.UNDECIDED}


@pytest.mark.parametrize("reason", sorted(LOSES_ANYTHING))
def test_after_a_loss_in_the_baseline_nothing_is_added_increased_or_unchanged(reason: GapReason) -> None:
    comparison = compare_annotations(
        with_gap(real("eager_transformer"), reason), real("compiled_transformer")
    )
    assert _verdicts(list(comparison.rows)) <= {Verdict.REMOVED, Verdict.DECREASED, Verdict.UNDECIDED}


def test_an_undecided_row_says_which_side_is_only_a_bound_and_why() -> None:
    lossy = with_gap(real("eager_transformer"), GapReason.LAUNCH_WITHOUT_RECORD)
    row = _total(compare_annotations(real("eager_transformer"), lossy), "launches")
    assert row.verdict is Verdict.UNDECIDED
    assert row.reason == "the candidate's value is only a lower bound (launch_without_record)"


def test_a_disputed_attribution_makes_launches_by_call_unknown_but_not_calls_or_kernels() -> None:
    audit = real("eager_transformer").manifest.audit
    disputed = with_manifest(
        with_gap(real("eager_transformer"), GapReason.LINK_DISAGREEMENT),
        audit=type(audit)(agreed=275, disagreed=1, not_audited=0),
    )
    comparison = compare_annotations(real("eager_transformer"), disputed)
    bounds = {(row.table, row.measure): row.candidate_bound for row in comparison.rows}
    assert bounds[TableName.CALL, "launches"] is Bound.UNKNOWN
    assert bounds[TableName.CALL, "aten_calls"] is Bound.EXACT
    assert bounds[TableName.KERNEL, "launches"] is Bound.EXACT


def test_without_device_telemetry_on_a_side_its_device_numbers_are_null_and_undecided() -> None:
    comparison = compare_annotations(real("eager_transformer"), _unavailable(real("eager_transformer")))
    device = [row for row in comparison.rows if row.measure != "aten_calls"]
    assert {row.candidate for row in device} == {None}
    assert {row.candidate_bound for row in device} == {Bound.UNKNOWN}
    assert {row.reason for row in device} == {"no device evidence in the candidate"}
    assert _verdicts(list(comparison.rows)) == {Verdict.UNDECIDED}
    assert _total(comparison, "aten_calls").candidate_bound is Bound.LOWER


def _with_outcomes(annotation: KernelAnnotation, *outcomes: StepOutcome) -> KernelAnnotation:
    window = annotation.manifest.window
    steps = tuple(
        msgspec.structs.replace(row, outcome=outcome)
        for row, outcome in zip(window.steps, outcomes, strict=True)
    )
    return with_manifest(annotation, window=msgspec.structs.replace(window, steps=steps))


def test_a_side_without_a_complete_step_has_no_number() -> None:
    raised = _with_outcomes(real("eager_transformer"), StepOutcome.RAISED, StepOutcome.RAISED)
    comparison = compare_annotations(real("eager_transformer"), raised)
    assert {(row.candidate, row.verdict, row.reason) for row in _rows(comparison, table=TableName.TOTAL)} == {
        (None, Verdict.UNDECIDED, "no complete step in the candidate")
    }


def test_a_step_that_raised_is_in_no_number() -> None:
    raised = _with_outcomes(real("raises_in_backward"), StepOutcome.COMPLETE, StepOutcome.RAISED)
    comparison = compare_annotations(raised, raised)
    assert comparison.baseline.steps == 1
    assert _total(comparison, "launches").baseline == 9


def test_counts_that_differ_from_step_to_step_are_undecided_where_the_steps_overlap() -> None:
    window = _window(3)
    launches = window.launch_table
    dropped = pc.and_(pc.equal(launches["step"], 102), pc.equal(launches["kind"].cast("string"), "memset"))
    uneven = with_tables(
        window,
        launches=launches.set_column(
            8, launches.schema.field("step"), pc.if_else(dropped, None, launches["step"])
        ),
    )
    row = _total(compare_annotations(window, uneven), "memsets")
    assert (row.baseline, row.candidate) == (2.0, 4 / 3)
    assert row.verdict is Verdict.UNDECIDED
    assert row.reason == "differs from step to step: 2 to 2 in the baseline and 0 to 2 in the candidate"


def test_fewer_samples_than_asked_for_are_undecided_and_say_how_many_windows_are_missing() -> None:
    row = _total(compare_annotations(_window(3), _window(9, seed=1)), "device_time_ms")
    assert row.verdict is Verdict.UNDECIDED
    assert row.reason == "the baseline has 3 of 8 steps; 2 more windows of 3 steps needed"


def test_windows_of_one_experiment_are_pooled() -> None:
    windows = [_window(3, seed=seed, first_step=100 * seed) for seed in (1, 2, 3)]
    comparison = compare_annotations(windows, _window(9, seed=4))
    assert comparison.baseline.steps == 9
    assert [window[0] for window in comparison.baseline.windows] == [100, 200, 300]
    assert _total(comparison, "device_time_ms").verdict is Verdict.UNCHANGED


def test_windows_that_could_not_see_the_device_are_left_out_of_a_side_that_has_others() -> None:
    window = _window(3)
    comparison = compare_annotations([window, _unavailable(_window(3, first_step=200))], window)
    assert (comparison.baseline.steps, comparison.baseline.left_out) == (3, 1)
    assert _total(comparison, "launches").verdict is Verdict.UNCHANGED


def test_two_windows_of_an_unchanged_program_show_no_change() -> None:
    for seed in range(20):
        comparison = compare_annotations(_window(seed=2 * seed), _window(seed=2 * seed + 1))
        assert comparison.changes == ()


def test_one_slowed_kernel_is_found_and_named_first() -> None:
    slowed = real("eager_transformer").launch_table["launch_name"].to_pylist()[10]
    after = with_durations(_window(seed=1), lambda row: 3.0 if row["launch_name"] == slowed else 1.0)
    comparison = compare_annotations(_window(), after)
    first = _rows(comparison, table=TableName.KERNEL)[0]
    assert json.loads(first.key or "")["kernel"] == slowed
    assert (first.measure, first.verdict) == ("device_time_ms", Verdict.INCREASED)
    named = {
        json.loads(row.key or "")["kernel"] for row in comparison.changes if row.table is TableName.KERNEL
    }
    assert named == {slowed}


def test_one_more_operation_is_found_and_named_first() -> None:
    window = _window()
    copy = repeated(real("eager_transformer"), steps=9, noise=0.02, seed=1)
    comparison = compare_annotations(_without_first_launch(window), copy)
    changed = {(row.table, row.measure, row.verdict) for row in comparison.changes}
    assert (TableName.TOTAL, "launches", Verdict.INCREASED) in changed
    first = _rows(comparison, table=TableName.CALL)[0]
    assert json.loads(first.key or "")["operator"] == "aten._to_copy"
    assert first.verdict in (Verdict.ADDED, Verdict.INCREASED)


def _without_first_launch(annotation: KernelAnnotation) -> KernelAnnotation:
    """Take the call and the launch out that come first in each step."""
    calls, launches, relations = annotation.call_table, annotation.launch_table, annotation.relation_table
    per_step = len(launches) // 9
    first = np.arange(9) * per_step
    owners = relations.filter(pc.is_in(relations["launch"], pc.cast(first, "int64")))["sequence"]
    kept = relations.filter(pc.invert(pc.is_in(relations["launch"], pc.cast(first, "int64"))))
    renumbered = np.cumsum(~np.isin(np.arange(len(launches)), first)) - 1
    return with_tables(
        annotation,
        calls=calls.filter(pc.invert(pc.is_in(calls["sequence"], owners.combine_chunks()))),
        launches=launches.filter(pc.invert(pc.is_in(launches["launch"], pc.cast(first, "int64")))).set_column(
            0, launches.schema.field("launch"), [np.arange(len(launches) - 9)]
        ),
        relations=kept.set_column(1, kept.schema.field("launch"), [renumbered[kept["launch"].to_numpy()]]),
    )


def test_times_of_different_gpu_models_are_undecided_unless_asked_for_and_counts_still_compare() -> None:
    after = with_environment(with_durations(_window(seed=1), lambda _: 2.0), gpu_model="NVIDIA A100")
    apart = compare_annotations(_window(), after)
    times = [row for row in apart.rows if row.measure in TIME_MEASURES]
    assert {(row.verdict, row.reason) for row in times} == {
        (Verdict.UNDECIDED, "times of different GPU models: NVIDIA H200 and NVIDIA A100")
    }
    assert _total(apart, "launches").verdict is Verdict.UNCHANGED
    across = compare_annotations(_window(), after, across_devices=True)
    assert _total(across, "device_time_ms").verdict is Verdict.INCREASED


def test_a_gpu_that_is_known_on_one_side_only_may_be_another() -> None:
    comparison = compare_annotations(_window(), with_environment(_window(seed=1), gpu_model=None))
    assert _total(comparison, "device_time_ms").reason == (
        "times of different GPU models: NVIDIA H200 and unknown"
    )


def test_differences_of_context_are_listed_by_their_weight() -> None:
    after = with_environment(
        with_gap(real("eager_transformer"), GapReason.GRAPH_REPLAY),
        gpu_model="NVIDIA A100",
        precision="bf16-mixed",
    )
    assert compare_annotations(real("eager_transformer"), after).context["candidate"] == (
        ContextDifference(field="gpu_model", baseline="NVIDIA H200", candidate="NVIDIA A100"),
        ContextDifference(field="precision", baseline=None, candidate="bf16-mixed"),
        ContextDifference(field="gaps", baseline=[], candidate=["graph_replay"]),
    )


def test_another_batch_shape_is_a_difference_of_context() -> None:
    (found,) = [
        each
        for each in compare_annotations(real("eager_transformer"), real("multi_stream_memcpy")).context[
            "candidate"
        ]
        if each.field == "batch_shapes"
    ]
    assert found.baseline == ["float32[4,64,256]"]


def test_an_unknown_phase_on_one_side_takes_phases_out_of_every_key() -> None:
    calls = real("eager_transformer").call_table
    unphased = with_tables(
        real("eager_transformer"),
        calls=calls.set_column(2, calls.schema.field("phase"), pc.if_else(False, calls["phase"], None)),
    )
    comparison = compare_annotations(real("eager_transformer"), unphased)
    assert _rows(comparison, table=TableName.PHASE) == []
    calls_rows = _rows(comparison, table=TableName.CALL)
    assert {json.loads(row.key or "")["phase"] for row in calls_rows} == {None}
    assert comparison.changes == ()


def test_rows_of_host_ops_are_not_compared_with_rows_of_a_dispatch_mode() -> None:
    host_ops = with_manifest(real("eager_transformer"), call_source=CallSource.HOST_OPS)
    comparison = compare_annotations(real("compiled_transformer"), host_ops)
    about_calls = [
        row
        for row in comparison.rows
        if row.measure in CALL_MEASURES or row.table in (TableName.PHASE, TableName.CALL)
    ]
    assert {(row.verdict, row.reason) for row in about_calls} == {
        (Verdict.UNDECIDED, "ATen calls from different sources: dispatch_mode and host_ops")
    }
    assert _total(comparison, "launches").verdict is Verdict.INCREASED


def test_devices_of_the_inputs_are_not_part_of_a_call_group() -> None:
    calls = real("eager_transformer").call_table
    moved = pc.replace_substring(calls["inputs"].cast("string"), "cuda:0", "cuda:1")
    elsewhere = with_tables(
        real("eager_transformer"),
        calls=calls.set_column(
            calls.schema.get_field_index("inputs"),
            calls.schema.field("inputs"),
            moved.combine_chunks().dictionary_encode(),
        ),
    )
    assert compare_annotations(real("eager_transformer"), elsewhere).changes == ()


def test_times_below_the_least_share_are_not_tested() -> None:
    comparison = compare_annotations(_window(), _window(seed=1))
    small = [
        row
        for row in comparison.rows
        if row.measure == "device_time_ms" and row.share is not None and row.share < 0.01
    ]
    assert small
    assert {(row.verdict, row.reason) for row in small} == {
        (Verdict.UNDECIDED, "below 1% of the device time: not tested")
    }


def test_a_time_that_is_a_lower_bound_can_only_move_away_from_the_other_side() -> None:
    def verdict(before: KernelAnnotation, after: KernelAnnotation) -> Verdict:
        return _total(compare_annotations(before, after), "device_time_ms").verdict

    slow, fast = with_durations(_window(seed=1), lambda _: 2.0), _window()
    lost = GapReason.LAUNCH_WITHOUT_RECORD
    assert verdict(fast, with_gap(slow, lost)) is Verdict.INCREASED
    assert verdict(with_gap(fast, lost), slow) is Verdict.UNDECIDED
    assert verdict(with_gap(slow, lost), fast) is Verdict.DECREASED
    assert verdict(slow, with_gap(fast, lost)) is Verdict.UNDECIDED
    assert verdict(fast, with_gap(fast, lost)) is Verdict.UNDECIDED


def test_changes_come_first_and_the_most_device_time_before_the_rest() -> None:
    rows = _rows(
        compare_annotations(real("eager_transformer"), real("compiled_transformer")), table=TableName.KERNEL
    )
    changed = [row for row in rows if row.verdict in CHANGES]
    assert rows[: len(changed)] == changed
    sizes = [abs(row.change_ms or 0.0) for row in changed]
    assert sizes == sorted(sizes, reverse=True)


def test_each_candidate_is_compared_with_the_baseline() -> None:
    comparison = compare_annotations(
        real("eager_transformer"),
        real("eager_transformer"),
        real("compiled_transformer"),
        labels=["main", "again", "compiled"],
    )
    assert [side.label for side in comparison.candidates] == ["again", "compiled"]
    assert {row.target for row in comparison.changes} == {"compiled"}
    assert set(comparison.context) == {"again", "compiled"}


def test_the_frame_has_a_column_for_each_field_of_a_row() -> None:
    comparison = compare_annotations(real("eager_transformer"), real("compiled_transformer"))
    frame = comparison.frame()
    assert list(frame.columns) == list(asdict(comparison.rows[0]))
    assert len(frame) == len(comparison.rows)


@pytest.mark.parametrize("labels", [["one"], ["same", "same"]])
def test_labels_must_tell_the_sides_apart(labels: list[str]) -> None:
    with pytest.raises(ComparisonError, match="2 experiments need 2 different labels"):
        compare_annotations(real("ddp_rank0"), real("ddp_rank0"), labels=labels)


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ComparisonError, match="give a baseline and a candidate"):
        compare_annotations(real("ddp_rank0"))
    with pytest.raises(ComparisonError, match="give a baseline and a candidate"):
        compare_annotations(real("ddp_rank0"), [])


def _with_place(annotation: KernelAnnotation, name: str, value: str) -> KernelAnnotation:
    """Return the annotation with all launches without a place in that phase or module."""
    launches = annotation.launch_table
    column = pc.fill_null(launches[name].cast("string"), value).combine_chunks().dictionary_encode()
    place = launches.schema.get_field_index(name)
    return with_tables(annotation, launches=launches.set_column(place, launches.schema.field(name), column))


def test_launches_without_an_aten_call_count_in_the_phase_in_which_they_were_launched() -> None:
    placed = _with_place(real("compiled_transformer"), "phase", "backward")
    comparison = compare_annotations(real("eager_transformer"), placed)
    rows = {
        json.loads(row.key or "")["phase"]: (row.candidate, row.candidate_bound, row.verdict)
        for row in _rows(comparison, table=TableName.PHASE, measure="launches")
    }
    assert rows == {
        "forward": (25, Bound.EXACT, Verdict.DECREASED),
        "backward": (92, Bound.EXACT, Verdict.UNCHANGED),
    }


def test_phases_are_lower_bounds_when_a_launch_has_none() -> None:
    comparison = compare_annotations(real("eager_transformer"), real("compiled_transformer"))
    rows = _rows(comparison, table=TableName.PHASE, measure="launches")
    assert {row.candidate_bound for row in rows} == {Bound.LOWER}


def _lossy(annotation: KernelAnnotation, generator: np.random.Generator) -> KernelAnnotation:
    """Return what a window sees that loses launches, relations or calls at random, with the gaps that say so."""
    calls, launches, relations = annotation.call_table, annotation.launch_table, annotation.relation_table
    reasons = []
    if generator.random() < 0.4:
        kept = generator.random(len(launches)) < 0.8
        renumbered = np.cumsum(kept) - 1
        launch = relations["launch"].to_numpy()
        relations = relations.filter(pa.array(kept[launch])).set_column(
            1, relations.schema.field("launch"), [renumbered[launch[kept[launch]]]]
        )
        launches = launches.filter(pa.array(kept)).set_column(
            0, launches.schema.field("launch"), [np.arange(kept.sum())]
        )
        reasons.append(GapReason.LAUNCH_WITHOUT_RECORD)
    if generator.random() < 0.4:
        related = generator.random(len(relations)) < 0.8
        lost = np.unique(relations["launch"].to_numpy()[~related])
        relations = relations.filter(pa.array(related))
        unplaced = np.isin(np.arange(len(launches)), lost)
        for name in ("phase", "module"):
            column = pc.if_else(pa.array(unplaced), None, launches[name].cast("string"))
            launches = launches.set_column(
                launches.schema.get_field_index(name),
                launches.schema.field(name),
                column.combine_chunks().dictionary_encode(),
            )
        reasons.append(GapReason.LAUNCHED_OUTSIDE_DISPATCHER)
    if generator.random() < 0.4:
        seen = generator.random(len(calls)) < 0.8
        sequences = calls["sequence"].filter(pa.array(seen)).combine_chunks()
        relations = relations.filter(pc.is_in(relations["sequence"], sequences))
        calls = calls.filter(pa.array(seen))
        reasons.append(GapReason.FOREIGN_THREAD)
    return with_gap(with_tables(annotation, calls=calls, launches=launches, relations=relations), *reasons)


def _changed(annotation: KernelAnnotation, generator: np.random.Generator) -> KernelAnnotation:
    """Return another program: some calls, with their launches, are not in it."""
    operators = np.array(annotation.call_table["operator"].to_pylist())
    gone = generator.choice(np.unique(operators), size=5, replace=False)
    kept = pa.array(~(np.isin(operators, gone) & (generator.random(len(operators)) < 0.7)))
    calls = annotation.call_table.filter(kept)
    relations = annotation.relation_table
    in_calls = pc.is_in(relations["sequence"], calls["sequence"].combine_chunks())
    related = np.zeros(len(annotation.launch_table), bool)
    related[relations.filter(in_calls)["launch"].to_numpy()] = True
    renumbered = np.cumsum(related) - 1
    relations = relations.filter(in_calls)
    return with_tables(
        annotation,
        calls=calls,
        launches=annotation.launch_table.filter(pa.array(related)).set_column(
            0, annotation.launch_table.schema.field("launch"), [np.arange(related.sum())]
        ),
        relations=relations.set_column(
            1, relations.schema.field("launch"), [renumbered[relations["launch"].to_numpy()]]
        ),
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_claim_contradicts_what_ran_behind_a_loss(seed: int) -> None:
    generator = np.random.default_rng(seed)
    before = repeated(real("eager_transformer"), steps=1)
    after = _changed(before, generator)
    sides = [(before, after), (after, before)][seed % 2]
    truth = {
        (row.table, row.key, row.measure): row.verdict
        for row in compare_annotations(*sides).rows
        if row.measure not in TIME_MEASURES
    }
    seen = compare_annotations(*(_lossy(side, generator) for side in sides))
    for row in seen.rows:
        if row.verdict is not Verdict.UNDECIDED and row.measure not in TIME_MEASURES:
            assert row.verdict is truth[row.table, row.key, row.measure]


def test_an_empty_window_is_a_true_zero() -> None:
    eager = real("eager_transformer")
    empty = with_manifest(
        with_tables(
            eager, launches=eager.launch_table.slice(0, 0), relations=eager.relation_table.slice(0, 0)
        ),
        availability=Availability.EMPTY,
    )
    comparison = compare_annotations(eager, empty)
    assert _total(comparison, "launches").verdict is Verdict.REMOVED
    kernels = _rows(comparison, table=TableName.KERNEL)
    assert {(row.candidate, row.candidate_bound, row.verdict) for row in kernels} == {
        (None, Bound.EXACT, Verdict.REMOVED)
    }


def _with_modules(annotation: KernelAnnotation, path: str) -> KernelAnnotation:
    tables = []
    for table in (annotation.call_table, annotation.launch_table):
        column = pa.array([path] * len(table)).dictionary_encode()
        tables.append(
            table.set_column(table.schema.get_field_index("module"), table.schema.field("module"), column)
        )
    return with_tables(annotation, calls=tables[0], launches=tables[1])


def test_a_module_is_the_same_one_inside_the_wrappers_of_compilation_sharding_and_checkpointing() -> None:
    plain = _with_modules(real("eager_transformer"), "model.layers.0")
    wrapped = _with_modules(
        real("eager_transformer"), "model._orig_mod.layers._fsdp_wrapped_module.0._checkpoint_wrapped_module"
    )
    comparison = compare_annotations(plain, wrapped)
    assert comparison.changes == ()
    assert {row.key for row in _rows(comparison, table=TableName.MODULE)} == {'{"module":"model.layers.0"}'}


def test_modules_known_on_one_side_only_are_in_no_key() -> None:
    comparison = compare_annotations(
        _with_modules(real("eager_transformer"), "model"), real("eager_transformer")
    )
    assert comparison.changes == ()
    assert _rows(comparison, table=TableName.MODULE) == []
    assert [each.field for each in comparison.context["candidate"]] == ["module_known"]

"""Ranks side by side: what is communication, what is overlapped, who is slowest, who is missing."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tlk_tracking import KernelAnnotation, import_trace
from tlk_tracking.analysis.rank_summary import (
    RankSummary,
    Spread,
    missing_ranks,
    same_window,
    summarize_ranks,
)
from tlk_tracking.analysis.rank_work import Communication, covered_ns, part_rank
from tlk_tracking.annotation.manifest import GapRow
from tlk_tracking.cli import tlk
from tlk_tracking.core.errors import ComparisonError, ConfigurationError
from tlk_tracking.core.gaps import Bound, GapReason
from tlk_tracking.recording.recording_ranks import choose_ranks, recording_in
from tlk_tracking.report.annotation_report import render_report

SESSION = "dd000000"


@pytest.fixture(scope="module")
def pair(data_folder: Path) -> tuple[KernelAnnotation, KernelAnnotation]:
    """Return the two ranks of a real DDP window as one fit with the callback would have left them."""
    imported = [
        import_trace(
            data_folder / f"ddp_rank{rank}.trace.json.gz", ops=data_folder / f"ddp_rank{rank}.ops.json"
        )
        for rank in (0, 1)
    ]
    first, second = (with_facts(one, session=SESSION, recording_ranks="all") for one in imported)
    return first, second


def with_facts(annotation: KernelAnnotation, **facts: Any) -> KernelAnnotation:
    return replace(annotation, manifest=msgspec.structs.replace(annotation.manifest, **facts))


def times_longer(annotation: KernelAnnotation, factor: float) -> KernelAnnotation:
    table = annotation.launch_table
    place = table.schema.get_field_index("duration")
    longer = np.round(table["duration"].to_numpy() * factor, 3)
    return replace(
        annotation, launch_table=table.set_column(place, table.schema.field(place), pa.array(longer))
    )


def world(pair: Sequence[KernelAnnotation], size: int) -> Iterator[KernelAnnotation]:
    """Make the ranks of a world of that size, each slower than the one before it."""
    for rank in range(size):
        facts = {"rank": rank, "world_size": size}
        yield with_facts(times_longer(pair[rank % 2], 1 + rank / 1000), **facts)


def row(summary: RankSummary, table: str, key: str | None, measure: str) -> Spread:
    (found,) = [
        each for each in summary.spread if (each.table, each.key, each.measure) == (table, key, measure)
    ]
    return found


# Which ranks record


@pytest.mark.parametrize(
    ("ranks", "chosen", "of_four"),
    [("zero", (0,), (0,)), ("all", "all", (0, 1, 2, 3)), ([2, 0], (0, 2), (0, 2)), ([1], (1,), (1,))],
)
def test_the_ranks_that_record(ranks: Any, chosen: Any, of_four: tuple[int, ...]) -> None:
    assert choose_ranks(ranks) == chosen
    assert recording_in(choose_ranks(ranks), world_size=4) == of_four


@pytest.mark.parametrize("ranks", ["one", "", [], [0, 0], [-1], [True], ["0"], [0.0], 0, None, {0}])
def test_anything_else_is_refused(ranks: Any) -> None:
    with pytest.raises(ConfigurationError, match="zero"):
        choose_ranks(ranks)


def test_a_rank_that_the_fit_has_not_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="names rank 4, and this fit has the ranks 0 to 3"):
        recording_in((0, 4), world_size=4)


@pytest.mark.parametrize(
    ("chosen", "there", "missing"),
    [("all", {0, 2}, (1, 3)), ((0, 3), {0, 1}, (3,)), ((0,), {0}, ()), (None, {0}, ())],
)
def test_who_is_missing(chosen: Any, there: set[int], missing: tuple[int, ...]) -> None:
    assert missing_ranks(chosen, world_size=4, there=there) == missing


# Communication and compute


def test_communication_is_what_calls_of_a_process_group_launched(pair: Sequence[KernelAnnotation]) -> None:
    """NCCL's names are the other source here."""
    for annotation in pair:
        launches = annotation.launches
        nccl = launches[launches["launch_name"].astype(str).str.startswith("nccl")]
        part = part_rank(annotation)
        assert part.communication is not None
        assert part.communication.launches == len(nccl) / 2
        assert part.communication.time_ms == pytest.approx(nccl["duration"].sum() / 1e3 / 2, abs=1e-9)
        assert part.communication.bound is Bound.EXACT
        assert part.device_time_ms == pytest.approx(
            part.communication.time_ms + (part.compute_time_ms or 0), abs=1e-9
        )
        assert {key for table, key in part.cells if table == "communication"} == {*nccl["launch_name"]}


def test_the_overlapped_time_is_what_counting_nanoseconds_gives(pair: Sequence[KernelAnnotation]) -> None:
    for annotation in pair:
        launches = annotation.launches
        nccl = launches["launch_name"].astype(str).str.startswith("nccl")
        busy: set[int] = set()
        for each in launches[~nccl & (launches["kind"] == "kernel")].itertuples():
            busy.update(range(each.start_ns, each.start_ns + round(each.duration * 1000)))
        slow = sum(
            len(busy.intersection(range(each.start_ns, each.start_ns + round(each.duration * 1000))))
            for each in launches[nccl].itertuples()
        )
        communication = part_rank(annotation).communication
        assert communication is not None
        assert communication.overlapped_ms == slow / 1e6 / 2


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=8)


@given(SPANS, SPANS)
def test_covered_time_is_what_counting_gives(
    own: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    def columns(spans: list[tuple[int, int]]) -> tuple[Any, Any]:
        start = np.array([start for start, _ in spans], np.int64)
        return start, start + np.array([length for _, length in spans], np.int64)

    busy = {time for start, length in others for time in range(start, start + length)}
    slow = sum(len(busy.intersection(range(start, start + length))) for start, length in own)
    (start, end), (by_start, by_end) = columns(own), columns(others)
    assert covered_ns(start, end, by_start=by_start, by_end=by_end) == slow


def test_without_names_of_calls_communication_is_unknown(data_folder: Path) -> None:
    part = part_rank(import_trace(data_folder / "ddp_rank0.trace.json.gz"))
    assert part.communication is None
    assert part.launches == 51.0
    assert part.device_time_ms == 4.747875


def test_lost_attribution_bounds_communication_and_not_the_total(pair: Sequence[KernelAnnotation]) -> None:
    part = part_rank(with_facts(pair[0], lower_bound_reasons=(GapReason.FOREIGN_THREAD,)))
    assert isinstance(part.communication, Communication)
    assert part.communication.bound is Bound.LOWER
    assert [part.bound(table, time=True) for table in ("total", "operator")] == [Bound.EXACT, Bound.LOWER]


# Side by side


def test_ranks_of_equal_correlations_are_never_mixed(pair: Sequence[KernelAnnotation]) -> None:
    correlations = [set(each.launch_table["runtime_correlation"].to_pylist()) for each in pair]
    assert correlations[0] & correlations[1]
    summary = summarize_ranks(reversed(pair))
    assert summary.ranks == tuple(part_rank(each) for each in pair)
    assert summary.missing == ()
    assert row(summary, "total", None, "launches").maximum == 51.0


def test_the_spread_is_over_the_ranks(pair: Sequence[KernelAnnotation]) -> None:
    summary = summarize_ranks(world(pair, 4))
    for measure, place in (("launches", 0), ("device_time_ms", 1)):
        values = [part.cells["operator", "c10d.allreduce_"][place] for part in summary.ranks]
        found = row(summary, "operator", "c10d.allreduce_", measure)
        assert (found.minimum, found.median, found.maximum) == (min(values), np.median(values), max(values))
        assert found.largest_on == (None if measure == "launches" else values.index(max(values)))


def test_a_row_that_a_rank_lacks_is_0_there(pair: Sequence[KernelAnnotation]) -> None:
    table = pair[1].launch_table
    place = table.schema.get_field_index("launch_name")
    names = table["launch_name"].cast(pa.string()).to_pylist()
    other = pa.array(["another" if name.startswith("Memset") else name for name in names])
    changed = table.set_column(place, table.schema.field(place), other.dictionary_encode())
    summary = summarize_ranks([pair[0], replace(pair[1], launch_table=changed)])
    found = row(summary, "kernel", "another", "launches")
    assert (found.minimum, found.maximum, found.largest_on) == (0.0, 1.0, 1)


def test_the_slowest_rank_is_the_one_that_computes_longest(pair: Sequence[KernelAnnotation]) -> None:
    """Rank 0 spends most of its time in communication, since it waits there."""
    slower = times_longer(pair[1], 1.5)
    summary = summarize_ranks([pair[0], slower])
    assert summary.slowest is not None
    assert (summary.slowest.rank, summary.slowest.waits_least) == (1, 1)
    assert (summary.slowest.steps_slowest, summary.slowest.steps) == (2, 2)
    compute = [part.compute_time_ms or 0 for part in summary.ranks]
    assert summary.slowest.excess_ms == pytest.approx((compute[1] - compute[0]) / 2)
    assert all(each.excess_ms > 0 for each in summary.slowest.rows)
    assert "c10d.allreduce_" not in {each.key for each in summary.slowest.rows}


def test_who_is_slowest_is_not_guessed(pair: Sequence[KernelAnnotation], data_folder: Path) -> None:
    assert summarize_ranks(pair[:1]).slowest is None
    unnamed = with_facts(import_trace(data_folder / "ddp_rank1.trace.json.gz"), session=SESSION)
    assert summarize_ranks([pair[0], unnamed]).slowest is None


def test_a_missing_rank_is_named(pair: Sequence[KernelAnnotation]) -> None:
    assert summarize_ranks(pair[:1]).missing == (1,)


def test_a_rank_that_raised_says_so(pair: Sequence[KernelAnnotation]) -> None:
    gap = GapRow(reason=GapReason.CAPTURE_RAISED, count=1, evidence="ArithmeticError")
    raised = with_facts(pair[1], gaps=(gap,))
    assert [part.failed for part in summarize_ranks([pair[0], raised]).ranks] == [False, True]


def test_annotations_of_several_windows_are_refused(pair: Sequence[KernelAnnotation]) -> None:
    with pytest.raises(ComparisonError, match="not the ranks of one window"):
        summarize_ranks([pair[0], pair[0]])
    with pytest.raises(ComparisonError, match="not the ranks of one window"):
        summarize_ranks([])


def test_a_window_is_told_by_step_and_session(pair: Sequence[KernelAnnotation]) -> None:
    live = [with_facts(each, source="callback") for each in pair]
    later = with_facts(live[1], session="dd000001")
    assert same_window([*live, later], live[0]) == live
    imported = [pair[0], with_facts(pair[1], session="dd000001")]
    assert same_window(imported, imported[0]) == imported


# Many ranks


def calls_made(pair: Sequence[KernelAnnotation], size: int) -> int:
    """Count the functions that Python calls to summarize a world of that size."""
    ranks, calls = list(world(pair, size)), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        summarize_ranks(ranks)
    finally:
        sys.setprofile(None)
    return calls


def peak_bytes(pair: Sequence[KernelAnnotation], size: int) -> int:
    tracemalloc.start()
    try:
        summary = summarize_ranks(world(pair, size))
        assert len(summary.ranks) == size
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_work_and_memory_are_linear_in_the_ranks(pair: Sequence[KernelAnnotation]) -> None:
    summarize_ranks(pair)
    assert calls_made(pair, 512) <= 9 * calls_made(pair, 64)
    assert peak_bytes(pair, 512) <= 9 * peak_bytes(pair, 64)


def test_512_ranks_are_all_there_and_none_is_mixed_up(pair: Sequence[KernelAnnotation]) -> None:
    summary = summarize_ranks(world(pair, 512))
    assert [part.rank for part in summary.ranks] == list(range(512))
    assert {part.launches for part in summary.ranks} == {51.0}
    assert summary.slowest is not None
    assert summary.slowest.rank == 510  # even ranks are rank 0's trace, which computes longer
    assert row(summary, "total", None, "device_time_ms").largest_on == 510


# Where people see them


@pytest.fixture
def folder(pair: Sequence[KernelAnnotation], tmp_path: Path) -> Path:
    for annotation in pair:
        annotation.save(tmp_path / "ddp" / annotation.folder_name)
    return tmp_path / "ddp"


def run_tlk(*arguments: str) -> str:
    result = CliRunner().invoke(tlk, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_show_puts_the_ranks_side_by_side(folder: Path) -> None:
    said = run_tlk("show", str(folder))
    table = said[said.index("rank (numbers") :].splitlines()
    assert [line.split() for line in table[1:3]] == [
        ["0", "51", "4.7479", "0.23326", "4.5146", "1.0%"],
        ["1", "51", "0.28627", "0.22793", "0.058336", "0.0%"],
    ]
    assert "rank (numbers" not in run_tlk("show", str(folder), "--rank", "1")


def test_show_ranks_says_where_they_differ(folder: Path) -> None:
    said = run_tlk("show", str(folder), "--ranks")
    assert "operator: launches a step are the same on every rank" in said
    assert "c10d.allreduce_" in said
    assert "waits least in communication: its host comes last" in " ".join(said.split())


def test_show_names_a_missing_rank(folder: Path, pair: Sequence[KernelAnnotation]) -> None:
    alone = folder / pair[0].folder_name
    said = " ".join(run_tlk("show", str(alone), "--ranks").split())
    assert "missing: rank 1 was to record this window, and its annotation is not there" in said


def test_show_names_what_other_windows_lack(folder: Path, pair: Sequence[KernelAnnotation]) -> None:
    later = msgspec.structs.replace(pair[1].manifest.window, first_step=50)
    alone = with_facts(pair[1], window=later)
    alone.save(folder / alone.folder_name)
    said = " ".join(run_tlk("show", str(folder), "--window", "2").split())
    assert "missing in other windows: window_000050_dd000000/rank_0" in said
    result = CliRunner().invoke(tlk, ["compare", str(folder), str(folder), "--all-ranks"])
    assert result.stderr.count("lacks window_000050_dd000000/rank_0") == 2


def test_a_single_rank_of_several_is_shown_as_one(pair: Sequence[KernelAnnotation], tmp_path: Path) -> None:
    with_facts(pair[0], recording_ranks=(0,)).save(tmp_path / "one")
    assert "rank (numbers" not in run_tlk("show", str(tmp_path / "one"))


def test_show_ranks_as_json(folder: Path, pair: Sequence[KernelAnnotation]) -> None:
    said = json.loads(run_tlk("show", str(folder), "--ranks", "--json"))
    assert sorted(said) == ["first_step", "missing", "ranks", "slowest", "spread", "world_size"]
    assert [each["rank"] for each in said["ranks"]] == [0, 1]
    assert said["ranks"][1]["communication"] == {
        "bound": "exact", "launches": 3.0, "overlapped_ms": 0.0, "overlapped_share": 0.0, "time_ms": 0.058336,
    }  # fmt: skip
    assert len(said["spread"]) == len(summarize_ranks(pair).spread)


def test_the_report_has_the_ranks_of_its_window(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run_tlk("report", str(folder), "--html", str(page))
    text = page.read_text()
    assert "Ranks side by side" in text
    assert "its host comes last" in text
    run_tlk("report", str(folder), "--html", str(page), "--rank", "1")
    assert "Ranks side by side" not in page.read_text()


def test_the_report_of_512_ranks_stays_small(pair: Sequence[KernelAnnotation]) -> None:
    page = render_report(pair[0], ranks=summarize_ranks(world(pair, 512)))
    assert len(page.encode()) < 1_000_000
    assert "(496 faster ones not drawn)" in page


def test_compare_pools_all_ranks_on_request(folder: Path) -> None:
    said = json.loads(run_tlk("compare", str(folder), str(folder), "--all-ranks", "--json"))
    (launches,) = [
        each for each in said["rows"] if each["table"] == "total" and each["measure"] == "launches"
    ]
    assert (launches["baseline"], launches["verdict"]) == (51.0, "UNCHANGED")

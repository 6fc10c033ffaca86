from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from annotations import real
from click.testing import CliRunner
from paths import DATA
from trace_processor import TraceProcessor, run_trace_processor

from tlk_tracking import KernelAnnotation
from tlk_tracking.cli import tlk
from tlk_tracking.core.errors import TraceError
from tlk_tracking.report.perfetto import write_perfetto
from tlk_tracking.report.timeline import (
    HostTimes,
    Slice,
    Timeline,
    Track,
    lay_out,
    times_in_trace,
    times_of_launches,
)

NAMES = (
    "lightning_fit",
    "eager_transformer",
    "compiled_transformer",
    "cuda_graph_replay",
    "multi_stream_memcpy",
)


@dataclass(kw_only=True)
class Shown:
    """A slice as Perfetto's reader makes it from the packets."""

    track: str
    name: str
    start: int
    end: int
    facts: dict[str, Any] = field(default_factory=dict)
    leaves: list[int] = field(default_factory=list)
    arrives: list[int] = field(default_factory=list)


def _shown(path: Path) -> list[Shown]:
    """Read a trace with Perfetto's own definitions: an end closes what was begun last on its track."""
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = protos.Trace()
    trace.ParseFromString(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    tracks: dict[int, str] = {}
    names: dict[int, str] = {}
    stacks: dict[int, list[Shown]] = defaultdict(list)
    shown = []
    assert trace.packet[0].sequence_flags == protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor.name
        names.update({one.iid: one.name for one in packet.interned_data.event_names})
        if not packet.HasField("track_event"):
            continue
        event, stack = packet.track_event, stacks[packet.track_event.track_uuid]
        if event.type == protos.TrackEvent.TYPE_SLICE_END:
            stack.pop().end = packet.timestamp
            continue
        values = {a.name: getattr(a, str(a.WhichOneof("value"))) for a in event.debug_annotations}
        shown.append(
            Shown(
                track=tracks[event.track_uuid],
                name=names[event.name_iid],
                start=packet.timestamp,
                end=packet.timestamp,
                facts=values,
                leaves=list(event.flow_ids),
                arrives=list(event.terminating_flow_ids),
            )
        )
        if event.type == protos.TrackEvent.TYPE_SLICE_BEGIN:
            stack.append(shown[-1])
    assert [stack for stack in stacks.values() if stack] == []
    return shown


def _arrows(shown: list[Shown]) -> set[tuple[int, int]]:
    """Return (sequence, launch) of each arrow."""
    begins = {number: one.facts["sequence"] for one in shown for number in one.leaves}
    ends = {number: one.facts["launch"] for one in shown for number in one.arrives}
    assert begins.keys() == ends.keys()
    return {(begins[number], ends[number]) for number in begins}


def _relations(annotation: KernelAnnotation) -> set[tuple[int, int]]:
    return {(row["sequence"], row["launch"]) for row in annotation.relation_table.to_pylist()}


def _device_facts(annotation: KernelAnnotation) -> list[tuple[Any, ...]]:
    rows = annotation.launch_table.to_pylist()
    origin = min(row["start_ns"] for row in rows)
    return sorted(
        (row["launch"], row["launch_name"], row["start_ns"] - origin, round(1000 * (row["duration"] or 0)))
        for row in rows
    )


def _shown_device_facts(shown: list[Shown]) -> list[tuple[Any, ...]]:
    records = [one for one in shown if one.track.startswith("device ")]
    origin = min(one.start for one in records)
    return sorted((r.facts["launch"], r.name, r.start - origin, r.end - r.start) for r in records)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["annotation alone", "with its trace"])
def exported(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[KernelAnnotation, Path]:
    annotation = real(name)
    if request.param == "annotation alone":
        times = times_of_launches(annotation)
    else:
        times = times_in_trace(annotation, DATA / f"{name}.trace.json.gz")
    write_perfetto(lay_out(annotation, times), tmp_path / "window.pftrace")
    return annotation, tmp_path / "window.pftrace"


def test_the_timeline_has_every_launch_with_its_name_start_and_duration(
    exported: tuple[KernelAnnotation, Path],
) -> None:
    annotation, path = exported
    assert _shown_device_facts(_shown(path)) == _device_facts(annotation)


def test_the_timeline_has_an_arrow_for_each_relation_and_no_other(
    exported: tuple[KernelAnnotation, Path],
) -> None:
    annotation, path = exported
    assert _arrows(_shown(path)) == _relations(annotation)


def test_with_its_trace_the_timeline_has_every_call_and_every_step(name: str, tmp_path: Path) -> None:
    annotation = real(name)
    timeline = lay_out(annotation, times_in_trace(annotation, DATA / f"{name}.trace.json.gz"))
    write_perfetto(timeline, tmp_path / "window.pftrace")
    shown = _shown(tmp_path / "window.pftrace")
    calls = sorted(one.facts["sequence"] for one in shown if "ATen calls" in one.track)
    steps = {one.facts["step"] for one in shown if one.track == "steps"}
    assert calls == annotation.call_table["sequence"].to_pylist()
    assert steps == {row.step for row in annotation.manifest.window.steps}
    assert timeline.untimed_calls == 0


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceProcessor]:
    with run_trace_processor(tmp_path_factory.mktemp("chromium")) as started:
        yield started


def test_perfettos_own_trace_processor_finds_the_same_launches_and_relations(
    exported: tuple[KernelAnnotation, Path], processor: TraceProcessor
) -> None:
    annotation, path = exported
    processor.load(path.read_bytes())
    rows = processor.query(
        "select extract_arg(s.arg_set_id, 'debug.launch'), s.name, s.ts, s.dur "
        "from slice s join track t on s.track_id = t.id where t.name glob 'device *'"
    )
    arrows = processor.query(
        "select extract_arg(a.arg_set_id, 'debug.sequence'), extract_arg(b.arg_set_id, 'debug.launch') "
        "from flow f join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id"
    )
    origin = min(row[2] for row in rows)
    assert sorted((a, b, ts - origin, dur) for a, b, ts, dur in rows) == _device_facts(annotation)
    assert sorted(arrows) == sorted(_relations(annotation))


def _written(track: Track, path: Path) -> list[tuple[str, int, int]]:
    write_perfetto(Timeline(name="test", tracks=(track,), untimed_calls=0, untimed_launches=0), path)
    return [(one.name, one.start, one.end) for one in _shown(path)]


def test_slices_that_touch_nest_and_start_together_keep_their_ends(tmp_path: Path) -> None:
    spans = [("a", 0, 10), ("b", 0, 5), ("c", 5, 5), ("d", 5, 10), ("e", 10, 12), ("a", 12, 13)]
    slices = tuple(Slice(name=name, start_ns=start, end_ns=end) for name, start, end in spans)
    assert _written(Track(name="t", slices=slices), tmp_path / "t.pftrace") == spans


def test_times_before_the_first_step_are_kept(tmp_path: Path) -> None:
    slices = tuple(Slice(name="k", start_ns=start, end_ns=start + 1) for start in (-7, 0))
    assert _written(Track(name="t", slices=slices), tmp_path / "t.pftrace") == [("k", 0, 1), ("k", 7, 8)]


def test_kernels_of_one_stream_that_overlap_get_rows_of_their_own() -> None:
    annotation = real("multi_stream_memcpy")
    column = [0] * len(annotation.launch_table)
    index = annotation.launch_table.schema.get_field_index("stream")
    table = annotation.launch_table.set_column(
        index, annotation.launch_table.schema.field("stream"), [column]
    )
    one_stream = KernelAnnotation(
        manifest=annotation.manifest,
        call_table=annotation.call_table,
        launch_table=table,
        relation_table=annotation.relation_table,
    )
    tracks = lay_out(one_stream, times_of_launches(one_stream)).tracks
    assert [track for track in tracks if not _lies_well(track.slices)] == []
    assert sum(len(track.slices) for track in tracks if track.name.startswith("device")) == len(table)


def _lies_well(slices: tuple[Slice, ...]) -> bool:
    ends: list[int] = []
    for piece in slices:
        while ends and ends[-1] <= piece.start_ns:
            ends.pop()
        if ends and piece.end_ns > ends[-1]:
            return False
        ends.append(piece.end_ns)
    return True


def test_what_has_no_time_is_counted_and_not_drawn() -> None:
    annotation = real("lightning_fit")
    timeline = lay_out(annotation, HostTimes(calls={}, steps=(), runtime_calls=()))
    assert timeline.untimed_calls == len(annotation.call_table)
    assert [track.name for track in timeline.tracks] == ["device 0, stream 7"]


def test_another_windows_trace_is_refused() -> None:
    with pytest.raises(TraceError, match="not the trace that this annotation was made of"):
        times_in_trace(real("ddp_rank0"), DATA / "ddp_rank1.trace.json.gz")


def test_calls_of_one_phase_that_follow_each_other_are_one_slice() -> None:
    annotation = real("eager_transformer")
    timeline = lay_out(annotation, times_in_trace(annotation, DATA / "eager_transformer.trace.json.gz"))
    phases = [s.name for t in timeline.tracks if t.name.endswith("phases") for s in t.slices]
    assert sorted(phases) == ["backward"] * 2 + ["forward"] * 2


def _said(*arguments: str | Path) -> Iterator[str]:
    result = CliRunner().invoke(tlk, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output + str(result.exception)
    yield from result.output.splitlines()


def test_the_verb_writes_the_file_and_says_what_is_not_in_it(tmp_path: Path) -> None:
    annotation = real("lightning_fit")
    annotation.save(tmp_path / "a")
    path = tmp_path / "w.pftrace.gz"
    with_launches = len({sequence for sequence, _ in _relations(annotation)})
    lines = list(_said("export", tmp_path / "a", "--perfetto", path))
    missing = len(annotation.call_table) - with_launches
    assert (
        lines[1]
        == f"not in it: {missing} ATen calls whose time is not known; --trace adds those of the trace"
    )
    assert len(_shown(path)) == int(lines[0].split(": ")[1].split(" slices")[0])

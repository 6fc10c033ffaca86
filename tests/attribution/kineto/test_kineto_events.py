from __future__ import annotations

import gc
import gzip
import json
import os
from pathlib import Path

import pytest
from synthetic_trace import BACKWARD, MAIN, ORIGIN_US, SESSION, Layout, SyntheticTrace, one_step

from tlk_tracking.annotation.schemas import MAX_NAME_LENGTH
from tlk_tracking.attribution.kineto.kineto_events import EventColumns, read_trace
from tlk_tracking.core.errors import TraceError

ORIGIN_NS = int(ORIGIN_US) * 1000


def _read(trace: SyntheticTrace, folder: Path, layout: Layout = Layout.KINETO_2_13) -> EventColumns:
    return read_trace(trace.write(folder, layout))


def _rows(columns: EventColumns) -> dict[str, list[tuple[object, ...]]]:
    """Return all columns as rows, times in µs from the origin."""
    ranges = {
        name: [
            (label, columns.thread_ids[thread], (start - ORIGIN_NS) / 1000, (end - ORIGIN_NS) / 1000, external)
            for label, thread, start, end, external in zip(
                each.label.tolist(), each.thread.tolist(), each.start_ns.tolist(), each.end_ns.tolist(),
                each.external_id.tolist(), strict=True,
            )
        ]
        for name in ("op_markers", "step_markers", "profiler_steps")
        for each in [getattr(columns, name)]
    }  # fmt: skip
    host, runtime, records = columns.host_ops, columns.runtime_calls, columns.records
    ranges["host_ops"] = [
        (columns.names[label], columns.thread_ids[thread])
        for label, thread in zip(host.label.tolist(), host.thread.tolist(), strict=True)
    ]
    ranges["runtime_calls"] = [
        (columns.names[name], columns.thread_ids[thread], (start - ORIGIN_NS) / 1000, correlation)
        for name, thread, start, correlation in zip(
            runtime.name.tolist(), runtime.thread.tolist(), runtime.start_ns.tolist(),
            runtime.correlation.tolist(), strict=True,
        )
    ]  # fmt: skip
    facts = ("kind", "launch_name", "device", "stream", "bytes", "grid", "block")
    ranges["records"] = list(
        zip(
            ((records.start_ns - ORIGIN_NS) / 1000).tolist(),
            (records.duration_ns / 1000).tolist(),
            records.correlation.tolist(),
            records.external_id.tolist(),
            *(getattr(records, name).to_pylist() for name in facts),
            strict=True,
        )
    )
    return ranges


def _every_kind() -> SyntheticTrace:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000, external_id=1)
    trace.host("ProfilerStep#5", 0, 1000, cat="user_annotation")
    trace.op(0, 100, 200, external_id=2)
    trace.host("aten::mm", 110, 190, external_id=3)
    trace.host("user range", 105, 195, cat="user_annotation")
    trace.host("cuda overhead", 110, 120, cat="overhead")
    trace.host("tlk::0123abcd::op::0", 120, 150, cat="gpu_user_annotation")
    trace.call(11, 120)
    trace.record(11, 130, external_id=3, grid=[4, 2, 1], block=[128, 1, 1])
    trace.op(1, 300, 400, thread=BACKWARD, cat="user_annotation")
    trace.call(12, 310.125, thread=BACKWARD, cat="cuda_driver", name="cuLaunchKernel")
    trace.call(None, 320, thread=BACKWARD, name="cudaDeviceSynchronize")
    trace.record(13, 420, cat="gpu_memcpy", name="Memcpy HtoD", bytes=4096, device=1, stream=20)
    trace.record(14, 430, cat="gpu_memset", name="Memset", bytes=0, duration=0.001)
    return trace


EVERY_KIND = {
    "op_markers": [(0, MAIN, 100, 200, 2), (1, BACKWARD, 300, 400, 0)],
    "step_markers": [(5, MAIN, 0, 1000, 1)],
    "profiler_steps": [(5, MAIN, 0, 1000, 0)],
    "host_ops": [("aten::mm", MAIN)],
    "runtime_calls": [
        ("cudaLaunchKernel", MAIN, 120, 11),
        ("cudaDeviceSynchronize", BACKWARD, 320, 0),
        ("cuLaunchKernel", BACKWARD, 310.125, 12),
    ],
    "records": [
        (130, 5, 11, 3, "kernel", "kernel_a", 0, 7, None, "4,2,1", "128,1,1"),
        (420, 5, 13, 0, "memcpy", "Memcpy HtoD", 1, 20, 4096, None, None),
        (430, 0.001, 14, 0, "memset", "Memset", 0, 7, 0, None, None),
    ],
}


@pytest.mark.parametrize("layout", Layout)
def test_what_is_read_does_not_depend_on_the_layout(tmp_path: Path, layout: Layout) -> None:
    columns = _read(_every_kind(), tmp_path, layout)
    found = _rows(columns)
    found["runtime_calls"].sort(key=lambda row: EVERY_KIND["runtime_calls"].index(row))  # their order is free
    assert found == EVERY_KIND
    assert (columns.session, columns.unreadable_events) == (SESSION, 0)


@pytest.mark.parametrize("layout", [Layout.KINETO_2_11, Layout.KINETO_2_13])
def test_a_trace_of_many_blocks_is_read_whole(tmp_path: Path, layout: Layout) -> None:
    trace = SyntheticTrace()
    for number in range(6000):
        trace.op(number, 10 * number, 10 * number + 9)
        trace.host(f"aten::op{'x' * 300}", 10 * number + 1, 10 * number + 8)
    columns = _read(trace, tmp_path, layout)
    assert columns.op_markers.label.tolist() == list(range(6000))
    assert (len(columns.host_ops), columns.unreadable_events) == (6000, 0)


def test_an_event_larger_than_a_block_is_read_and_its_name_is_cut(tmp_path: Path) -> None:
    trace = one_step()
    trace.record(77, 500, name="k" * 3_000_000)
    trace.record(78, 600)
    names = _read(trace, tmp_path).records.launch_name.to_pylist()
    assert [len(name) for name in names] == [8, 8, MAX_NAME_LENGTH, 8]


def test_a_gzip_file_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(_every_kind().text().encode()))
    assert len(read_trace(path).records) == 3


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    path = one_step().write(tmp_path)
    seen: list[int] = []
    read_trace(path, progress=seen.append)
    assert seen[-1] == path.stat().st_size


def test_nanoseconds_are_rounded_not_cut(tmp_path: Path) -> None:
    trace = one_step()
    trace.record(77, 500)["dur"] = 0.57  # 569.9999... ns as a product of floats
    assert _read(trace, tmp_path).records.duration_ns.tolist()[-1] == 570


def test_the_header_is_kept(tmp_path: Path) -> None:
    trace = one_step()
    trace.header = {
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8, "pg_config": [{"ranks": [0, 1]}]},
        "cuda_runtime_version": 13000,
        "cupti_version": 130001,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}, {"id": 1, "name": "NVIDIA H200"}],
    }
    for layout in (Layout.KINETO_2_11, Layout.KINETO_2_13, Layout.COMPACT):
        header = _read(trace, tmp_path, layout).header
        assert header.distributed_info is not None
        assert (header.distributed_info.rank, header.distributed_info.world_size) == (3, 8)
        assert (header.cuda_runtime_version, header.cupti_version) == (13000, 130001)
        assert [device.name for device in header.device_properties] == ["NVIDIA H200"] * 2


# Markers


def test_a_step_may_have_several_ranges(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(5, 500, 900)
    trace.step(5, 0, 400)
    assert _rows(_read(trace, tmp_path))["step_markers"] == [(5, MAIN, 0, 400, 0), (5, MAIN, 500, 900, 0)]


def test_an_op_marker_that_appears_twice_is_refused(tmp_path: Path) -> None:
    trace = one_step()
    trace.op(1, 600, 700)
    with pytest.raises(TraceError, match="marker of ATen call 1 of session 0123abcd appears twice"):
        _read(trace, tmp_path)


def test_markers_of_two_sessions_are_refused_where_none_is_named(tmp_path: Path) -> None:
    trace = one_step()
    trace.op(0, 2000, 2100, session="ffffffff")
    with pytest.raises(TraceError, match="sessions 0123abcd, ffffffff; give the ops file"):
        _read(trace, tmp_path)


def test_markers_of_very_many_sessions_make_no_long_message(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    for number in range(5000):
        trace.op(0, number, number + 1, session=f"{number:08x}")
    with pytest.raises(TraceError, match="and 4997 more") as caught:
        _read(trace, tmp_path)
    assert len(str(caught.value)) < 300


def test_a_range_of_another_session_is_not_ours(tmp_path: Path) -> None:
    trace = one_step()
    trace.step(5, 0, 1000, session="ffffffff")
    trace.op(0, 500, 600, session="ffffffff")
    columns = read_trace(trace.write(tmp_path), session=SESSION)
    assert (len(columns.op_markers), len(columns.step_markers), len(columns.host_ops)) == (2, 1, 3)


def test_an_annotation_of_another_session_is_no_host_op(tmp_path: Path) -> None:
    trace = one_step()
    trace.op(0, 500, 600, session="ffffffff", cat="user_annotation")
    assert len(read_trace(trace.write(tmp_path), session=SESSION).host_ops) == 1


@pytest.mark.parametrize(
    "name",
    [
        "tlk::0123abcd::op", "tlk::0123abcd::op::", "tlk::0123abcd::op::-1", "tlk::0123abcd::op::1::2",
        "tlk::0123ABCD::op::1", "tlk::0123abc::op::1", "tlk::0123abcd::call::1", "tlk::0123abcd::op::\u0661",
        "tlk::0123abcd::op::9007199254740993", "tlk::", "TLK::0123abcd::op::1", " tlk::0123abcd::op::1",
    ],
)  # fmt: skip
def test_what_only_looks_like_a_marker_is_a_host_op(tmp_path: Path, name: str) -> None:
    trace = SyntheticTrace()
    trace.host(name, 0, 10)
    columns = _read(trace, tmp_path)
    assert (columns.session, len(columns.op_markers), len(columns.host_ops)) == (None, 0, 1)


# Events that cannot be read


@pytest.mark.parametrize(
    "change",
    [
        {"ts": "soon"}, {"ts": None}, {"dur": None}, {"dur": [1]}, {"ts": 1e300}, {"ts": -1e300}, {"dur": 1e18},
        {"ts": 1e400}, {"name": 7}, {"pid": 1.5}, {"tid": 10**30}, {"args": []}, {"args": {"correlation": "x"}},
        {"args": {"correlation": 2**63}}, {"args": {"stream": True}}, {"args": {"grid": [1, 2]}},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("layout", Layout)
def test_an_event_that_cannot_be_read_is_counted_and_the_others_are_kept(
    tmp_path: Path, layout: Layout, change: dict[str, object]
) -> None:
    trace = one_step()
    trace.record(77, 500).update(change)
    trace.record(78, 600)
    path = trace.write(tmp_path, layout)
    path.write_text(path.read_text().replace("Infinity", "1e400"))
    columns = read_trace(path)
    assert columns.records.correlation.tolist() == [11, 12, 78]
    assert columns.unreadable_events == 1


@pytest.mark.parametrize("layout", [Layout.KINETO_2_11, Layout.KINETO_2_13])
@pytest.mark.parametrize(
    "garbage", ['{"ph": "X"', '"name": "a\x01b"', '"name": "\\x"', '"ts": 1.2.3', "}{", ""]
)
def test_broken_json_inside_one_event_costs_that_event(tmp_path: Path, layout: Layout, garbage: str) -> None:
    trace = one_step()
    trace.record(77, 500)["name"] = "@@"
    trace.record(78, 600)
    path = trace.write(tmp_path, layout)
    path.write_text(path.read_text().replace('"name": "@@"', garbage))
    columns = read_trace(path)
    assert columns.records.correlation.tolist() == [11, 12, 78]
    assert columns.unreadable_events == 1


def test_bytes_that_are_no_utf_8_cost_their_event(tmp_path: Path) -> None:
    trace = one_step()
    trace.record(77, 500, name="@@")
    path = trace.write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"@@", b"\xff\xfe"))
    columns = read_trace(path)
    assert (len(columns.records), columns.unreadable_events) == (2, 1)


def test_ids_that_are_below_0_are_unknown(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.record(7, 0, device=-1, stream=-1, bytes=-1)
    records = _read(trace, tmp_path).records
    assert [records.device[0].as_py(), records.stream[0].as_py(), records.bytes[0].as_py()] == [None] * 3


def test_a_thread_of_no_number_has_no_number(tmp_path: Path) -> None:
    trace = one_step()
    trace.host("aten::mm", 5, 20)["tid"] = "main"
    trace.call(99, 10)
    columns = _read(trace, tmp_path)
    assert columns.thread_ids[int(columns.host_ops.thread[1])] is None


# Files that are no trace


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.5, 0.9, 0.99])
def test_a_cut_file_is_refused(tmp_path: Path, layout: Layout, share: float) -> None:
    path = _every_kind().write(tmp_path, layout)
    body = path.read_bytes()
    path.write_bytes(body[: int(len(body) * share)])
    with pytest.raises(TraceError, match=r"is not a Chrome trace|ends in the middle"):
        read_trace(path)


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(_every_kind().text().encode())[:-20])
    with pytest.raises(TraceError, match="cannot read trace"):
        read_trace(path)


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{}", b"null", b"7", b'"x"', b'{"traceEvents": {}}', b'{"traceEvents": 7}', b'{"events": []}',
        b"\x1f\x8b", b"\x1f\x8bgarbage", b"\xff\xfe{}", b"PK\x03\x04", b"[" * 200_000,
        b'{"traceEvents":' + b"[" * 200_000, b"[1, 2, 3]", b'[{"id": 1}]', b'["a", null]', b'{"traceEvents": [7]}',
        b'[{"id": {"ph": "X"}}]', b'{"traceEvents": [{"name": "no phase"}]}',
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(body)
    with pytest.raises(TraceError):
        read_trace(path)


@pytest.mark.parametrize("layout", Layout)
def test_a_trace_without_events_is_one(tmp_path: Path, layout: Layout) -> None:
    columns = _read(SyntheticTrace(), tmp_path, layout)
    assert {name: len(rows) for name, rows in _rows(columns).items()} == dict.fromkeys(EVERY_KIND, 0)


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(TraceError, match="is missing or is not a plain file"):
            read_trace(path)


@pytest.mark.parametrize(
    "header",
    [
        {"distributedInfo": {"rank": -1}},
        {"distributedInfo": {"rank": "zero"}},
        {"distributedInfo": {"world_size": 0}},
        {"deviceProperties": [{"name": "x" * 10_000}]},
        {"cuda_runtime_version": "13"},
        {"cupti_version": 10**30},
    ],
    ids=lambda header: json.dumps(header)[:40],
)
@pytest.mark.parametrize("layout", [Layout.KINETO_2_11, Layout.COMPACT])
def test_a_header_that_says_nonsense_is_refused(
    tmp_path: Path, layout: Layout, header: dict[str, object]
) -> None:
    trace = one_step()
    trace.header = header
    with pytest.raises(TraceError, match="is not a Chrome trace"):
        _read(trace, tmp_path, layout)


def test_the_garbage_collector_is_left_as_it_was(tmp_path: Path) -> None:
    path = one_step().write(tmp_path)
    gc.disable()
    try:
        read_trace(path)
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(TraceError):
        read_trace(tmp_path)
    assert gc.isenabled()

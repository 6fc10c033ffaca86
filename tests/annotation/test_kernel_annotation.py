from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pandas as pd
import pyarrow as pa
import pytest
from damage import (
    CALLS,
    FILES,
    LAUNCHES,
    MANIFEST,
    RELATIONS,
    SUMMARY,
    rewrite_file,
    rewrite_manifest,
    rewrite_table,
    with_value,
)
from real_traces import real_trace
from synthetic_trace import SyntheticTrace, one_step

from tlk_tracking.annotation import checks as annotation_checks
from tlk_tracking.annotation import kernel_annotation as annotation_module
from tlk_tracking.annotation import table_files
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation, load_annotation
from tlk_tracking.attribution.annotate import import_trace
from tlk_tracking.core.errors import AnnotationError
from tlk_tracking.core.records import (
    AtenCall,
    AttributionStatus,
    CallOutcome,
    KernelLaunch,
    Phase,
    TensorInput,
)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return the folder of a saved annotation with two launches, one gap and one launch outside every step."""
    trace = one_step()
    trace.launch(50, 1500)
    trace.call(51, 600, name="cudaGraphLaunch")
    trace.record(51, 610)
    trace.record(51, 620, duration=0)
    import_trace(trace.write(tmp_path)).save(tmp_path / "recorded")
    return tmp_path / "recorded"


@pytest.fixture
def unavailable(tmp_path: Path) -> Path:
    """Return the folder of a saved annotation without device telemetry."""
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.op(0, 100, 200)
    import_trace(trace.write(tmp_path)).save(tmp_path / "unavailable")
    return tmp_path / "unavailable"


def _refusal(folder: Path) -> tuple[str | None, int | None, str | None]:
    with pytest.raises(AnnotationError) as caught:
        load_annotation(folder)
    return caught.value.file, caught.value.row, caught.value.field


# A round trip changes nothing


@pytest.mark.parametrize(
    "name", ["compiled_transformer", "lightning_fit", "cuda_graph_replay", "warmup_leak", "ddp_rank1"]
)
def test_a_round_trip_changes_nothing(tmp_path: Path, name: str) -> None:
    real = real_trace(name)
    before = import_trace(real.trace, ops=real.ops)
    before.save(tmp_path / "saved")
    after = load_annotation(tmp_path / "saved")
    assert after.manifest == before.manifest
    for table in ("call_table", "launch_table", "relation_table"):
        assert getattr(after, table).schema == getattr(before, table).schema
        assert getattr(after, table).to_pylist() == getattr(before, table).to_pylist()
    for frame in ("aten_calls", "launches", "relations"):
        pd.testing.assert_frame_equal(
            getattr(after, frame), getattr(before, frame), check_categorical=False, check_exact=True
        )
    assert list(after.iter_launches()) == list(before.iter_launches())
    assert list(after.iter_aten_calls()) == list(before.iter_aten_calls())


def test_saving_what_was_loaded_writes_the_same_bytes(tmp_path: Path, recorded: Path) -> None:
    load_annotation(recorded).save(tmp_path / "again")
    assert {n: (recorded / n).read_bytes() for n in FILES} == {
        n: (tmp_path / "again" / n).read_bytes() for n in FILES
    }


def test_an_unavailable_annotation_survives_too(unavailable: Path) -> None:
    loaded = load_annotation(unavailable)
    assert list(loaded.iter_launches()) == [
        KernelLaunch(
            launch_name=None,
            device=None,
            stream=None,
            duration=None,
            runtime_correlation=None,
            attribution_status=AttributionStatus.UNAVAILABLE,
        )
    ]


def test_an_empty_annotation_survives_too(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.call(None, 100, name="cudaDeviceSynchronize")
    before = import_trace(trace.write(tmp_path))
    before.save(tmp_path / "saved")
    assert load_annotation(tmp_path / "saved").manifest == before.manifest
    assert before.manifest.availability == "empty"


def test_the_manifest_is_strict_sorted_json(recorded: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (recorded / MANIFEST).read_text(encoding="utf-8")
    said = json.loads(text, parse_constant=refuse)
    assert text == json.dumps(said, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
    assert sorted(said["files"]) == sorted(set(FILES) - {MANIFEST})


def test_every_table_says_its_bound_by_itself(recorded: Path) -> None:
    import pyarrow.parquet as pq

    for name in (CALLS, LAUNCHES, RELATIONS):
        assert pq.read_schema(recorded / name).metadata == {
            b"tlk.lower_bound": b"true",
            b"tlk.lower_bound_reasons": b"graph_replay invalid_time",
        }


# Public records and frames


def test_public_records_are_typed(tmp_path: Path) -> None:
    real = real_trace("raises_in_backward")
    annotation = import_trace(real.trace, ops=real.ops)
    calls = list(annotation.iter_aten_calls())
    assert calls[1] == AtenCall(
        sequence=1,
        step=2,
        phase=Phase.FORWARD,
        operator="aten.addmm",
        overload="default",
        module=None,
        inputs=calls[1].inputs,
        thread=calls[1].thread,
        outcome=CallOutcome.RETURNED,
    )
    assert calls[1].inputs is not None
    assert isinstance(calls[1].inputs[0], TensorInput)
    launch = next(annotation.iter_launches())
    assert launch.attribution_status is AttributionStatus.ATTRIBUTED
    assert isinstance(launch.runtime_correlation, int)


def test_frames_keep_integers_and_say_what_is_unknown(recorded: Path) -> None:
    launches = load_annotation(recorded).launches
    assert {
        name: str(launches[name].dtype) for name in ("step", "runtime_correlation", "time_valid", "duration")
    } == {
        "step": "Int64",
        "runtime_correlation": "Int64",
        "time_valid": "boolean",
        "duration": "float64",
    }
    assert isinstance(launches["launch_name"].dtype, pd.CategoricalDtype)
    assert launches["step"].isna().tolist() == [False, False, False, False, True]


def test_a_notebook_shows_numbers_with_their_bounds_and_no_markup_of_others(tmp_path: Path) -> None:
    trace = one_step()
    trace.record(77, 500, name="<script>alert(1)</script>")
    shown = import_trace(trace.write(tmp_path))._repr_html_()
    assert "≥ 2" in shown
    assert "record_without_launch (1)" in shown
    assert "script" not in shown


# Saving is all or nothing


def test_a_folder_that_exists_is_never_written_into(recorded: Path) -> None:
    annotation = load_annotation(recorded)
    with pytest.raises(AnnotationError, match="exists already"):
        annotation.save(recorded)
    (recorded.parent / "link").symlink_to(recorded.parent / "nowhere")
    with pytest.raises(AnnotationError, match="exists already"):
        annotation.save(recorded.parent / "link")


@pytest.mark.parametrize("after_files", range(6))
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_save_that_is_cut_leaves_nothing(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, after_files: int, error: Any
) -> None:
    written = []

    def fsync(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > after_files:
            raise error

    def rename(*_: object) -> None:
        raise error

    annotation = load_annotation(recorded)
    before = sorted(recorded.parent.iterdir())
    monkeypatch.setattr(annotation_module.os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((AnnotationError, KeyboardInterrupt)):
        annotation.save(recorded.parent / "new")
    monkeypatch.undo()
    assert sorted(recorded.parent.iterdir()) == before


def test_where_nothing_can_be_written_the_error_says_so(recorded: Path) -> None:
    with pytest.raises(AnnotationError, match="cannot be written: "):
        load_annotation(recorded).save(recorded / MANIFEST / "below")


# Damage to the manifest

Change = Callable[[dict[str, Any]], object]


def _set(path: str, value: object) -> Change:
    def change(said: Any) -> None:
        *parents, last = path.split(".")
        for key in parents:
            said = said[int(key) if key.isdigit() else key]
        said[last] = value

    return change


def _delete(path: str) -> Change:
    def change(said: Any) -> None:
        *parents, last = path.split(".")
        for key in parents:
            said = said[int(key) if key.isdigit() else key]
        del said[last]

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_set("surprise", 1), "surprise"),
        (_set("window.surprise", 1), "window.surprise"),
        (lambda said: said["files"].update({CALLS: {}}), "files[...].rows"),
        (_set("environment.user", "me"), "environment.user"),
        (_delete("session"), "session"),
        (_delete("window.steps"), "window.steps"),
        (_set("session", "0123ABCD"), "session"),
        (_set("rank", -1), "rank"),
        (_set("rank", "0"), "rank"),
        (_set("rank", 2**60), "rank"),
        (_set("availability", "perhaps"), "availability"),
        (_set("lower_bound", 1), "lower_bound"),
        (_set("lower_bound", False), None),
        (_set("lower_bound_reasons", []), None),
        (_set("lower_bound_reasons", ["because"]), "lower_bound_reasons[0]"),
        (_set("availability_reason", "none"), "availability_reason"),
        (_set("availability", "empty"), "availability"),
        (_set("counts.launches.value", 99), "launches"),
        (_set("counts.launches.value", None), "launches"),
        (_set("counts.launches.value", -1), "launches"),
        (_set("counts.launches.value", 10**400), "launches"),
        (_set("counts.attributed.bound", "exact"), "attributed"),
        (_set("counts.relations.bound", "sort of"), "counts[...].bound"),
        (_set("counts.more", {"value": 1, "bound": "exact"}), "counts"),
        (_delete("counts.kernels"), "counts"),
        (_delete("times.device_busy_us"), "counts"),
        (_set("times.device_time_us.value", 11), "device_time_us"),
        (_set("gaps", []), "gaps"),
        (_set("gaps.0.count", 7), "gaps"),
        (_set("gaps.1.count", 7), "gaps"),
        (_set("gaps.0.count", 0), "gaps[0].count"),
        (_set("audit.agreed", None), "audit"),
        (_set("audit.agreed", 77), "audit"),
        (_set("window.steps", [{"step": 6, "outcome": "complete"}]), "step"),
        (_set("window.steps", [{"step": 5, "outcome": "complete"}] * 2), "window.steps"),
        (
            _set("window.steps", [{"step": 6, "outcome": "raised"}, {"step": 5, "outcome": "complete"}]),
            "window.steps",
        ),
        (_set("window.requested", 0), "window.steps"),
        (_set("rank", 1), "rank"),
        (_set("world_size", 0), "world_size"),
        (_set("recording_ranks", [0, 1]), "recording_ranks"),
        (_set("environment.world_size", 2), "world_size"),
        (_set("notes.surprise", 1), "notes"),
        (_set("schema_version", 2), "schema"),
        (_set("schema", "something else"), "schema"),
        (_set("files", {}), "files"),
        (_delete("files"), "files"),
        (_set("notes.empty_transfers", -1), "notes[...]"),
        (_set("environment.torch", "x" * 5000), "environment.torch"),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_refused_and_the_field_is_named(
    recorded: Path, change: Change, field: str | None
) -> None:
    rewrite_manifest(recorded, change)
    file, _, named = _refusal(recorded)
    assert (file in (MANIFEST, CALLS, LAUNCHES), named) == (True, field)


def test_every_field_of_the_manifest_must_be_there(recorded: Path) -> None:
    body = (recorded / MANIFEST).read_bytes()
    refused = []
    for name in json.loads(body):
        (recorded / MANIFEST).write_bytes(body)
        rewrite_manifest(recorded, _delete(name))
        refused.append(_refusal(recorded)[0])
    assert refused == [MANIFEST] * len(msgspec.json.decode(body))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{", b"\xff\xfe", b"{}", b'{"schema": NaN}', b"[" * 100_000, b'{"a":' * 100_000,
        b'{"schema":"tlk_tracking.kernel_annotation","schema_version":1,"schema_version":2}',
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_a_manifest_that_is_no_strict_json_object_of_ours_is_refused(recorded: Path, body: bytes) -> None:
    (recorded / MANIFEST).write_bytes(body)
    assert _refusal(recorded)[0] == MANIFEST


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_refused(recorded: Path, constant: str) -> None:
    body = (recorded / MANIFEST).read_text(encoding="utf-8")
    (recorded / MANIFEST).write_text(body.replace('"global_step": 0', f'"global_step": {constant}'))
    assert _refusal(recorded)[0] == MANIFEST


def test_a_name_of_a_megabyte_makes_no_message_of_a_megabyte(recorded: Path) -> None:
    rewrite_manifest(recorded, _set("x" * 1_000_000, 1))
    with pytest.raises(AnnotationError) as caught:
        load_annotation(recorded)
    assert len(str(caught.value)) < 2000


# Damage to a table, with digests that fit


@pytest.mark.parametrize(
    ("name", "row", "field", "value"),
    [
        (CALLS, 1, "sequence", 0),
        (CALLS, 0, "sequence", -1),
        (CALLS, 1, "step", 77),
        (CALLS, 0, "phase", "sideways"),
        (CALLS, 1, "outcome", "perhaps"),
        (CALLS, 0, "inputs", "[["),
        (CALLS, 1, "inputs", '[["a", 1, 2]]'),
        (LAUNCHES, 2, "launch", 7),
        (LAUNCHES, 2, "launch", 1),
        (LAUNCHES, 0, "attribution_status", "unavailable"),
        (LAUNCHES, 0, "attribution_status", "unattributed"),
        (LAUNCHES, 3, "attribution_status", "attributed"),
        (LAUNCHES, 1, "attribution_status", None),
        (LAUNCHES, 1, "kind", "memory"),
        (LAUNCHES, 1, "kind", None),
        (LAUNCHES, 1, "step", 6),
        (LAUNCHES, 1, "gap", "launch_without_record"),
        (LAUNCHES, 1, "gap", "because"),
        (LAUNCHES, 0, "duration", float("nan")),
        (LAUNCHES, 0, "duration", float("inf")),
        (LAUNCHES, 0, "duration", -1.0),
        (LAUNCHES, 0, "duration", 0.0),
        (LAUNCHES, 0, "duration", 1e300),
        (LAUNCHES, 0, "duration", None),
        (LAUNCHES, 0, "start_ns", 2**62),
        (LAUNCHES, 0, "start_ns", None),
        (LAUNCHES, 0, "time_valid", None),
        (LAUNCHES, 0, "launch_latency_ns", -1),
        (LAUNCHES, 0, "bytes", -1),
        (LAUNCHES, 0, "device", -1),
        (LAUNCHES, 0, "stream", -1),
        (LAUNCHES, 0, "grid", "1,2"),
        (LAUNCHES, 1, "block", "=1,2,3"),
        (RELATIONS, 1, "sequence", 99),
        (RELATIONS, 1, "launch", 99),
        (RELATIONS, 1, "launch", -1),
        (RELATIONS, 0, "origin", "guess"),
        (RELATIONS, 0, "origin", None),
    ],
)
def test_a_damaged_row_is_refused_and_file_row_and_field_are_named(
    recorded: Path, name: str, row: int, field: str, value: object
) -> None:
    rewrite_table(recorded, name, with_value(row, field, value))
    assert _refusal(recorded) == (name, row, field)


@pytest.mark.parametrize(
    ("name", "field"),
    [(CALLS, "sequence"), (LAUNCHES, "launch"), (RELATIONS, "sequence"), (RELATIONS, "launch")],
)
def test_a_key_is_never_null(recorded: Path, name: str, field: str) -> None:
    rewrite_table(recorded, name, with_value(1, field, None))
    assert _refusal(recorded) == (name, 1, field)


def test_a_relation_that_stands_there_twice_is_refused(recorded: Path) -> None:
    rewrite_table(recorded, RELATIONS, lambda t: pa.concat_tables([t, t.slice(1, 1)]))
    assert _refusal(recorded) == (RELATIONS, 2, None)


@pytest.mark.parametrize("name", [CALLS, LAUNCHES, RELATIONS])
def test_a_count_that_disagrees_with_the_rows_is_refused(recorded: Path, name: str) -> None:
    rewrite_table(recorded, name, lambda t: t.slice(0, len(t) - 1))
    with pytest.raises(AnnotationError):
        load_annotation(recorded)


def test_a_valid_row_more_or_less_is_seen_in_the_counts(recorded: Path) -> None:
    def another(table: pa.Table) -> pa.Table:
        last = with_value(0, "sequence", 99)(table.slice(0, 1))
        return pa.concat_tables([table, last.cast(table.schema)]).unify_dictionaries()

    rewrite_table(recorded, CALLS, another)
    assert _refusal(recorded) == (MANIFEST, None, "aten_calls")


@pytest.mark.parametrize("name", [CALLS, LAUNCHES, RELATIONS])
@pytest.mark.parametrize("change", ["extra", "missing", "renamed", "reordered", "retyped"])
def test_other_columns_are_refused(recorded: Path, name: str, change: str) -> None:
    def other(table: pa.Table) -> pa.Table:
        first, second, *rest = table.column_names
        return {
            "extra": lambda: table.append_column("extra", pa.nulls(len(table))),
            "missing": lambda: table.drop_columns([rest[-1] if rest else second]),
            "renamed": lambda: table.rename_columns([first, "other", *rest]),
            "reordered": lambda: table.select([second, first, *rest]),
            "retyped": lambda: table.set_column(0, first, table[first].cast(pa.int32())),
        }[change]()

    rewrite_table(recorded, name, other)
    file, _, field = _refusal(recorded)
    assert (file, field is not None) == (name, change == "retyped")


def test_an_unavailable_row_that_states_a_fact_or_has_company_is_refused(unavailable: Path) -> None:
    body = (unavailable / LAUNCHES).read_bytes()
    rewrite_table(unavailable, LAUNCHES, with_value(0, "duration", 1.0))
    assert _refusal(unavailable) == (LAUNCHES, 0, "duration")
    rewrite_file(unavailable, LAUNCHES, body, rows=1)
    rewrite_table(unavailable, LAUNCHES, lambda t: pa.concat_tables([t, t]))
    assert _refusal(unavailable) == (LAUNCHES, None, None)
    rewrite_file(unavailable, LAUNCHES, body, rows=1)
    rewrite_table(unavailable, LAUNCHES, with_value(0, "attribution_status", "unattributed"))
    assert _refusal(unavailable) == (LAUNCHES, 0, "attribution_status")


def test_an_unavailable_annotation_has_no_relations_and_no_audit(recorded: Path, unavailable: Path) -> None:
    body = (unavailable / RELATIONS).read_bytes()
    rewrite_table(
        unavailable,
        RELATIONS,
        lambda t: pa.Table.from_pylist([{"sequence": 0, "launch": 0, "origin": "dispatch"}], schema=t.schema),
    )
    assert _refusal(unavailable) == (RELATIONS, 0, None)
    rewrite_file(unavailable, RELATIONS, body, rows=0)
    rewrite_manifest(unavailable, _set("audit.agreed", 0))
    assert _refusal(unavailable) == (MANIFEST, None, "audit")


# Damage to files


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(recorded: Path, name: str) -> None:
    (recorded / name).unlink()
    assert _refusal(recorded) == (name, None, None)


@pytest.mark.parametrize("name", FILES)
def test_a_link_is_never_followed(recorded: Path, name: str) -> None:
    shutil.copy(recorded / name, recorded.parent / name)
    (recorded / name).unlink()
    (recorded / name).symlink_to(recorded.parent / name)
    assert _refusal(recorded) == (name, None, None)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_or_a_pipe_is_no_file(recorded: Path, name: str) -> None:
    (recorded / name).unlink()
    (recorded / name).mkdir()
    assert _refusal(recorded) == (name, None, None)
    (recorded / name).rmdir()
    os.mkfifo(recorded / name)
    assert _refusal(recorded) == (name, None, None)


@pytest.mark.parametrize("name", sorted(set(FILES) - {MANIFEST}))
def test_one_flipped_bit_is_refused(recorded: Path, name: str) -> None:
    body = bytearray((recorded / name).read_bytes())
    body[len(body) // 2] ^= 1
    (recorded / name).write_bytes(body)
    assert _refusal(recorded) == (name, None, None)


@pytest.mark.parametrize("name", [CALLS, LAUNCHES, RELATIONS])
@pytest.mark.parametrize("body", [b"", b"PAR1", b"PAR1PAR1", b"garbage" * 100])
def test_what_is_no_parquet_is_refused(recorded: Path, name: str, body: bytes) -> None:
    rewrite_file(recorded, name, body)
    assert _refusal(recorded) == (name, None, None)


@pytest.mark.parametrize("name", [CALLS, LAUNCHES, RELATIONS])
def test_cut_parquet_is_refused(recorded: Path, name: str) -> None:
    body = (recorded / name).read_bytes()
    for length in range(0, len(body), 397):
        rewrite_file(recorded, name, body[:length])
        assert _refusal(recorded) == (name, None, None)


def test_swapped_files_are_refused(recorded: Path) -> None:
    calls, launches = (recorded / CALLS).read_bytes(), (recorded / LAUNCHES).read_bytes()
    rewrite_file(recorded, CALLS, launches)
    rewrite_file(recorded, LAUNCHES, calls)
    assert _refusal(recorded) == (CALLS, None, None)


def test_tables_of_another_annotation_are_refused(recorded: Path, unavailable: Path) -> None:
    rewrite_file(recorded, CALLS, (unavailable / CALLS).read_bytes(), rows=1)
    assert _refusal(recorded) == (CALLS, None, None)  # another bound, said in the table itself


def test_a_table_that_says_another_bound_is_refused(recorded: Path) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(recorded / RELATIONS).replace_schema_metadata({"tlk.lower_bound": "false"})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    rewrite_file(recorded, RELATIONS, sink.getvalue().to_pybytes())
    assert _refusal(recorded) == (RELATIONS, None, None)


def test_a_summary_of_other_rows_is_refused(recorded: Path) -> None:
    rewrite_file(recorded, SUMMARY, (recorded / SUMMARY).read_bytes() + b"one more\n")
    assert _refusal(recorded) == (SUMMARY, None, None)


def test_files_beside_those_of_the_annotation_are_left_alone(recorded: Path) -> None:
    (recorded / "report.html").write_text("<html>")
    assert isinstance(load_annotation(recorded), KernelAnnotation)


# Limits


def test_a_manifest_larger_than_its_limit_is_not_read(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(annotation_module, "MAX_MANIFEST_BYTES", 100)
    assert _refusal(recorded) == (MANIFEST, None, None)


@pytest.mark.parametrize(
    ("module", "limit", "file"),
    [
        (table_files, "MAX_ROWS", CALLS),
        (table_files, "MAX_DECODED_BYTES", CALLS),
        (annotation_module, "MAX_MANIFEST_BYTES", MANIFEST),
        (annotation_checks, "MAX_TEXT_BYTES", LAUNCHES),
    ],
)
def test_what_would_not_be_loaded_is_not_saved(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, limit: str, file: str
) -> None:
    annotation = load_annotation(recorded)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(module, limit, 1)
    with pytest.raises(AnnotationError) as caught:
        annotation.save(tmp_path / "again")
    assert (caught.value.file, sorted(tmp_path.iterdir())) == (file, before)


@pytest.mark.parametrize("limit", ["MAX_ROWS", "MAX_DECODED_BYTES"])
def test_a_table_larger_than_its_limits_is_not_decoded(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(table_files, limit, 1)
    assert _refusal(recorded) == (CALLS, None, None)


def test_a_parquet_bomb_is_refused_by_what_its_footer_says(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes that would be very many."""

    def bomb(table: pa.Table) -> pa.Table:
        return with_value(0, "operator", "x" * (1 << 24))(table)

    rewrite_table(recorded, CALLS, bomb)
    monkeypatch.setattr(table_files, "MAX_DECODED_BYTES", 1 << 23)
    assert (recorded / CALLS).stat().st_size < 1 << 16
    assert _refusal(recorded) == (CALLS, None, None)


def test_texts_that_only_memory_could_not_hold_are_refused(recorded: Path) -> None:
    """A dictionary holds a text once however many rows name it; written out it is as often as there are rows."""

    def bomb(table: pa.Table) -> pa.Table:
        rows = 200_000
        name = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * (1 << 16)]))
        columns = {n: pa.nulls(rows, table.schema.field(n).type) for n in table.column_names}
        columns |= {"sequence": pa.array(range(rows)), "operator": name}
        return pa.table(columns, schema=table.schema)

    rewrite_table(recorded, CALLS, bomb)
    assert _refusal(recorded) == (CALLS, None, "operator")


@pytest.mark.parametrize(
    ("name", "row", "field", "length"),
    [(CALLS, 1, "operator", 65_537), (CALLS, 0, "module", 4_097), (LAUNCHES, 3, "launch_name", 65_537)],
)
def test_a_text_of_more_than_is_ever_written_is_refused(
    recorded: Path, name: str, row: int, field: str, length: int
) -> None:
    rewrite_table(recorded, name, with_value(row, field, "x" * length))
    assert _refusal(recorded) == (name, row, field)


def test_an_annotation_is_data_and_never_changed(recorded: Path) -> None:
    annotation = load_annotation(recorded)
    other = replace(annotation, call_table=annotation.call_table.slice(0, 1))
    assert (len(other.aten_calls), len(annotation.aten_calls)) == (1, 2)

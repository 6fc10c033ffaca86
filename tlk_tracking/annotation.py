"""One rank's record of one window: tables and a manifest in memory, and their files (save, load, check)."""

from __future__ import annotations

import hashlib
import html
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tlk_tracking.annotation_checks import check_tables
from tlk_tracking.errors import AnnotationError
from tlk_tracking.launch_summary import encode_summary, summarize_launches
from tlk_tracking.manifest import MANIFEST_FILE, FileRow, Manifest, decode_manifest, encode_manifest
from tlk_tracking.records import (
    AtenCall,
    AttributionStatus,
    CallOutcome,
    KernelLaunch,
    Phase,
    StepOutcome,
    TensorInput,
    window_folder,
)
from tlk_tracking.tables import ATEN_CALLS, KERNEL_LAUNCHES, LAUNCH_RELATIONS

CALLS_FILE = "aten_calls.parquet"
LAUNCHES_FILE = "kernel_launches.parquet"
RELATIONS_FILE = "launch_relations.parquet"
SUMMARY_FILE = "launch_summary.csv"
REPORT_FILE = "report.html"
TABLE_FILES = {CALLS_FILE: ATEN_CALLS, LAUNCHES_FILE: KERNEL_LAUNCHES, RELATIONS_FILE: LAUNCH_RELATIONS}

MAX_MANIFEST_BYTES = 64 << 20
MAX_FILE_BYTES = 2 << 30
MAX_ROWS = 50_000_000


@dataclass(frozen=True, kw_only=True)
class KernelAnnotation:
    """Everything one rank recorded in one window.

    Attributes:
        manifest: counts and times with their bounds, gaps, window, environment.
        call_table: one row an ATen call, columns `tables.ATEN_CALLS`.
        launch_table: one row a kernel launch, columns `tables.KERNEL_LAUNCHES`.
        relation_table: one row a relation, columns `tables.LAUNCH_RELATIONS`.
    """

    manifest: Manifest
    call_table: pa.Table
    launch_table: pa.Table
    relation_table: pa.Table

    @cached_property
    def aten_calls(self) -> pd.DataFrame:
        """The ATen calls as a frame; texts are categories, unknown is NA."""
        return _frame(self.call_table)

    @cached_property
    def launches(self) -> pd.DataFrame:
        """The kernel launches as a frame; `duration` in µs, `start_ns` from the start of the first bracket."""
        return _frame(self.launch_table)

    @cached_property
    def relations(self) -> pd.DataFrame:
        """The (ATen call, kernel launch) pairs as a frame."""
        return _frame(self.relation_table)

    @property
    def complete_steps(self) -> tuple[int, ...]:
        """The steps whose bracket ended well; per-step numbers are over these."""
        return tuple(row.step for row in self.manifest.window.steps if row.outcome is StepOutcome.COMPLETE)

    @property
    def folder_name(self) -> str:
        """The annotation's place below `kernel_telemetry/`."""
        return window_folder(self.manifest.window.first_step, self.manifest.session, self.manifest.rank)

    def iter_launches(self) -> Iterator[KernelLaunch]:
        """Yield the public record of each kernel launch, in table order."""
        names = ["launch_name", "device", "stream", "duration", "runtime_correlation", "attribution_status"]
        for batch in self.launch_table.select(names).to_batches(max_chunksize=10_000):
            for row in batch.to_pylist():
                row["attribution_status"] = AttributionStatus(row["attribution_status"])
                yield KernelLaunch(**row)

    def iter_aten_calls(self) -> Iterator[AtenCall]:
        """Yield the public record of each ATen call, in table order."""
        for batch in self.call_table.drop_columns(["module_call"]).to_batches(max_chunksize=10_000):
            for row in batch.to_pylist():
                row["phase"] = None if row["phase"] is None else Phase(row["phase"])
                row["outcome"] = None if row["outcome"] is None else CallOutcome(row["outcome"])
                row["inputs"] = None if row["inputs"] is None else decode_inputs(row["inputs"])
                yield AtenCall(**row)

    def save(self, folder: Path | str) -> None:
        """Write the annotation's files into `folder`, which appears whole or not at all.

        Raises:
            AnnotationError: something of that name exists already.
        """
        save_annotation(self, Path(folder))

    def _repr_html_(self) -> str:
        numbers = {**self.manifest.counts, **self.manifest.times}
        signs = {"exact": "", "lower": "≥ ", "upper": "≤ ", "unknown": "? "}
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:right'>"
            f"{'unknown' if n.value is None else signs[n.bound.value] + format(n.value, ',')}</td></tr>"
            for name, n in numbers.items()
        )
        gaps = ", ".join(f"{g.reason.value} ({g.count})" for g in self.manifest.gaps) or "none"
        return (
            f"<b>Kernel annotation {self.manifest.session}</b>, rank {self.manifest.rank}, "
            f"steps {', '.join(str(s) for s in self.complete_steps) or 'none complete'}: "
            f"{self.manifest.availability.value}"
            f"{', some numbers are lower bounds' if self.manifest.lower_bound else ''}"
            f"<table>{rows}</table>gaps: {html.escape(gaps)}"
        )


def encode_inputs(inputs: tuple[TensorInput, ...]) -> str:
    """Return the canonical text of an ATen call's tensor inputs."""
    return msgspec.json.encode([[i.shape, i.dtype, i.device] for i in inputs]).decode()


def decode_inputs(text: str) -> tuple[TensorInput, ...]:
    """Read the text of an ATen call's tensor inputs.

    Raises:
        AnnotationError: it is not a list of [shape, dtype, device].
    """
    try:
        rows = msgspec.json.decode(text, type=list[tuple[tuple[int, ...], str, str]])
    except (msgspec.DecodeError, RecursionError) as error:
        raise AnnotationError(str(error), file=CALLS_FILE, field="inputs") from error
    return tuple(TensorInput(shape=shape, dtype=dtype, device=device) for shape, dtype, device in rows)


def save_annotation(annotation: KernelAnnotation, folder: Path) -> None:
    """Write the files of an annotation; `folder` appears whole or not at all (temporary sibling, then rename)."""
    if os.path.lexists(folder):
        raise AnnotationError(f"{folder.name} exists already; choose a new folder", field=None)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".partial-{folder.name}-", dir=folder.parent))
    try:
        _write_files(annotation, partial)
        partial.rename(folder)
    except BaseException:  # nothing half-written stays, whatever ends the save
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_annotation(folder: Path | str) -> KernelAnnotation:
    """Read an annotation's files and check everything in them.

    Raises:
        AnnotationError: a file is missing, damaged or does not fit the others; it names file, row and field.
    """
    folder = Path(folder)
    manifest = decode_manifest(_read(folder, MANIFEST_FILE, MAX_MANIFEST_BYTES))
    expected = {*TABLE_FILES, SUMMARY_FILE}
    if set(manifest.files) != expected:
        raise AnnotationError(
            f"lists {sorted(manifest.files)}, not {sorted(expected)}", file=MANIFEST_FILE, field="files"
        )
    bodies = {}
    for name, row in sorted(manifest.files.items()):
        body = _read(folder, name, MAX_FILE_BYTES)
        if len(body) != row.bytes or hashlib.sha256(body).hexdigest() != row.sha256:
            raise AnnotationError("does not match the digest in the manifest", file=name)
        bodies[name] = body
    tables = {name: _parse(name, bodies[name], rows=manifest.files[name].rows) for name in TABLE_FILES}
    annotation = KernelAnnotation(
        manifest=msgspec.structs.replace(manifest, files={}),
        call_table=tables[CALLS_FILE],
        launch_table=tables[LAUNCHES_FILE],
        relation_table=tables[RELATIONS_FILE],
    )
    check_tables(
        annotation.manifest,
        calls=annotation.call_table,
        launches=annotation.launch_table,
        relations=annotation.relation_table,
    )
    return annotation


def summary_table(annotation: KernelAnnotation) -> pa.Table:
    """Return the rows of `launch_summary.csv`; none when device telemetry is unavailable."""
    return summarize_launches(
        calls=annotation.call_table,
        launches=annotation.launch_table,
        relations=annotation.relation_table,
        complete_steps=annotation.complete_steps,
        reasons=frozenset(annotation.manifest.lower_bound_reasons),
    )


def _write_files(annotation: KernelAnnotation, folder: Path) -> None:
    tables = {
        CALLS_FILE: annotation.call_table,
        LAUNCHES_FILE: annotation.launch_table,
        RELATIONS_FILE: annotation.relation_table,
    }
    summary = summary_table(annotation)
    rows = {name: len(table) for name, table in tables.items()} | {SUMMARY_FILE: len(summary)}
    bodies = {name: _parquet(table, annotation.manifest) for name, table in tables.items()}
    bodies[SUMMARY_FILE] = encode_summary(summary)
    files = {
        name: FileRow(rows=rows[name], bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
        for name, body in bodies.items()
    }
    bodies[MANIFEST_FILE] = encode_manifest(msgspec.structs.replace(annotation.manifest, files=files))
    for name, body in bodies.items():
        with (folder / name).open("xb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())


def _parquet(table: pa.Table, manifest: Manifest) -> bytes:
    # Every file says its bound, also when it is found alone.
    said = {
        "tlk.lower_bound": "true" if manifest.lower_bound else "false",
        "tlk.lower_bound_reasons": " ".join(reason.value for reason in manifest.lower_bound_reasons),
    }
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(said), sink, compression="zstd", compression_level=9)
    return sink.getvalue()


def _read(folder: Path, name: str, limit: int) -> bytes:
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise AnnotationError("is missing or is not a plain file", file=name)
    size = path.stat().st_size
    if size > limit:
        raise AnnotationError(f"has {size} bytes, more than the limit of {limit}", file=name)
    try:
        return path.read_bytes()
    except OSError as error:
        raise AnnotationError(f"cannot be read: {error.strerror}", file=name) from error


def _parse(name: str, body: bytes, *, rows: int) -> pa.Table:
    schema = TABLE_FILES[name]
    try:
        file = pq.ParquetFile(io.BytesIO(body))
        if file.metadata.num_rows != rows or rows > MAX_ROWS:
            raise AnnotationError(f"has {file.metadata.num_rows} rows, the manifest says {rows}", file=name)
        stored = file.schema_arrow
        if stored.names != schema.names:
            raise AnnotationError(f"has the columns {stored.names}, not {schema.names}", file=name)
        for field in schema:
            if stored.field(field.name).type != field.type:
                raise AnnotationError(
                    f"is {stored.field(field.name).type}, not {field.type}", file=name, field=field.name
                )
        table = file.read().replace_schema_metadata(None)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, AnnotationError):
            raise
        raise AnnotationError(f"is not readable parquet: {error}", file=name) from error
    return table.cast(schema)


def _frame(table: pa.Table) -> pd.DataFrame:
    """Nullable integers stay integers; texts become categories."""
    kinds = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
    return table.to_pandas(types_mapper=kinds.get)

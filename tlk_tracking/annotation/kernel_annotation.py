"""One rank's record of one window: tables and a manifest in memory, and their files (save, load, check)."""

from __future__ import annotations

import hashlib
import html
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import pandas as pd
import pyarrow as pa

from tlk_tracking.annotation.checks import check_lengths, check_tables
from tlk_tracking.annotation.launch_summary import encode_summary, summarize_launches
from tlk_tracking.annotation.manifest import FileRow, Manifest, decode_manifest, encode_manifest
from tlk_tracking.annotation.module_summary import summarize_modules
from tlk_tracking.annotation.schemas import (
    ATEN_CALLS,
    CALLS_FILE,
    FUSED_FILE,
    FUSED_NODES,
    KERNEL_LAUNCHES,
    LAUNCH_RELATIONS,
    LAUNCHES_FILE,
    RELATIONS_FILE,
)
from tlk_tracking.annotation.table_files import (
    MAX_FILE_BYTES,
    check_file_size,
    check_table_size,
    decode_table,
    encode_table,
    read_plain,
)
from tlk_tracking.core.errors import AnnotationError
from tlk_tracking.core.places import MANIFEST_FILE, window_folder
from tlk_tracking.core.records import (
    AtenCall,
    AttributionStatus,
    Availability,
    CallOutcome,
    KernelLaunch,
    Phase,
    StepOutcome,
    TensorInput,
)
from tlk_tracking.core.text import SIGNS

SUMMARY_FILE = "launch_summary.csv"
MODULES_FILE = "module_summary.csv"
REPORT_FILE = "report.html"
TABLE_FILES = {CALLS_FILE: ATEN_CALLS, LAUNCHES_FILE: KERNEL_LAUNCHES, RELATIONS_FILE: LAUNCH_RELATIONS}
# There only when launches are related to nodes of compiled graphs.
OPTIONAL_TABLE_FILES = {FUSED_FILE: FUSED_NODES}

MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class KernelAnnotation:
    """Everything one rank recorded in one window.

    Attributes:
        manifest: counts and times with their bounds, gaps, window, environment.
        call_table: one row an ATen call, columns `tables.ATEN_CALLS`.
        launch_table: one row a kernel launch, columns `tables.KERNEL_LAUNCHES`.
        relation_table: one row a relation, columns `tables.LAUNCH_RELATIONS`.
        fused_table: one row a node of a compiled graph that a relation points to, columns `tables.FUSED_NODES`.
    """

    manifest: Manifest
    call_table: pa.Table = field(repr=False)
    launch_table: pa.Table = field(repr=False)
    relation_table: pa.Table = field(repr=False)
    fused_table: pa.Table = field(repr=False, default_factory=FUSED_NODES.empty_table)

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

    @cached_property
    def fused_nodes(self) -> pd.DataFrame:
        """The nodes of compiled graphs that launches are related to, as a frame."""
        return _frame(self.fused_table)

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
            AnnotationError: something of that name exists already, it cannot be written, or it exceeds what
                `load_annotation` reads.
        """
        save_annotation(self, Path(folder))

    def _repr_html_(self) -> str:
        numbers = {**self.manifest.counts, **self.manifest.times}
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:right'>"
            f"{'unknown' if n.value is None else SIGNS[n.bound] + format(n.value, ',')}</td></tr>"
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
    bodies = _encode_files(annotation)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".partial-{folder.name}-", dir=folder.parent))
        try:
            _write_files(bodies, partial)
            partial.rename(folder)
        except BaseException:  # nothing half-written stays, whatever ends the save
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise AnnotationError(f"{folder} cannot be written: {error.strerror}") from error


def load_annotation(folder: Path | str) -> KernelAnnotation:
    """Read an annotation's files and check everything in them.

    Raises:
        AnnotationError: a file is missing, damaged or does not fit the others; it names file, row and field.
    """
    folder = Path(folder)
    manifest = decode_manifest(read_plain(folder, MANIFEST_FILE, limit=MAX_MANIFEST_BYTES))
    expected = {*TABLE_FILES, SUMMARY_FILE, MODULES_FILE}
    if set(manifest.files) - set(OPTIONAL_TABLE_FILES) != expected:
        raise AnnotationError(
            f"lists {sorted(manifest.files)}, not {sorted(expected)}", file=MANIFEST_FILE, field="files"
        )
    tables = {
        name: decode_table(
            name,
            _read_listed(folder, name, manifest),
            schema=schema,
            rows=manifest.files[name].rows,
            metadata=_file_metadata(manifest),
        )
        for name, schema in (TABLE_FILES | OPTIONAL_TABLE_FILES).items()
        if name in manifest.files
    }
    for name in (SUMMARY_FILE, MODULES_FILE):
        rows = _read_listed(folder, name, manifest).count(b"\n") - 1  # no text in it holds a line break
        if rows != manifest.files[name].rows:
            raise AnnotationError(
                f"has {rows} rows, the manifest says {manifest.files[name].rows}", file=name
            )
    annotation = KernelAnnotation(
        manifest=msgspec.structs.replace(manifest, files={}),
        call_table=tables[CALLS_FILE],
        launch_table=tables[LAUNCHES_FILE],
        relation_table=tables[RELATIONS_FILE],
        fused_table=tables.get(FUSED_FILE, FUSED_NODES.empty_table()),
    )
    check_tables(
        annotation.manifest,
        calls=annotation.call_table,
        launches=annotation.launch_table,
        relations=annotation.relation_table,
        fused=annotation.fused_table,
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


def module_table(annotation: KernelAnnotation) -> pa.Table:
    """Return the rows of `module_summary.csv`; none when no module is known."""
    observed = annotation.manifest.availability is not Availability.UNAVAILABLE
    return summarize_modules(
        calls=annotation.call_table,
        launches=annotation.launch_table if observed else None,
        complete_steps=annotation.complete_steps,
        reasons=frozenset(annotation.manifest.lower_bound_reasons),
    )


def _encode_files(annotation: KernelAnnotation) -> dict[str, bytes]:
    """Return the content of each file; what `load_annotation` has too much of is refused here by the same checks."""
    tables = {
        CALLS_FILE: annotation.call_table,
        LAUNCHES_FILE: annotation.launch_table,
        RELATIONS_FILE: annotation.relation_table,
    }
    if len(annotation.fused_table):
        tables[FUSED_FILE] = annotation.fused_table
    summaries = {SUMMARY_FILE: summary_table(annotation), MODULES_FILE: module_table(annotation)}
    for name, table in tables.items():
        check_lengths(table, name)
    rows = {name: len(table) for name, table in (tables | summaries).items()}
    bodies = {
        name: encode_table(table, metadata=_file_metadata(annotation.manifest))
        for name, table in tables.items()
    }
    for name, body in bodies.items():
        check_table_size(name, body, rows=rows[name])
    bodies |= {name: encode_summary(table) for name, table in summaries.items()}
    files = {
        name: FileRow(rows=rows[name], bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
        for name, body in bodies.items()
    }
    for name, body in bodies.items():
        check_file_size(name, len(body))
    manifest = encode_manifest(msgspec.structs.replace(annotation.manifest, files=files))
    check_file_size(MANIFEST_FILE, len(manifest), limit=MAX_MANIFEST_BYTES)
    decode_manifest(manifest)
    return bodies | {MANIFEST_FILE: manifest}


def _write_files(bodies: Mapping[str, bytes], folder: Path) -> None:
    for name, body in bodies.items():
        with (folder / name).open("xb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())


def _file_metadata(manifest: Manifest) -> dict[str, str]:
    """Every file says its bound, also when it is found alone."""
    return {
        "tlk.lower_bound": "true" if manifest.lower_bound else "false",
        "tlk.lower_bound_reasons": " ".join(reason.value for reason in manifest.lower_bound_reasons),
    }


def _read_listed(folder: Path, name: str, manifest: Manifest) -> bytes:
    row = manifest.files[name]
    body = read_plain(folder, name, limit=MAX_FILE_BYTES, size=row.bytes)
    if hashlib.sha256(body).hexdigest() != row.sha256:
        raise AnnotationError("does not match the digest in the manifest", file=name)
    return body


def _frame(table: pa.Table) -> pd.DataFrame:
    """Nullable integers stay integers; texts become categories."""
    kinds = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
    return table.to_pandas(types_mapper=kinds.get)

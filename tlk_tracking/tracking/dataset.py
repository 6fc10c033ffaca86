"""Open the annotations of many runs, windows and ranks as one table (folder -> pyarrow dataset, Dask frame).

```
<root>/<run>/[artifacts/][kernel_telemetry/]window_<first step>_<session>/rank_<rank>/kernel_launches.parquet
```
So lie the artifacts of a store on this machine, and so `collect_runs` puts those of others. Files are read as they
are: `load_annotation` is what checks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as fs

from tlk_tracking.annotation.kernel_annotation import MAX_MANIFEST_BYTES
from tlk_tracking.annotation.manifest import decode_manifest
from tlk_tracking.annotation.schemas import (
    ATEN_CALLS,
    CALLS_FILE,
    KERNEL_LAUNCHES,
    LAUNCH_RELATIONS,
    LAUNCHES_FILE,
    RELATIONS_FILE,
)
from tlk_tracking.annotation.table_files import read_plain
from tlk_tracking.core.errors import AnnotationError
from tlk_tracking.core.places import (
    ARTIFACT_ROOT,
    MANIFEST_FILE,
    WindowPlace,
    find_annotation_folders,
    read_place,
)
from tlk_tracking.core.records import StepOutcome
from tlk_tracking.tracking.mlflow_tracking import load_run

TABLES = {
    "aten_calls": (CALLS_FILE, ATEN_CALLS),
    "kernel_launches": (LAUNCHES_FILE, KERNEL_LAUNCHES),
    "launch_relations": (RELATIONS_FILE, LAUNCH_RELATIONS),
}
PARTITION = pa.schema(
    [
        pa.field("run", pa.string()),
        pa.field("first_step", pa.int64()),
        pa.field("session", pa.string()),
        pa.field("rank", pa.int64()),
    ]
)
_BETWEEN = (ARTIFACT_ROOT, "artifacts")  # between a run's folder and its windows


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationFolder:
    """Where one annotation lies and whose it is."""

    folder: Path
    run: str
    window: WindowPlace

    @property
    def partition(self) -> dict[str, str | int]:
        """What the rows of its tables get beside their own columns."""
        return {"run": self.run, **asdict(self.window)}


def find_annotations(root: Path | str) -> tuple[AnnotationFolder, ...]:
    """Return where the whole annotations below a folder are, by run, window and rank.

    Raises:
        AnnotationError: there is none.
    """
    found = []
    for folder in find_annotation_folders(Path(root)):
        window = read_place(folder)
        if window is not None:
            run = folder.parent.parent
            while run.name in _BETWEEN:
                run = run.parent
            found.append(AnnotationFolder(folder=folder, run=run.name, window=window))
    if not found:
        raise AnnotationError(
            f"{root} holds no window_*/rank_*/{MANIFEST_FILE}; collect_runs puts some there"
        )
    return tuple(sorted(found, key=lambda each: (each.run, each.window)))


def open_dataset(root: Path | str, table: str = "kernel_launches") -> ds.Dataset:
    """Open one table of every annotation below a folder; nothing is read yet.

    Its columns are the table's and those of PARTITION, and a filter on the latter leaves whole files out.
    Raises AnnotationError when there is no annotation, or no such table.
    """
    return _dataset(find_annotations(root), table)


def open_manifests(root: Path | str) -> pa.Table:
    """Return a row for each annotation below a folder: how far its numbers can be trusted, and over which steps.

    Raises AnnotationError when there is none, or a manifest is damaged.
    """
    rows = []
    for each in find_annotations(root):
        manifest = decode_manifest(read_plain(each.folder, MANIFEST_FILE, limit=MAX_MANIFEST_BYTES))
        complete = [row.step for row in manifest.window.steps if row.outcome is StepOutcome.COMPLETE]
        rows.append(
            each.partition
            | {
                "world_size": manifest.world_size,
                "availability": manifest.availability.value,
                "lower_bound": manifest.lower_bound,
                "lower_bound_reasons": [reason.value for reason in manifest.lower_bound_reasons],
                "complete_steps": complete,
            }
        )
    return pa.Table.from_pylist(rows, schema=_MANIFESTS)


def open_with_dask(
    root: Path | str,
    table: str = "kernel_launches",
    *,
    columns: Sequence[str] | None = None,
    annotations_per_partition: int = 64,
) -> Any:  # a dask.dataframe.DataFrame; Dask is an extra
    """Open the same as `open_dataset` as a Dask dataframe; whoever computes must see the folder at this path.

    Raises AnnotationError when there is no annotation, or no such table.
    """
    import dask.dataframe

    folders = find_annotations(root)
    groups = [
        folders[start : start + annotations_per_partition]
        for start in range(0, len(folders), annotations_per_partition)
    ]
    from_map: Any = dask.dataframe.from_map  # untyped
    chosen = None if columns is None else list(columns)
    empty = _read(folders[:1], table=table, columns=chosen).iloc[:0]
    return from_map(_read, groups, table=table, columns=chosen, meta=empty)


def collect_runs(run_ids: Iterable[str], folder: Path | str, tracking_uri: str | None = None) -> int:
    """Save every annotation of MLflow runs below a folder, each checked; return how many.

    Raises:
        TrackingError: a run cannot be read or has no annotation.
        AnnotationError: one is damaged, or lies in the folder already.
    """
    saved = 0
    for run_id in run_ids:
        for annotation in load_run(run_id, tracking_uri).annotations:
            annotation.save(Path(folder, run_id, ARTIFACT_ROOT, annotation.folder_name))
            saved += 1
    return saved


_MANIFESTS = pa.schema(
    [
        *PARTITION,
        pa.field("world_size", pa.int64()),
        pa.field("availability", pa.string()),
        pa.field("lower_bound", pa.bool_()),
        pa.field("lower_bound_reasons", pa.list_(pa.string())),
        pa.field("complete_steps", pa.list_(pa.int64())),
    ]
)


def _dataset(folders: Sequence[AnnotationFolder], table: str) -> ds.Dataset:
    if table not in TABLES:
        raise AnnotationError(f"there is no table {table!r}; there are {', '.join(TABLES)}")
    name, schema = TABLES[table]
    form, local = ds.ParquetFileFormat(), fs.LocalFileSystem()
    fragments = []
    for each in folders:
        own = [ds.field(field) == value for field, value in each.partition.items()]
        is_own = own[0] & own[1] & own[2] & own[3]
        fragments.append(form.make_fragment(str(each.folder / name), local, partition_expression=is_own))
    fields = [field.with_type(_plain(field.type)).with_nullable(True) for field in schema]
    return ds.FileSystemDataset(fragments, pa.schema([*fields, *PARTITION]), form, local)


def _plain(kind: pa.DataType) -> pa.DataType:
    # Each file has a dictionary of its own.
    return pa.string() if pa.types.is_dictionary(kind) else kind


def _read(folders: Sequence[AnnotationFolder], *, table: str, columns: list[str] | None) -> pd.DataFrame:
    """Return the rows of some annotations; unknown numbers are NA, so that all parts have the same types."""
    nullable = {
        pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype(), pa.float64(): pd.Float64Dtype(),
        pa.string(): pd.StringDtype("pyarrow"),
    }  # fmt: skip
    frame: pd.DataFrame = (
        _dataset(folders, table).to_table(columns=columns).to_pandas(types_mapper=nullable.get)
    )
    return frame

"""Damage saved annotations on purpose, with manifest entries that fit what was done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MANIFEST = "annotation.json"
CALLS, LAUNCHES, RELATIONS = "aten_calls.parquet", "kernel_launches.parquet", "launch_relations.parquet"
SUMMARY, MODULES = "launch_summary.csv", "module_summary.csv"
FILES = (MANIFEST, CALLS, LAUNCHES, RELATIONS, SUMMARY, MODULES)


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the decoded manifest and write it back."""
    said = json.loads((folder / MANIFEST).read_bytes())
    change(said)
    (folder / MANIFEST).write_text(json.dumps(said), encoding="utf-8")


def rewrite_file(folder: Path, name: str, body: bytes, *, rows: int | None = None) -> None:
    """Replace a file of an annotation; digest, size and (when given) rows in the manifest fit it."""
    (folder / name).write_bytes(body)
    said = {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    said |= {} if rows is None else {"rows": rows}
    rewrite_manifest(folder, lambda manifest: manifest["files"][name].update(said))


def rewrite_table(folder: Path, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Apply `change` to a table and write it back; its manifest entry fits it."""
    schema = pq.read_schema(folder / name)
    before = pq.read_table(folder / name, read_dictionary=[f.name for f in schema if f.type == pa.string()])
    for index, field in enumerate(schema):
        if pa.types.is_decimal(field.type):
            before = before.set_column(index, field.name, before[index].cast(pa.float64()))
    after = change(before)
    sink = pa.BufferOutputStream()
    pq.write_table(after.replace_schema_metadata(before.schema.metadata), sink, compression="zstd")
    rewrite_file(folder, name, sink.getvalue().to_pybytes(), rows=len(after))


def with_value(row: int, field: str, value: object) -> Callable[[pa.Table], pa.Table]:
    """Return the change that puts one value into one row."""

    def change(table: pa.Table) -> pa.Table:
        values = table[field].to_pylist()
        values[row] = value
        kind = table.schema.field(field)
        plain = kind.type.value_type if pa.types.is_dictionary(kind.type) else kind.type
        column = pa.array(values, plain)
        column = column.dictionary_encode() if plain != kind.type else column
        return table.set_column(table.schema.get_field_index(field), kind.with_nullable(True), column)

    return change

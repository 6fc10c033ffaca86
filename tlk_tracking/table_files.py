"""Write tables as parquet and read them back within stated limits (Arrow tables <-> bytes)."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tlk_tracking.errors import AnnotationError

MAX_FILE_BYTES = 1 << 30
# Of one table: rows and encoded bytes keep what is decoded below some 3 GB.
MAX_ROWS = 10_000_000
MAX_DECODED_BYTES = 1 << 30


def encode_table(table: pa.Table, *, metadata: dict[str, str]) -> bytes:
    """Return the table as compressed parquet that carries `metadata`."""
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd", compression_level=9)
    return sink.getvalue()


def decode_table(
    name: str, body: bytes, *, schema: pa.Schema, rows: int, metadata: dict[str, str]
) -> pa.Table:
    """Read a table that must have this schema, number of rows and metadata.

    Raises:
        AnnotationError: it is damaged, too large or another table; names file and field.
    """
    try:
        file = pq.ParquetFile(io.BytesIO(body))
        _check_size(name, file.metadata, rows)
        stored = file.schema_arrow
        if stored.names != schema.names:
            raise AnnotationError(f"has the columns {stored.names}, not {schema.names}", file=name)
        for field in schema:
            if stored.field(field.name).type != field.type:
                raise AnnotationError(
                    f"is {stored.field(field.name).type}, not {field.type}", file=name, field=field.name
                )
        said = {key.decode(): value.decode() for key, value in (stored.metadata or {}).items()}
        if said != metadata:
            raise AnnotationError("says another bound than the manifest", file=name)
        table = file.read().replace_schema_metadata(None)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, AnnotationError):
            raise
        raise AnnotationError(f"is not readable parquet: {error}", file=name) from error
    for field in schema:
        if not field.nullable and table[field.name].null_count:
            row = pc.index(pc.is_null(table[field.name]), True).as_py()
            raise AnnotationError("is null", file=name, row=row, field=field.name)
    return table.cast(schema)


def read_plain(folder: Path, name: str, *, limit: int, size: int | None = None) -> bytes:
    """Return the bytes of a plain file of at most `limit` bytes, and of exactly `size` when that is given.

    Raises:
        AnnotationError: it is missing, a link, of another size, or cannot be read.
    """
    path = folder / name
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise AnnotationError("is not a plain file", file=name)
        if status.st_size > limit:
            raise AnnotationError(f"has {status.st_size} bytes, more than the limit of {limit}", file=name)
        if size is not None and status.st_size != size:
            raise AnnotationError(f"has {status.st_size} bytes, the manifest says {size}", file=name)
        return path.read_bytes()
    except FileNotFoundError as error:
        raise AnnotationError("is missing", file=name) from error
    except OSError as error:
        raise AnnotationError(f"cannot be read: {error.strerror}", file=name) from error


def _check_size(name: str, metadata: pq.FileMetaData, rows: int) -> None:
    """Refuse before anything is decoded what would not fit, or what contradicts itself."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    counted = sum(group.num_rows for group in groups)
    if metadata.num_rows != rows or counted != rows:
        raise AnnotationError(f"has {counted} rows, the manifest says {rows}", file=name)
    size = sum(
        group.column(index).total_uncompressed_size for group in groups for index in range(group.num_columns)
    )
    if rows > MAX_ROWS or size > MAX_DECODED_BYTES:
        raise AnnotationError(
            f"has {rows} rows of {size} bytes, more than the limit of {MAX_ROWS} rows or {MAX_DECODED_BYTES} bytes",
            file=name,
        )

"""Write tables as parquet and read them back within stated limits (Arrow tables <-> bytes)."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tlk_tracking.core.errors import AnnotationError

MAX_FILE_BYTES = 1 << 30
# Of one table: rows and encoded bytes keep what is decoded below some 3 GB.
MAX_ROWS = 10_000_000
MAX_DECODED_BYTES = 1 << 30


# Thousandths are stored exactly, in half the bytes; readers see a decimal number of the same unit.
_THOUSANDTHS = pa.decimal128(18, 3)
# Integers that do not climb row by row; for these the differences to the row before are the longer numbers.
_SCATTERED = frozenset({"bytes", "launch_latency_ns"})


def encode_table(table: pa.Table, *, metadata: dict[str, str]) -> bytes:
    """Return the table as compressed parquet that carries `metadata`."""
    encodings = {}
    for index, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            table = table.set_column(index, field.name, _shortened(table[field.name]))
        if pa.types.is_integer(field.type) and field.name not in _SCATTERED:
            encodings[field.name] = "DELTA_BINARY_PACKED"
        elif pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
            encodings[field.name] = "BYTE_STREAM_SPLIT"
    sink = io.BytesIO()
    with pq.ParquetWriter(
        sink,
        table.schema.remove_metadata(),
        compression="zstd",
        compression_level=9,
        use_dictionary=_texts(table.schema),
        column_encoding=encodings,
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(table.replace_schema_metadata(None))
        writer.add_key_value_metadata(metadata)
    return sink.getvalue()


def decode_table(
    name: str, body: bytes, *, schema: pa.Schema, rows: int, metadata: dict[str, str]
) -> pa.Table:
    """Read a table that must have this schema, number of rows and metadata.

    Raises:
        AnnotationError: it is damaged, too large or another table; names file and field.
    """
    try:
        metadata_only = check_table_size(name, body, rows=rows)
        # Paths, since a nested column has another than its name.
        names = [metadata_only.schema.column(index).path for index in range(metadata_only.num_columns)]
        if names != schema.names:
            raise AnnotationError(f"has the columns {names}, not {schema.names}", file=name)
        file = pq.ParquetFile(io.BytesIO(body), read_dictionary=_texts(schema), metadata=metadata_only)
        stored = file.schema_arrow
        for field in schema:
            found = stored.field(field.name).type
            if found != field.type and not (found == _THOUSANDTHS and pa.types.is_floating(field.type)):
                raise AnnotationError(f"is {found}, not {field.type}", file=name, field=field.name)
        said = {key.decode(): value.decode() for key, value in (stored.metadata or {}).items()}
        if said != metadata:
            raise AnnotationError("says another bound than the manifest", file=name)
        table = file.read().replace_schema_metadata(None)
        table.validate(full=True)
        for index, field in enumerate(schema):
            if table.field(index).type == _THOUSANDTHS:
                table = table.set_column(index, field, _floats(table[index]))
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
        check_file_size(name, status.st_size, limit=limit)
        if size is not None and status.st_size != size:
            raise AnnotationError(f"has {status.st_size} bytes, the manifest says {size}", file=name)
        return path.read_bytes()
    except FileNotFoundError as error:
        raise AnnotationError("is missing", file=name) from error
    except OSError as error:
        raise AnnotationError(f"cannot be read: {error.strerror}", file=name) from error


def check_file_size(name: str, size: int, *, limit: int = MAX_FILE_BYTES) -> None:
    """Refuse a file that is too large to be read.

    Raises:
        AnnotationError: it has more bytes than `limit`.
    """
    if size > limit:
        raise AnnotationError(f"has {size} bytes, more than the limit of {limit}", file=name)


def check_table_size(name: str, body: bytes, *, rows: int) -> pq.FileMetaData:
    """Refuse before anything is decoded what would not fit, or what contradicts itself; return what the footer says.

    Raises:
        AnnotationError: it has another number of rows, or more rows or bytes than the limits.
    """
    metadata = pq.read_metadata(io.BytesIO(body))
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    counted = sum(group.num_rows for group in groups)
    if metadata.num_rows != rows or counted != rows:
        raise AnnotationError(f"has {counted} rows, the manifest says {rows}", file=name)
    # Not column by column: pyarrow ends the process where the metadata of a column is damaged.
    size = sum(group.total_byte_size for group in groups)
    if rows > MAX_ROWS or size > MAX_DECODED_BYTES:
        raise AnnotationError(
            f"has {rows} rows of {size} bytes, more than the limit of {MAX_ROWS} rows or {MAX_DECODED_BYTES} bytes",
            file=name,
        )
    return metadata


def _texts(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema if pa.types.is_dictionary(field.type)]


def _shortened(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return floats as thousandths where that loses nothing, else as they are."""
    try:
        thousandths = column.cast(_THOUSANDTHS)
    except pa.ArrowInvalid:  # too large, infinite, or no number
        return column
    return thousandths if _floats(thousandths).equals(column) else column


def _floats(thousandths: pa.ChunkedArray) -> pa.ChunkedArray:
    # Arrow multiplies by 0.001, which is no binary number: one value in eight would be off by its last bit.
    return pc.divide(pc.round(pc.multiply(thousandths.cast(pa.float64()), 1000.0)), 1000.0)

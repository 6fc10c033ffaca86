"""Read the rows that a dispatch mode saw from JSON (ops file -> ATen call table)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import pyarrow as pa

from tlk_tracking.annotation.schemas import ATEN_CALLS, MAX_NAME_LENGTH
from tlk_tracking.attribution.kineto.trace_files import open_input
from tlk_tracking.core.errors import TraceError
from tlk_tracking.core.records import CallOutcome, Phase

MAX_OPS_BYTES = 256 << 20
_CHUNK_BYTES = 4 << 20


class _OpsRow(msgspec.Struct, gc=False):
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    operator: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]
    phase: Phase | None = None
    inputs: list[tuple[list[int], str, str]] | None = None
    outcome: CallOutcome | None = None


class _OpsFile(msgspec.Struct):
    session: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8}$")]
    rows: list[_OpsRow]
    torch: Annotated[str, msgspec.Meta(max_length=200)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsRows:
    """The rows of one ops file; `table` has the columns `tables.ATEN_CALLS`, `step` and `thread` still unknown."""

    session: str
    torch: str | None
    table: pa.Table


def read_ops(path: Path) -> OpsRows:
    """Read an ops file, plain or gzip.

    It is `{"session", "torch", "rows": [{"sequence", "operator", "phase", "inputs", "outcome"}]}`.

    Raises:
        TraceError: the file is missing, is not such JSON, or numbers two rows alike.
    """
    with open_input(path, max_bytes=MAX_OPS_BYTES) as file:
        body = b"".join(iter(lambda: file.read(_CHUNK_BYTES), b""))
    try:
        said = msgspec.json.decode(body, type=_OpsFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(f"cannot read the ops file {path.name}: {error}") from error
    rows = sorted(said.rows, key=lambda row: row.sequence)
    for before, after in pairwise(rows):
        if before.sequence == after.sequence:
            raise TraceError(f"{path.name} has two rows with sequence {after.sequence}")
    split = [row.operator.rpartition(".") for row in rows]
    table = pa.table(
        {
            "sequence": pa.array([row.sequence for row in rows], pa.int64()),
            "step": pa.nulls(len(rows), pa.int64()),
            "phase": _text([None if row.phase is None else row.phase.value for row in rows]),
            "operator": _text([name or overload for name, _, overload in split]),
            "overload": _text([overload if name else None for name, _, overload in split]),
            "module": _text([None] * len(rows)),
            "module_call": pa.nulls(len(rows), pa.int64()),
            "inputs": _text(
                [None if row.inputs is None else msgspec.json.encode(row.inputs).decode() for row in rows]
            ),
            "thread": pa.nulls(len(rows), pa.int64()),
            "outcome": _text([None if row.outcome is None else row.outcome.value for row in rows]),
        },
        schema=ATEN_CALLS,
    )
    return OpsRows(session=said.session, torch=said.torch, table=table)


def _text(values: list[str | None]) -> pa.DictionaryArray:
    return pa.array(values, pa.string()).dictionary_encode()

"""The Arrow schemas of an annotation's tables; in memory and on disk they have these columns in this order."""

from __future__ import annotations

import pyarrow as pa

_TEXT = pa.dictionary(pa.int32(), pa.string())

ATEN_CALLS = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("step", pa.int64()),
        pa.field("phase", _TEXT),
        pa.field("operator", _TEXT),
        pa.field("overload", _TEXT),
        pa.field("module", _TEXT),
        pa.field("module_call", pa.int64()),
        # Canonical JSON of [[shape, dtype, device], ...]: repeated signatures cost one dictionary entry.
        pa.field("inputs", _TEXT),
        pa.field("thread", pa.int64()),
        pa.field("outcome", _TEXT),
    ]
)

KERNEL_LAUNCHES = pa.schema(
    [
        pa.field("launch", pa.int64(), nullable=False),
        pa.field("launch_name", _TEXT),
        pa.field("device", pa.int64()),
        pa.field("stream", pa.int64()),
        pa.field("duration", pa.float64()),
        pa.field("runtime_correlation", pa.int64()),
        pa.field("attribution_status", _TEXT),
        pa.field("kind", _TEXT),
        pa.field("step", pa.int64()),
        pa.field("start_ns", pa.int64()),
        pa.field("time_valid", pa.bool_()),
        pa.field("launch_latency_ns", pa.int64()),
        pa.field("gap", _TEXT),
        pa.field("bytes", pa.int64()),
        pa.field("grid", _TEXT),  # "x,y,z"
        pa.field("block", _TEXT),  # "x,y,z"
        pa.field("graph_launch", pa.int64()),
        # Where it was launched: of its ATen call, or of the ranges around a launch without one.
        pa.field("phase", _TEXT),
        pa.field("module", _TEXT),
        pa.field("module_call", pa.int64()),
    ]
)

LAUNCH_RELATIONS = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("launch", pa.int64(), nullable=False),
        pa.field("origin", _TEXT),
    ]
)

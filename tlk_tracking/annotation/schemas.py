"""The files of an annotation's tables and their schemas: these columns in this order, in memory and on disk."""

from __future__ import annotations

import pyarrow as pa

CALLS_FILE = "aten_calls.parquet"
LAUNCHES_FILE = "kernel_launches.parquet"
RELATIONS_FILE = "launch_relations.parquet"
FUSED_FILE = "fused_nodes.parquet"

# Longest name (of a kernel, an operator) that is kept; what is longer is cut there when a trace is read.
MAX_NAME_LENGTH = 1 << 16
MAX_MODULE_LENGTH = 1 << 12
# 104 days; what claims to have run longer has no valid time.
MAX_DURATION_NS = 2**53

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

# `sequence` is an ATen call where `origin` is `dispatch`, else a fused node.
LAUNCH_RELATIONS = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("launch", pa.int64(), nullable=False),
        pa.field("origin", _TEXT),
    ]
)

# Nodes of compiled graphs that never ran as ATen calls; their numbers go on after those of the calls.
FUSED_NODES = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("graph", _TEXT),  # Inductor's name of the compiled graph
        pa.field("node", pa.string()),
        pa.field("operator", _TEXT),
        pa.field("overload", _TEXT),
        pa.field("original", _TEXT),  # the ATen operator before it was decomposed
        pa.field("inner_module", _TEXT),  # inside the compiled module, "" being that itself
        pa.field("output", _TEXT),  # JSON of [shape, dtype]; a size that was not known is a text
    ]
)

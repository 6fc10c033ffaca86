"""Put the key of a table's row into one line (table, key -> text)."""

from __future__ import annotations

from tlk_tracking.analysis.step_tables import TableName, decode_key
from tlk_tracking.core.text import short_kernel, visible

_SHORT_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
}


def show_key(table: TableName, key: str | None) -> str:
    """Return what a row is about in one line, most telling part first, without control characters."""
    fields = decode_key(key) or {}
    if table is TableName.KERNEL:
        shape = "/".join(f"[{fields[name]}]" for name in ("grid", "block") if fields[name] is not None)
        return f"{short_kernel(str(fields['kernel'] or 'unnamed'))} {visible(shape)}".rstrip()
    if table is TableName.CALL:
        module = "" if fields["module"] is None else f"in {fields['module']}"
        parts = [show_call(fields), str(fields["phase"] or ""), module, show_inputs(fields["inputs"])]
        return visible(" ".join(part for part in parts if part))
    return visible(" ".join(str(value) for value in fields.values()))


def show_call(fields: dict[str, object]) -> str:
    """Return operator and overload of a call group."""
    return visible(
        ".".join(str(fields[name]) for name in ("operator", "overload") if fields[name] is not None)
    )


def show_inputs(inputs: object) -> str:
    """Return dtypes and shapes of a call group's tensors, such as `f32[64,128] i64[64]`; "" when unknown."""
    if not isinstance(inputs, list):
        return ""
    return visible(
        " ".join(
            f"{_SHORT_DTYPES.get(dtype, dtype)}[{','.join(str(size) for size in shape)}]"
            for shape, dtype in inputs
        )
    )

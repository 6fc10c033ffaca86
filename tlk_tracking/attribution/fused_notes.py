"""What Inductor says of a compiled graph's kernels and nodes, as JSON (GraphNotes <-> text)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

_Place = Annotated[int, msgspec.Meta(ge=0)]
_Text = Annotated[str, msgspec.Meta(max_length=10_000)]


class NodeNotes(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a compiled graph, after autograd and Inductor's own passes.

    Attributes:
        target: the operator it calls, such as `aten.mul.Tensor`.
        original: the ATen operator that it came from, before it was decomposed; None when Inductor does not say.
        module: Dynamo's name for the innermost module, such as `L['self'].layers.0`; None outside of modules.
        output: JSON of [shape, dtype]; sizes that were not known when it was compiled are texts. None: no tensor.
    """

    name: _Text
    target: _Text
    original: _Text | None
    module: _Text | None
    output: _Text | None


class GraphNotes(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled graph.

    Attributes:
        number: its number in the ranges of this window.
        key: Inductor's name of it in a trace; None when it has none.
        nodes: in the order of the graph.
        handles: for each call site of generated code the places in `nodes` of what it computes.
    """

    number: _Place
    key: _Text | None
    nodes: tuple[NodeNotes, ...]
    handles: dict[int, tuple[_Place, ...]]


def encode_notes(notes: GraphNotes) -> str:
    """Return the text of one graph's notes."""
    return msgspec.json.encode(notes).decode()


def decode_notes(text: str) -> GraphNotes:
    """Read the text of one graph's notes. Raises msgspec.DecodeError when it is none."""
    return msgspec.json.decode(text, type=GraphNotes)


def encode_window_notes(graphs: Sequence[GraphNotes]) -> bytes:
    """Return the notes of all graphs of a window."""
    return msgspec.json.encode(list(graphs))


def decode_window_notes(body: bytes) -> tuple[GraphNotes, ...]:
    """Read the notes of all graphs of a window. Raises msgspec.DecodeError when they are none."""
    return msgspec.json.decode(body, type=tuple[GraphNotes, ...])

"""Relate launches of generated code to the nodes they compute (ranges + GraphNotes -> fused relations, fused nodes).

Only launches without an ATen call are looked at. A launch inside our range around a call site of generated code
computes exactly the nodes of that site's handle; one that is only inside Inductor's own range around a compiled graph
(a replayed CUDA graph, say) computes some of the graph's nodes. The join is by the graph's number and the call
site's handle, or by Inductor's name of the graph; no kernel name is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from tlk_tracking.annotation.schemas import FUSED_NODES
from tlk_tracking.attribution.correlation import Correlation
from tlk_tracking.attribution.fused_notes import GraphNotes, NodeNotes
from tlk_tracking.attribution.kineto.event_columns import EventColumns
from tlk_tracking.attribution.nested_ranges import NONE, innermost, named_ranges
from tlk_tracking.core.records import MARKER_PREFIX, Origin

# No more relations to nodes than this; what is beyond has none.
MAX_FUSED_RELATIONS = 5_000_000
_GRAPH_CALL = re.compile(r"## Call CompiledFxGraph (\S+) ##")
_OUR_SITE = r"::(fused|autotune)::([0-9]{1,9})::(-?[0-9]{1,9})"
_SELF = "L['self']"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRelations:
    """What generated code computes.

    Attributes:
        nodes: the table of fused nodes (`tables.FUSED_NODES`) that relations point to.
        sequence, record, origin: the relations, sorted by record and sequence.
        counts: launches by what they are related to, and why not.
    """

    nodes: pa.Table
    sequence: list[int]
    record: list[int]
    origin: list[str]
    counts: dict[str, int]


@dataclass(slots=True)
class _Nodes:
    """The nodes that were used so far, with their numbers."""

    first: int
    rows: list[dict[str, object]] = field(default_factory=list)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)

    def number(self, graph: GraphNotes, place: int) -> int:
        known = self.numbers.get((graph.number, place))
        if known is None:
            known = self.numbers[graph.number, place] = self.first + len(self.rows)
            self.rows.append({"sequence": known, **_row(graph, graph.nodes[place])})
        return known


def relate_fused(
    events: EventColumns, correlation: Correlation, graphs: Sequence[GraphNotes], *, first_sequence: int
) -> FusedRelations:
    """Relate launches without an ATen call to nodes of compiled graphs; nodes are numbered from `first_sequence`."""
    nodes = _Nodes(first=first_sequence)
    counts = dict.fromkeys(("inductor_kernel", "inductor_graph", "autotuning", "no_provenance"), 0)
    pairs: list[tuple[int, int, str]] = []
    by_number = {graph.number: graph for graph in graphs}
    by_key: dict[str, GraphNotes] = {}
    for graph in graphs:
        if graph.key is not None:
            by_key.setdefault(graph.key, graph)  # two of one name have the same nodes
    for record, site, key in _generated(events, correlation):
        if site is not None and site[0] == "tried":
            counts["autotuning"] += 1
            continue
        found = by_number.get(int(site[1])) if site is not None else None
        places = found.handles.get(int(site[2])) if found is not None and site is not None else None
        origin = Origin.INDUCTOR_KERNEL
        if found is None or not places:
            origin, found = Origin.INDUCTOR_GRAPH, found or by_key.get(key or "")
            places = tuple(range(len(found.nodes))) if found is not None else ()
        if found is None or not places or len(pairs) + len(places) > MAX_FUSED_RELATIONS:
            counts["no_provenance"] += 1
            continue
        counts[origin.value] += 1
        pairs += [(record, nodes.number(found, place), origin.value) for place in places]
    pairs.sort()
    return FusedRelations(
        nodes=pa.Table.from_pylist(nodes.rows, schema=FUSED_NODES),
        sequence=[sequence for _, sequence, _ in pairs],
        record=[record for record, _, _ in pairs],
        origin=[origin for _, _, origin in pairs],
        counts=counts,
    )


def _generated(
    events: EventColumns, correlation: Correlation
) -> Iterator[tuple[int, tuple[str, ...] | None, str | None]]:
    """Give each record without an ATen call that was launched inside a compiled graph: our site, the graph's name.

    A site is (kind, graph, handle). Where variants are tried out first, the last launch is the kernel's own run, of
    kind "fused"; those before it are "tried".
    """
    lonely = ~np.ma.getmaskarray(correlation.record_call)
    lonely[correlation.relation_record] = False
    records = np.flatnonzero(lonely)
    call = np.ma.getdata(correlation.record_call)[records]
    thread, time_ns = events.runtime_calls.thread[call], events.runtime_calls.start_ns[call]
    sites, site_of = named_ranges(events, re.compile(f"{MARKER_PREFIX}{events.session}{_OUR_SITE}").fullmatch)
    graphs, graph_of = named_ranges(events, _GRAPH_CALL.fullmatch)
    site = innermost(sites, thread=thread, time_ns=time_ns)
    graph = innermost(graphs, thread=thread, time_ns=time_ns)
    last: dict[int, int] = {}
    for s, time in zip(site.tolist(), time_ns.tolist(), strict=True):
        last[s] = max(time, last.get(s, time))
    for record, time, s, g in zip(*(a.tolist() for a in (records, time_ns, site, graph)), strict=True):
        if s == NONE and g == NONE:
            continue
        found = None
        if s != NONE:
            kind, *place = site_of[s].groups()
            found = ("tried" if kind == "autotune" and time < last[s] else "fused", *place)
        yield record, found, None if g == NONE else graph_of[g][1]


def _row(graph: GraphNotes, node: NodeNotes) -> dict[str, object]:
    operator, _, overload = node.target.rpartition(".")
    return {
        "graph": graph.key,
        "node": node.name,
        "operator": operator or overload,
        "overload": overload if operator else None,
        "original": node.original,
        "inner_module": _inner_module(node.module),
        "output": node.output,
    }


def _inner_module(source: str | None) -> str | None:
    """Return a module's path inside the compiled module: "L['self'].layers.0" is "layers.0"; else null."""
    if source is None or not source.startswith(_SELF):
        return None
    path = re.sub(
        r"\._modules\['([^']*)'\]|\['([^']*)'\]|\[([0-9]+)\]", r".\1\2\3", source.removeprefix(_SELF)
    )
    return path.removeprefix(".")

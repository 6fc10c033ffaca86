"""Keep what each generated kernel computes, from its compilation to its launches (Inductor -> ranges, GraphNotes)."""

from __future__ import annotations

import ast
import bisect
import itertools
import json
import logging
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any, Self, cast

import torch
from torch import fx

from tlk_tracking.attribution.fused_notes import GraphNotes, NodeNotes, decode_notes, encode_notes
from tlk_tracking.core.records import MARKER_PREFIX
from tlk_tracking.recording.inductor_private import (
    NOTES,
    Undo,
    cache_key,
    nodes_by_handle,
    turn_provenance_on,
    watch_graphs,
    will_autotune,
    wrapper_globals,
)
from tlk_tracking.recording.torch_private import NamedRange, skip_in_dynamo

_log = logging.getLogger(__name__)

_HANDLE = re.compile(r"\s*# \[Provenance debug handles\] .*:(\d+)\s*")


@dataclass(slots=True)
class _Graph:
    """One compiled graph of this process.

    Attributes:
        number: its number in this process.
        compiled: Inductor's object, as long as it lives.
        names: the global names of its generated module, where its kernels are.
        sites: handle by line of the generated source, by line.
        launchers: names of the objects that the call sites launch.
    """

    number: int
    compiled: Callable[[], Any]
    notes: str
    names: dict[str, Any]
    sites: list[tuple[int, int]] = field(default_factory=list)
    launchers: frozenset[str] = frozenset()


class FusedKernels:
    """The compiled graphs of one fit. Install it before the first compilation, and remove it in the end.

    Attributes:
        fault: the first error of our own; what it hit has no nodes.
    """

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self._graphs: list[_Graph] = []
        self._next_number = itertools.count().__next__
        self._prefix: str | None = None
        self._undo: list[Undo] = []

    def install(self) -> None:
        """Turn Inductor's provenance on and take note of every graph from now on."""
        if self._undo:
            return
        try:
            self._undo.append(turn_provenance_on())
            self._undo.append(watch_graphs(made=self._note, ready=self._register))
        except (ImportError, AttributeError) as error:
            self.remove()
            _log.warning("this Inductor keeps no provenance (%s): compiled code stays without nodes", error)

    def remove(self) -> None:
        """Put Inductor back as it was; does nothing the second time."""
        self.detach()
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def attach(self, session: str) -> None:
        """Put a range of this session around each launch of generated code."""
        self._prefix = f"{MARKER_PREFIX}{session}"
        # Not sooner: two graphs of the same code share one module, and so the ranges that are on.
        self._graphs = [graph for graph in self._graphs if graph.compiled() is not None]
        for graph in self._graphs:
            self._put_proxies(graph)

    def detach(self) -> None:
        """Take the ranges off; does nothing when they are off."""
        self._prefix = None
        for graph in self._graphs:
            for name in graph.launchers:
                proxy = graph.names.get(name)
                if isinstance(proxy, _LaunchProxy):
                    graph.names[name] = proxy.kernel

    def notes(self) -> tuple[GraphNotes, ...]:
        """Return what is known of each graph that still lives."""
        found = []
        for graph in self._graphs:
            compiled = graph.compiled()
            if compiled is not None:
                notes = decode_notes(graph.notes)
                found.append(
                    GraphNotes(
                        number=graph.number, key=cache_key(compiled), nodes=notes.nodes, handles=notes.handles
                    )
                )
        return tuple(found)

    def _note(self, compiled: Any, module: fx.GraphModule) -> None:
        """Keep the nodes of a graph that was compiled just now on its own object."""
        try:
            setattr(compiled, NOTES, encode_notes(_describe(module)))
        except Exception as error:  # noqa: BLE001 - a compilation never fails because of us
            self._give_up(error)

    def _register(self, compiled: Any) -> None:
        try:
            notes, names = getattr(compiled, NOTES, None), wrapper_globals(compiled)
            if notes is None:
                return  # an old cache entry
            graph = _Graph(
                number=self._next_number(), compiled=weakref.ref(compiled), notes=notes, names=names or {}
            )
            if names is not None:
                graph.sites, graph.launchers = _call_sites(
                    Path(names["__file__"]).read_text(encoding="utf-8")
                )
            self._graphs.append(graph)
            if self._prefix is not None:
                self._put_proxies(graph)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _put_proxies(self, graph: _Graph) -> None:
        assert self._prefix is not None
        for name in graph.launchers:
            kernel = graph.names.get(name)
            if kernel is not None and not isinstance(kernel, _LaunchProxy):
                graph.names[name] = _LaunchProxy(kernel, graph=graph, prefix=self._prefix)

    def _give_up(self, error: Exception) -> None:
        if self.fault is None:
            self.fault = error


class _LaunchProxy:
    """Stands in for one generated kernel in its module while steps are recorded."""

    def __init__(self, kernel: Any, *, graph: _Graph, prefix: str) -> None:
        self.kernel = kernel
        self._graph = graph
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._range(sys._getframe(1).f_lineno):
            return self.kernel(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch a Triton kernel."""
        with self._range(sys._getframe(1).f_lineno):
            return self.kernel.run(*args, **kwargs)

    def _range(self, line: int) -> Any:
        sites = self._graph.sites
        place = bisect.bisect_left(sites, (line, 0)) - 1
        handle = sites[place][1] if place >= 0 else -1
        kind = "autotune" if will_autotune(self.kernel) else "fused"
        return NamedRange(f"{self._prefix}::{kind}::{self._graph.number}::{handle}")


def _describe(module: fx.GraphModule) -> GraphNotes:
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    places = {node.name: place for place, node in enumerate(nodes)}
    handles = {
        int(site.rpartition(":")[2]): tuple(sorted(places[name] for name in names if name in places))
        for site, names in nodes_by_handle().items()
    }
    return GraphNotes(
        number=0, key=None, nodes=tuple(_describe_node(node) for node in nodes), handles=handles
    )


def _describe_node(node: fx.Node) -> NodeNotes:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    original = node.meta.get("original_aten")
    value = node.meta.get("val")
    described = None
    if isinstance(value, torch.Tensor):
        described = [[_size(size) for size in value.shape], str(value.dtype).removeprefix("torch.")]
    return NodeNotes(
        name=node.name,
        target=str(node.target),
        original=None if original is None else str(original),
        module=next((str(source) for source, _ in reversed(list(stack.values()))), None),
        output=None if described is None else json.dumps(described, separators=(",", ":")),
    )


def _size(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)


def _call_sites(source: str) -> tuple[list[tuple[int, int]], frozenset[str]]:
    """Return where in generated source each handle's call begins, and the names that those calls launch.

    The call site is the first statement after the handle's comment that is a call and no assignment.
    """
    lines = source.splitlines()
    sites = [
        (at, int(found[1])) for at, line in enumerate(lines, start=1) if (found := _HANDLE.fullmatch(line))
    ]
    statements = [
        (node.lineno, node.value.func)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    statements.sort(key=lambda found: found[0])
    names = set()
    for (line, _), (end, _) in pairwise([*sites, (len(lines) + 1, 0)]):
        place = bisect.bisect_right(statements, line, key=lambda found: found[0])
        function = statements[place][1] if place < len(statements) and statements[place][0] < end else None
        if isinstance(function, ast.Attribute) and function.attr == "run":
            function = function.value
        if isinstance(function, ast.Name):
            names.add(function.id)
    return sites, frozenset(names)


for _function in (_LaunchProxy.__call__, _LaunchProxy.run, _LaunchProxy._range, _LaunchProxy.__getattr__):
    skip_in_dynamo(cast(FunctionType, _function))

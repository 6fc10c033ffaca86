"""Know which module call runs: forward by hooks, backward by marks on autograd nodes (calls -> path and number)."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tlk_tracking.core.records import MARKER_PREFIX
from tlk_tracking.recording.torch_private import (
    AccumulateGrad,
    CompileWatch,
    NamedRange,
    current_autograd_node,
    hide_global_hooks,
    next_sequence_number,
    skip_in_dynamo,
)

# What a node's metadata holds under this key: (session, (module path, number of the call)). Strings and a number
# only: metadata lives as long as the graph does.
NODE_KEY = "tlk_tracking.module"

_Label = tuple[str, tuple[str, int]]
_Node = Any  # torch has no type for what `grad_fn` is
_NOWHERE = (None, None)


@dataclass(slots=True)
class _Call:
    """One running call of a module.

    Attributes:
        module: the module itself.
        label: what its nodes are marked with.
        node: the autograd node that ran when the call began (a checkpoint computes again in backward), or None.
        first: autograd's number for the first node made inside; the walk back ends at older ones.
        range: the profiler range around the call.
        edges: for each call inside this one, however deep, the nodes before it, where the walk goes on.
    """

    module: nn.Module
    label: _Label
    node: _Node
    first: int
    range: Any  # Any: torch's own C type
    edges: dict[_Label, list[_Node]] = field(default_factory=dict)


class _Running(threading.local):
    """The running calls of each thread, the innermost last; they go with it, whatever ends it."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


class ModuleTracker:
    """The module calls of one window. Changes nothing: its hooks only look, and are on inside steps only.

    Names are those of `root.named_modules()`, so that what a strategy wraps around the root does not appear. A
    module that is not among them belongs to the call around it.

    Attributes:
        fault: the first error of our own, after which no module is known any more.
    """

    def __init__(self, session: str, *, root: nn.Module) -> None:
        self.fault: Exception | None = None
        self._session = session
        self._prefix = f"{MARKER_PREFIX}{session}::module::"
        # The modules are held as long as this object lives, so that no other object gets the id of one.
        self._paths = {id(module): (module, path) for path, module in root.named_modules()}
        self._owners = {
            id(parameter): path
            for module, path in self._paths.values()
            for parameter in module.parameters(recurse=False)
        }
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._running = _Running()
        self._handles: list[Any] = []  # Any: torch has no public name for what it hands back
        self._unhide: Callable[[], None] = lambda: None
        self._compiling = CompileWatch(before=self._remove, after=self._install)

    def begin_step(self) -> None:
        """Number each module's calls from 0 again."""
        self._numbers = defaultdict(itertools.count)

    def attach(self) -> None:
        """Put the hooks on. Does nothing when they are on."""
        if not self._handles:
            self._install()
            self._compiling.begin()

    def detach(self) -> None:
        """Take the hooks off, and forget calls that never ended. Does nothing when they are off."""
        self._compiling.end()
        self._remove()
        # An interrupt from the keyboard passes through a module without a word to its hooks.
        calls = self._running.calls
        while calls:
            calls.pop().range.__exit__(None, None, None)
        self._running = _Running()

    def locate(self, node: _Node) -> tuple[str | None, int | None]:
        """Return path and number of the module call that is running in this thread, `node` being its autograd node.

        None is unknown: code outside modules, double backward, nodes made outside active steps.
        """
        calls = self._running.calls
        if calls and calls[-1].node is node:
            return calls[-1].label[1]
        if node is None:
            return _NOWHERE
        if isinstance(node, AccumulateGrad):  # outlives the step, so it bears no mark
            return self._owners.get(id(node.variable)), None
        label: _Label | None = node.metadata.get(NODE_KEY)
        return label[1] if label is not None and label[0] == self._session else _NOWHERE

    def _install(self) -> None:
        self._handles.append(register_module_forward_pre_hook(self._before))
        self._handles.append(register_module_forward_hook(self._after, always_call=True))
        self._unhide = hide_global_hooks({handle.id for handle in self._handles})

    def _remove(self) -> None:
        if self._handles:
            self._unhide()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        known = self._paths.get(id(module))
        if known is None or torch.compiler.is_compiling():
            return
        try:
            path = known[1]
            number = next(self._numbers[path])
            call = _Call(
                module=module,
                label=(self._session, (path, number)),
                node=current_autograd_node(),
                first=next_sequence_number(),
                range=NamedRange(f"{self._prefix}{number}::{path}"),
            )
            self._running.calls.append(call)
            call.range.__enter__()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with our notes, the module has to run
            self._give_up(error)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls = self._running.calls
        if not calls or calls[-1].module is not module or torch.compiler.is_compiling():
            return  # its beginning was not seen
        try:
            call = calls.pop()
            call.range.__exit__(None, None, None)
            before = _mark(call, output)
            if calls:
                calls[-1].edges |= call.edges
                calls[-1].edges[call.label] = before
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._paths = {}
        if self.fault is None:
            self.fault = error


def _mark(call: _Call, output: Any) -> list[_Node]:
    """Mark the autograd nodes that the call made and no call inside it has; return the nodes just before them."""
    waiting: list[_Node] = [tensor.grad_fn for tensor in _tensors(output)]
    seen: set[_Node] = set()
    before: list[_Node] = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or isinstance(node, AccumulateGrad):
            continue
        seen.add(node)
        if node._sequence_nr() < call.first:
            before.append(node)
            continue
        label = node.metadata.get(NODE_KEY)
        inside = call.edges.get(label) if label is not None else None
        if inside is not None:
            waiting.extend(inside)
            continue
        if label is None or label[0] != call.label[0]:
            node.metadata[NODE_KEY] = call.label
        waiting.extend(following for following, _ in node.next_functions)
    return before


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Give the tensors of a module's output, which may be nested in the usual containers."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output) and not isinstance(output, type):
        for each in fields(output):
            yield from _tensors(getattr(output, each.name, None))


_ours: tuple[Callable[..., object], ...] = (ModuleTracker._before, ModuleTracker._after, _mark, _tensors)
for _function in _ours:
    skip_in_dynamo(cast(FunctionType, _function))

"""Every private name of Inductor that fused kernels stand on, each behind one name here and one test."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

Undo = Callable[[], None]

# Where a compiled graph keeps our notes; an attribute, so that Inductor's cache keeps it with the graph.
NOTES = "_tlk_tracking_notes"
_TAG = "tlk_tracking"


def turn_provenance_on() -> Undo:
    """Let Inductor say for each call site of generated code which nodes it computes; return what undoes it."""
    from torch._inductor import config

    trace: Any = config.trace
    level, tag = trace.provenance_tracking_level, torch.compiler.config.cache_key_tag
    trace.provenance_tracking_level = max(level, 1)
    # Entries of Inductor's cache that were made without our notes must not be found.
    torch.compiler.config.cache_key_tag = f"{tag}{_TAG}"

    def undo() -> None:
        trace.provenance_tracking_level = level
        torch.compiler.config.cache_key_tag = tag

    return undo


def watch_graphs(*, made: Callable[[Any, fx.GraphModule], None], ready: Callable[[Any], None]) -> Undo:
    """Call `made` with each graph that Inductor compiles, and `ready` with each that can run, also from its cache.

    Return what undoes it. Nothing else of a compilation changes, and an error of ours is not the user's.
    """
    from torch._inductor.output_code import CompiledFxGraph

    # Any: these take what Inductor's version of the day gives them.
    make: Any = CompiledFxGraph.__init__
    prepare: Any = CompiledFxGraph.post_compile

    @functools.wraps(make)
    def make_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        module = next((a for a in (*args, *kwargs.values()) if isinstance(a, fx.GraphModule)), None)
        if module is not None:
            made(self, module)

    @functools.wraps(prepare)
    def note_and_prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        ready(self)  # before: CUDA graphs put themselves in the place of what we look at
        return prepare(self, *args, **kwargs)

    def undo() -> None:
        # Somebody may have wrapped ours since; then it only calls through.
        if CompiledFxGraph.__init__ is make_and_note:
            CompiledFxGraph.__init__ = make  # type: ignore[method-assign]
        if CompiledFxGraph.post_compile is note_and_prepare:
            CompiledFxGraph.post_compile = prepare  # type: ignore[method-assign]

    CompiledFxGraph.__init__ = make_and_note  # type: ignore[method-assign]
    CompiledFxGraph.post_compile = note_and_prepare  # type: ignore[method-assign]
    return undo


def nodes_by_handle() -> Mapping[str, list[str]]:
    """Return "{kernel}:{handle}" -> names of post-grad nodes of the graph that is being compiled."""
    from torch._inductor import debug

    found: Mapping[str, list[str]] = debug._inductor_triton_kernel_to_post_grad_node_info
    return found


def wrapper_globals(graph: Any) -> dict[str, Any] | None:
    """Return the names of the generated Python module that launches the graph's kernels; None without such a one."""
    function = getattr(graph.current_callable, "__func__", graph.current_callable)
    names = getattr(function, "__globals__", None)
    return names if isinstance(names, dict) and isinstance(names.get("__file__"), str) else None


def cache_key(graph: Any) -> str | None:
    """Return the name under which the graph's calls are in a trace: `## Call CompiledFxGraph {key} ##`."""
    key = getattr(graph, "_fx_graph_cache_key", None)
    return key if isinstance(key, str) else None


def will_autotune(kernel: Any) -> bool:
    """Return whether the next run of a generated kernel first tries several variants on the device."""
    launchers = getattr(kernel, "launchers", None)
    if launchers is None:
        return False
    if not launchers:  # it has not run yet
        variants = getattr(kernel, "configs", None)
        return variants is None or len(variants) != 1
    return len(launchers) != 1

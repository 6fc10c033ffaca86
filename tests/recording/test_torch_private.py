"""Each private name of torch does what we take it to do; a test here fails when torch has changed it."""

from __future__ import annotations

import json
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tlk_tracking.recording import torch_private
from tlk_tracking.recording.torch_private import NamedRange


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def recorded(tmp_path: Path, session: profile) -> list[tuple[str, str]]:
    session.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return [(event["cat"], event["name"]) for event in events if event["ph"] == "X"]


def test_a_named_range_is_an_event_with_no_operator_of_its_own(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as session, NamedRange("tlk::test"):
        pass
    found = recorded(tmp_path, session)
    assert [
        (category in ("cpu_op", "user_annotation"), name)
        for category, name in found
        if "Profiler" not in name
    ] == [(True, "tlk::test")]


def test_an_autograd_node_is_current_in_backward_only() -> None:
    seen = []
    value = torch.ones(2, requires_grad=True)
    doubled = value * 2
    doubled.register_hook(lambda grad: seen.append(torch_private.current_autograd_node()))
    assert torch_private.current_autograd_node() is None
    doubled.sum().backward()
    assert [type(node).__name__ for node in seen] == [type(doubled.grad_fn).__name__]


def test_the_profiler_flag_is_torchs_own() -> None:
    assert torch_private.profiler_flag() is False
    with profile(activities=[ProfilerActivity.CPU]):
        assert torch_private.profiler_flag() is True
        assert torch_private.profiled_here()
    assert torch_private.profiler_flag() is False
    assert not torch_private.profiled_here()


def test_another_session_overwrites_our_flag() -> None:
    torch_private.set_profiler_flag(torch_private.RUNNING)
    assert torch_private.profiler_flag()
    with profile(activities=[ProfilerActivity.CPU]):
        assert torch_private.profiler_flag() is not torch_private.RUNNING
    assert torch_private.profiler_flag() is False


def test_the_dispatch_mode_stack_has_the_innermost_mode_last() -> None:
    outer, inner = Nothing(), Nothing()
    assert torch_private.dispatch_mode_stack() == ()
    torch_private.push_dispatch_mode(outer)
    torch_private.push_dispatch_mode(inner)
    try:
        assert torch_private.dispatch_mode_stack() == (outer, inner)
    finally:
        torch_private.pop_dispatch_mode(inner)
        torch_private.pop_dispatch_mode(outer)


def test_a_direct_call_is_the_operator_itself() -> None:
    one = torch.ones(2)
    assert torch.equal(torch_private.direct_call(torch.ops.aten.add.Tensor)(one, one), torch.full((2,), 2.0))
    assert torch_private.direct_call(torch.ops.aten.add.Tensor) is not torch.ops.aten.add.Tensor


def test_a_function_marked_for_dynamo_is_not_compiled() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph

    def skipped(value: torch.Tensor) -> torch.Tensor:
        return value + 1

    torch_private.skip_in_dynamo(cast(FunctionType, skipped))
    torch.compile(skipped, backend=backend)(torch.ones(2))
    assert graphs == []


def test_the_session_options_are_taken_by_the_profiler(tmp_path: Path) -> None:
    options = torch_private.session_options()
    with profile(activities=[ProfilerActivity.CPU], experimental_config=options) as session:
        torch.ones(2)
    assert ("cpu_op", "aten::ones") in recorded(tmp_path, session)


def test_compiling_is_noticed() -> None:
    torch.compile(lambda value: value + 1, backend="eager")(torch.ones(2))
    assert torch_private.has_compiled()


def test_autograd_numbers_the_nodes_of_a_thread_as_they_are_made() -> None:
    x = torch.ones(2, requires_grad=True)
    first = torch_private.next_sequence_number()
    nodes: list[Any] = [x.sin().grad_fn, x.cos().grad_fn]
    assert [node._sequence_nr() for node in nodes] == [first, first + 1]
    assert torch_private.next_sequence_number() == first + 2


def test_what_adds_to_a_gradient_names_its_leaf() -> None:
    x = torch.ones(2, requires_grad=True)
    node: Any = x.sin().grad_fn
    adds = node.next_functions[0][0]
    assert isinstance(adds, torch_private.AccumulateGrad)
    assert adds.variable is x


def test_a_compilation_is_watched_from_its_beginning_to_its_end() -> None:
    seen: list[str] = []
    watch = torch_private.CompileWatch(
        before=lambda: seen.append("before"), after=lambda: seen.append("after")
    )

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        seen.append("compiles")
        return graph.forward

    torch._dynamo.reset()
    watch.begin()
    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
    watch.end()
    watch.end()
    torch.compile(lambda x: x.cos(), backend=backend)(torch.ones(2))
    torch._dynamo.reset()
    assert seen == ["before", "compiles", "after", "compiles"]


def test_hidden_global_hooks_are_not_warned_of_and_others_are() -> None:
    def hook(*_: Any) -> None:
        return None

    hooks = torch.nn.modules.module
    mine = hooks.register_module_forward_hook(hook)
    put_back = torch_private.hide_global_hooks({mine.id})
    hidden = bool(hooks._has_any_global_hook())
    theirs = hooks.register_module_forward_hook(hook)
    shown = bool(hooks._has_any_global_hook())
    theirs.remove()
    put_back()
    back = bool(hooks._has_any_global_hook())
    mine.remove()
    assert (hidden, shown, back) == (False, True, True)

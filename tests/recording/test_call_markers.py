from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marked import SESSION, Marked, marked
from torch import nn
from torch._higher_order_ops.cond import cond
from torch.autograd.function import FunctionCtx
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tlk_tracking.annotation.schemas import ATEN_CALLS
from tlk_tracking.core.records import Phase
from tlk_tracking.recording.call_markers import CallMarkers, call_table
from tlk_tracking.recording.torch_private import dispatch_mode_stack


def test_a_call_is_a_row_with_all_that_is_known_of_it() -> None:
    value, weight = torch.ones(2, 3), torch.ones(3, 4)
    with marked(step=7) as found:
        torch.mm(value, weight)
    assert found.rows == [
        {
            "sequence": 0,
            "step": 7,
            "phase": "forward",
            "operator": "aten.mm",
            "overload": "default",
            "module": None,
            "module_call": None,
            "inputs": '[[[2,3],"float32","cpu"],[[3,4],"float32","cpu"]]',
            "thread": threading.get_native_id(),
            "outcome": "returned",
        }
    ]


def test_the_table_of_no_calls_has_the_schema() -> None:
    assert call_table(CallMarkers(SESSION).noted()).schema == ATEN_CALLS


def test_tensors_in_lists_and_keywords_are_inputs_too() -> None:
    ones, out = torch.ones(2), torch.empty(2, 2, dtype=torch.float64)
    with marked() as found:
        torch.stack([ones, ones])
        torch.ops.aten.mul.out(torch.ones(2, 2, dtype=torch.float64), 2.0, out=out)
    inputs = dict(zip(found.column("operator"), found.column("inputs"), strict=True))
    assert inputs["aten.stack"] == '[[[2],"float32","cpu"],[[2],"float32","cpu"]]'
    assert inputs["aten.mul"] == '[[[2,2],"float64","cpu"],[[2,2],"float64","cpu"]]'


def test_a_parameter_is_described_like_any_tensor() -> None:
    layer = nn.Linear(3, 2, bias=False)
    with marked() as found, torch.no_grad():
        layer.weight.zero_()
    assert found.column("inputs") == ['[[[2,3],"float32","cpu"]]']


def test_a_call_that_raises_is_a_row_and_its_error_passes() -> None:
    with marked() as found, pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert (found.column("operator")[-1], found.column("outcome")[-1]) == ("aten.mm", "raised")


def test_backward_is_told_by_the_autograd_node() -> None:
    weight = torch.ones(3, requires_grad=True)
    with marked() as found:
        loss = (weight * weight).sum()
        loss.backward()
        loss.detach()
    phases = found.column("phase")
    first, last = phases.index("backward"), len(phases) - phases[::-1].index("backward")
    assert (set(phases[:first]), set(phases[first:last]), set(phases[last:])) == (
        {"forward"},
        {"backward"},
        {"forward"},
    )


def test_what_a_checkpoint_computes_again_is_backward() -> None:
    weight = torch.ones(3, requires_grad=True)
    with marked() as found:
        checkpoint(lambda value: torch.sin(torch.exp(value)), weight, use_reentrant=False).sum().backward()
    assert [row["phase"] for row in found.rows if row["operator"] == "aten.exp"] == ["forward", "backward"]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_the_optimizers_step_is_the_optimizer_phase(make: Callable[..., torch.optim.Optimizer]) -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = make([weight], lr=0.1)
    weight.sum().backward()
    with marked() as found:
        torch.zeros(1)
        optimizer.step()
        torch.zeros(1)
    phases = found.column("phase")
    assert (phases[0], set(phases[1:-1]), phases[-1]) == ("forward", {"optimizer"}, "forward")


def test_a_closure_inside_the_optimizers_step_is_not_the_optimizer() -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.exp(weight).sum()
        loss.backward()
        return loss

    with marked() as found:
        optimizer.step(closure)
    phases = {row["phase"] for row in found.rows if row["operator"] == "aten.exp"}
    assert phases == {"forward"}
    assert {"forward", "backward", "optimizer"} == set(found.column("phase"))


def test_an_optimizer_that_raised_leaves_the_next_batch_in_forward() -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure() -> torch.Tensor:
        raise ValueError("no loss")

    with marked() as found:
        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(closure)
        found.brackets.enter_phase(Phase.FORWARD)
        torch.zeros(1)
    assert found.column("phase")[-1] == "forward"


def test_ranges_of_the_user_are_neither_marked_nor_recorded() -> None:
    with marked() as found, record_function("mine"):
        torch.zeros(1)
    assert found.column("operator") == ["aten.zeros"] or found.column("operator")[0].startswith("aten.")
    assert not [name for name in found.column("operator") if name.startswith("profiler")]


def test_calls_of_several_threads_have_numbers_of_their_own() -> None:
    found = Marked()
    found.calls.recording = True

    def work() -> None:
        with found.calls:
            for _ in range(200):
                torch.zeros(1)

    # Each thread enters the mode itself here; autograd's threads inherit it.
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = call_table(found.calls.noted()).to_pylist()
    assert [row["sequence"] for row in rows] == list(range(len(rows)))
    assert len(rows) == 800 * len({row["operator"] for row in rows})
    assert {row["phase"] for row in rows} == {"other"}


def test_no_tensor_is_kept() -> None:
    with marked() as found:
        value = torch.ones(4)
        result = value + value
        kept = [weakref.ref(value), weakref.ref(result)]
        del value, result
        gc.collect()
        assert [ref() for ref in kept] == [None, None]
    assert found.rows


def test_a_fault_of_ours_lets_the_call_through() -> None:
    found = Marked(calls=CallMarkers(SESSION, locate=lambda node: 1 / 0))  # type: ignore[arg-type,return-value]  # the fault
    found.brackets.open(0, phase=Phase.FORWARD)
    try:
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
    finally:
        found.brackets.pause()
    assert isinstance(found.calls.fault, ZeroDivisionError)
    assert not found.calls.recording


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_has_no_shape_to_tell_has_unknown_inputs() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with marked() as found:
        torch.relu(nested)
    assert found.column("inputs")[0] is None


class Plus(torch.Tensor):
    """A subclass with a dispatch of its own: below it runs a plain tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Plus:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]  # torch's
        made.inner = inner
        return made  # type: ignore[no-any-return]  # torch's

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__):
            raise AssertionError("somebody asked for a shape")
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*(arg.inner if isinstance(arg, Plus) else arg for arg in args), **(kwargs or {})))


def test_a_tensor_subclass_passes_through_and_is_not_asked() -> None:
    value = Plus(torch.ones(2))
    with marked() as found:
        result = torch.add(value, 1)
    assert isinstance(result, Plus)
    assert torch.equal(result.inner, torch.full((2,), 2.0))
    assert (found.column("operator")[0], found.column("inputs")[0]) == ("aten.add", '[[[2],"float32","cpu"]]')


def test_a_mode_of_the_user_inside_ours_works_and_sees_the_calls() -> None:
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.seen += 1
            return func(*args, **(kwargs or {}))

    with marked() as found, Count():
        torch.ones(2)
    assert (Count.seen, len(found.rows)) == (len(found.rows), Count.seen)


def test_a_higher_order_operator_is_one_call() -> None:
    value = torch.ones(2)
    with marked() as found:
        result = cond(value.sum() > 0, torch.sin, torch.cos, (value,))
    assert torch.equal(result, torch.sin(value))
    assert "higher_order.cond" in found.column("operator")


def test_functorch_passes_through() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    plain = torch.func.vmap(torch.func.grad(lambda row: (row**3).sum()))(value)
    with marked() as found:
        under_mode = torch.func.vmap(torch.func.grad(lambda row: (row**3).sum()))(value)
    assert torch.equal(plain, under_mode)
    assert found.rows


def test_a_custom_autograd_function_passes_through() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * 2

    weight = torch.ones(3, requires_grad=True)
    with marked() as found:
        Double.apply(weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert [row["phase"] for row in found.rows if row["operator"] == "aten.mul"] == ["forward", "backward"]


def test_a_compiled_model_stays_compiled_and_is_not_compiled_again() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend=backend, fullgraph=True)
    late = torch.compile(lambda value: value.sin().cos(), backend=backend, fullgraph=True)
    value = torch.ones(2, 4)
    expected = model(value)
    for _ in range(3):
        with marked():
            assert torch.equal(model(value), expected)
            late(value)
        model(value)
        late(value)
    assert len(graphs) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_mode_of_ours() -> None:
    with marked() as found:
        before = len(found.calls.noted().rows)
        child = os.fork()
        if child == 0:
            torch.ones(2)
            clean = dispatch_mode_stack() == () and len(found.calls.noted().rows) == before
            os._exit(0 if clean else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        torch.ones(2)
        assert len(found.calls.noted().rows) > before

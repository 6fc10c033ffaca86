from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

from tlk_tracking import record_kernels
from tlk_tracking.core.records import Phase
from tlk_tracking.recording.call_markers import CallMarkers
from tlk_tracking.recording.module_tracker import NODE_KEY, ModuleTracker, _Call

SESSION = "c0ffee00"
PHASES = tuple(Phase)

# (operator, module, number of its call)
Located = tuple[str, str | None, int | None]


class Pair(nn.Module):
    """Its parts are called one after the other, with functional code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(self.first(x)))


def located(
    program: Callable[[], object],
    root: nn.Module,
    *,
    phase: Phase | None = None,
    operators: set[str] | None = None,
) -> list[Located]:
    """Run `program` as one step; return where its calls were, those of one phase or of some operators only."""
    tracker = ModuleTracker(SESSION, root=root)
    markers = CallMarkers(SESSION, locate=tracker.locate)
    markers.enter_phase(Phase.FORWARD)
    tracker.begin_step()
    tracker.attach()
    markers.recording = True
    try:
        with markers:
            program()
    finally:
        tracker.detach()
    assert tracker.fault is None
    noted = markers.noted()
    found = [
        (noted.operators[row[3]][0].removeprefix("aten."), row[6], row[7])
        for row in sorted(noted.rows)
        if phase is None or PHASES[row[2]] is phase
    ]
    return [row for row in found if (operators is None or row[0] in operators) and row[0] != "detach"]


def input_of(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.ones(*(shape or (2, 4)), requires_grad=requires_grad)


def test_a_forward_call_knows_its_innermost_module() -> None:
    pair, x = Pair(), input_of()
    assert located(lambda: pair(x), pair) == [
        ("t", "first", 0),
        ("addmm", "first", 0),
        ("sigmoid", "", 0),
        ("t", "second.0", 0),
        ("addmm", "second.0", 0),
        ("relu", "second.1", 0),
    ]


def test_a_backward_call_knows_the_module_whose_forward_it_reverses() -> None:
    pair = Pair()
    found = located(lambda: pair(input_of()).sum().backward(), pair, phase=Phase.BACKWARD)
    assert list(dict.fromkeys(found)) == [
        ("expand", None, None),
        ("threshold_backward", "second.1", 0),
        ("t", "second.0", 0),
        ("mm", "second.0", 0),
        ("sum", "second.0", 0),
        ("view", "second.0", 0),
        ("sigmoid_backward", "", 0),
        ("t", "first", 0),
        ("mm", "first", 0),
        ("sum", "first", 0),
        ("view", "first", 0),
    ]


def test_each_call_of_a_shared_module_has_its_number() -> None:
    layer = nn.Linear(4, 4)
    root = nn.ModuleDict({"a": layer, "b": layer})
    found = located(
        lambda: root["b"](root["a"](input_of())).sum().backward(), root, operators={"addmm", "sum"}
    )
    assert found == [
        ("addmm", "a", 0),
        ("addmm", "a", 1),
        ("sum", None, None),
        ("sum", "a", 1),
        ("sum", "a", 0),
    ]


def test_numbers_begin_again_with_each_step() -> None:
    layer = nn.Linear(4, 4)
    root = nn.ModuleDict({"a": layer})
    tracker = ModuleTracker(SESSION, root=root)
    numbers = []
    handle = layer.register_forward_hook(lambda *_: numbers.append(tracker.locate(None)))
    layer.forward = lambda x: numbers.append(tracker.locate(None)) or x  # type: ignore[method-assign,func-returns-value]
    for _ in range(2):
        tracker.begin_step()
        tracker.attach()
        layer(input_of())
        layer(input_of())
        tracker.detach()
    handle.remove()
    assert [number for number in numbers if number[0] is not None] == [("a", 0), ("a", 1), ("a", 0), ("a", 1)]


class Scaled(nn.Module):
    def forward(self, x: Tensor, *, by: Tensor) -> dict[str, list[Tensor]]:
        return {"scaled": [x * by]}


def test_keyword_arguments_and_nested_outputs_are_followed() -> None:
    root = nn.ModuleDict({"scaled": Scaled()})

    def program() -> None:
        by = input_of(requires_grad=True).exp()
        root["scaled"](x=input_of(), by=by)["scaled"][0].sum().backward()

    assert located(program, root, operators={"exp", "mul"}) == [
        ("exp", None, None),
        ("mul", "scaled", 0),
        ("mul", "scaled", 0),  # the product's own backward
        ("mul", None, None),  # exp's backward, outside of modules
    ]


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3)


def test_a_module_that_changes_its_input_owns_that_change_only() -> None:
    root = nn.ModuleDict({"change": InPlace()})

    def program() -> None:
        root["change"](input_of(requires_grad=True).sin()).sum().backward()

    assert located(program, root, phase=Phase.BACKWARD, operators={"mul"}) == [
        ("mul", "change", 0),
        ("mul", None, None),  # the sine's backward
    ]


class Remembering(nn.Module):
    """Reads a tensor that is not among its arguments."""

    memory: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.memory.tanh()


def test_what_led_to_a_tensor_that_a_module_keeps_is_not_the_modules() -> None:
    root = nn.ModuleDict({"remembering": Remembering()})

    def program() -> None:
        root["remembering"].memory = input_of(requires_grad=True).exp()
        root["remembering"](input_of()).sum().backward()

    assert located(program, root, phase=Phase.BACKWARD, operators={"tanh_backward", "mul"}) == [
        ("tanh_backward", "remembering", 0),
        ("mul", None, None),
    ]


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError


class Catching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.raising = Raising()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.raising(x)
        except ArithmeticError:
            return x.neg()


def test_after_a_module_that_raised_the_module_around_it_goes_on() -> None:
    root, x = Catching(), input_of()
    assert located(lambda: root(x), root) == [("neg", "", 0)]


def test_an_interrupt_from_the_keyboard_leaves_no_call_behind() -> None:
    root = nn.ModuleDict({"a": nn.Identity()})
    tracker = ModuleTracker(SESSION, root=root)
    tracker.begin_step()
    tracker.attach()
    root["a"].forward = lambda x: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        root["a"](input_of())
    tracker.detach()
    assert tracker.locate(None) == (None, None)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_belongs_to_the_module_that_computes_it(reentrant: bool) -> None:
    pair = Pair()

    def program() -> None:
        checkpoint(pair, input_of(requires_grad=True), use_reentrant=reentrant).sum().backward()

    found = located(program, pair, operators={"addmm", "threshold_backward", "sigmoid_backward"})
    # A reentrant checkpoint makes a new graph in backward; the other one fills the graph of the first forward.
    again = 1 if reentrant else 0
    assert found[:2] == [("addmm", "first", 0), ("addmm", "second.0", 0)]
    assert [row for row in found[2:] if row[0] == "addmm"] == [
        ("addmm", "first", 1),
        ("addmm", "second.0", 1),
    ]
    assert [row for row in found if "backward" in row[0]] == [
        ("threshold_backward", "second.1", again),
        ("sigmoid_backward", "", again),
    ]


def test_code_outside_modules_and_double_backward_are_unknown() -> None:
    pair = Pair()

    def program() -> None:
        x = input_of(requires_grad=True)
        (slope,) = torch.autograd.grad(pair(x).sum(), x, create_graph=True)
        slope.square().sum().backward()

    found = located(program, pair, operators={"pow", "sigmoid_backward"})
    assert found == [
        ("sigmoid_backward", "", 0),
        ("pow", None, None),
        ("pow", None, None),  # in the square's backward
        ("sigmoid_backward", None, None),  # in the backward of the first backward
        ("sigmoid_backward", "", 0),  # the forward's own node, reached once more
    ]


def test_adding_to_a_gradient_belongs_to_the_parameters_owner() -> None:
    pair = Pair()
    pair(input_of()).sum().backward()  # now there are gradients to add to
    found = located(lambda: pair(input_of()).sum().backward(), pair, operators={"add_"})
    assert sorted(set(found)) == [("add_", "first", None), ("add_", "second.0", None)]


def test_a_module_that_the_root_does_not_have_belongs_to_the_call_around_it() -> None:
    class Around(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Linear(4, 4)(x)

    root = Around()
    assert located(lambda: root(input_of()), root, operators={"addmm"}) == [("addmm", "", 0)]


def test_another_threads_module_is_not_this_threads() -> None:
    root = nn.ModuleDict({"a": nn.Linear(4, 4)})
    seen = []

    def program() -> None:
        inside, done = threading.Event(), threading.Event()

        def wait(x: Tensor) -> Tensor:
            inside.set()
            assert done.wait(20)
            return x

        root["a"].forward = wait  # type: ignore[method-assign]
        thread = threading.Thread(target=root["a"], args=(input_of(),))
        thread.start()
        assert inside.wait(20)
        seen.append(tracker.locate(None))
        done.set()
        thread.join()

    tracker = ModuleTracker(SESSION, root=root)
    tracker.begin_step()
    tracker.attach()
    program()
    tracker.detach()
    assert seen == [(None, None)]


def test_a_call_that_never_ended_goes_with_its_thread() -> None:
    """Torch's hooks are not told of SystemExit, and the next thread may get the identifier of the one that ended."""
    root = nn.ModuleDict({"a": nn.Linear(4, 4)})

    def leave(x: Tensor) -> Tensor:
        raise SystemExit

    def program() -> None:
        with suppress(SystemExit):
            root["a"](input_of())
        running.append(calls_alive())

    def calls_alive() -> int:
        return sum(type(each) is _Call for each in gc.get_objects())

    root["a"].forward = leave  # type: ignore[method-assign]
    running: list[int] = []
    tracker = ModuleTracker(SESSION, root=root)
    tracker.begin_step()
    tracker.attach()
    thread = threading.Thread(target=program)
    thread.start()
    thread.join()
    running.append(calls_alive())
    tracker.detach()
    assert running == [1, 0]


def test_a_mark_of_another_window_is_not_ours() -> None:
    pair = Pair()
    kept: list[Tensor] = []
    located(lambda: kept.append(pair(input_of()).sum()), pair)
    tracker = ModuleTracker("00000001", root=pair)
    node = kept[0].grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert node.metadata[NODE_KEY] == (SESSION, ("second.1", 0))
    assert tracker.locate(node) == (None, None)


def test_nothing_of_a_step_is_kept_alive() -> None:
    pair = Pair()
    tracker = ModuleTracker(SESSION, root=pair)
    tracker.begin_step()
    tracker.attach()
    output = pair(input_of())
    kept = weakref.ref(output)
    del output
    gc.collect()
    assert kept() is None
    tracker.detach()


def test_outside_steps_torch_has_no_hook_of_ours() -> None:
    before = {
        name: dict(found) for name, found in vars(module_hooks).items() if name.startswith("_global_forward")
    }
    asked = module_hooks._has_any_global_hook
    pair = Pair()
    located(lambda: pair(input_of()), pair)
    after = {
        name: dict(found) for name, found in vars(module_hooks).items() if name.startswith("_global_forward")
    }
    assert after == before
    assert module_hooks._has_any_global_hook is asked
    assert [module._forward_hooks for module in pair.modules()] == [{}] * 5


def test_a_fault_of_ours_is_noted_and_the_module_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    tracker = ModuleTracker(SESSION, root=pair)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tlk_tracking.recording.module_tracker.NamedRange", broken)
    tracker.begin_step()
    tracker.attach()
    output = pair(input_of())
    tracker.detach()
    assert output.shape == (2, 4)
    assert isinstance(tracker.fault, ZeroDivisionError)
    assert tracker.locate(None) == (None, None)


def test_module_tracking_changes_no_call() -> None:
    torch.manual_seed(0)
    pair = Pair()
    optimizer = torch.optim.AdamW(pair.parameters())

    def step() -> None:
        optimizer.zero_grad()
        checkpoint(pair, input_of(requires_grad=True), use_reentrant=False).sum().backward()
        optimizer.step()

    step()
    with record_kernels() as without:
        step()
    with record_kernels(model=pair) as tracked:
        step()
    columns = ["sequence", "step", "phase", "operator", "overload", "inputs", "outcome"]
    assert tracked.annotation.aten_calls[columns].equals(without.annotation.aten_calls[columns])
    assert without.annotation.aten_calls["module"].isna().all()
    assert set(tracked.annotation.aten_calls["module"].dropna()) == {"", "first", "second.0", "second.1"}


class Compilable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = Compilable()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).sigmoid())


def _compile_whole(model: Outer, **arguments: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, **arguments)


def _compile_part(model: Outer, **arguments: Any) -> Callable[[Tensor], Tensor]:
    model.inner = torch.compile(model.inner, **arguments)
    return model


def _compile_in_place(model: Outer, **arguments: Any) -> Callable[[Tensor], Tensor]:
    model.inner.compile(**arguments)
    return model


def _compile_function(model: Outer, **arguments: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: model(x).cos(), **arguments)


def _compilations(
    make: Callable[..., Callable[[Tensor], Tensor]], *, fullgraph: bool, first_inside: bool, windows: bool
) -> tuple[int, dict[str, int]]:
    """Train some steps, two of three inside a window twice over; return graphs compiled, and graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    model = Outer()
    call = make(model, fullgraph=fullgraph, backend=backend)
    if not first_inside:
        call(input_of()).sum().backward()
    for _ in range(2):
        if windows:
            with record_kernels(model=model):
                call(input_of()).sum().backward()
                call(input_of()).sum().backward()
        else:
            call(input_of()).sum().backward()
        call(input_of()).sum().backward()
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    torch._dynamo.reset()
    return len(compiled), breaks


@pytest.mark.parametrize("first_inside", [False, True])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("make", [_compile_whole, _compile_part, _compile_in_place, _compile_function])
def test_windows_compile_nothing_again_and_break_no_graph(
    make: Callable[..., Callable[[Tensor], Tensor]], fullgraph: bool, first_inside: bool
) -> None:
    plain = _compilations(make, fullgraph=fullgraph, first_inside=first_inside, windows=False)
    assert plain == (1, {})
    assert _compilations(make, fullgraph=fullgraph, first_inside=first_inside, windows=True) == plain


def test_a_module_compiled_in_place_keeps_its_name() -> None:
    torch._dynamo.reset()
    root = Outer()
    _compile_in_place(root, backend="aot_eager")
    found = located(
        lambda: root(input_of()).sum().backward(), root, operators={"addmm", "threshold_backward"}
    )
    assert found == [("addmm", "inner", 0), ("addmm", "head", 0), ("threshold_backward", "inner", 0)]
    torch._dynamo.reset()


def test_a_model_compiled_as_a_whole_has_its_calls_and_its_parts_none() -> None:
    torch._dynamo.reset()
    root = Outer()
    compiled = _compile_whole(root, backend="aot_eager")
    found = located(
        lambda: compiled(input_of()).sum().backward(), root, operators={"addmm", "threshold_backward"}
    )
    assert found == [("addmm", "", 0), ("addmm", "", 0), ("threshold_backward", "", 0)]
    torch._dynamo.reset()


def test_a_compiled_modules_calls_are_its_own_in_forward_and_backward() -> None:
    torch._dynamo.reset()
    root = Outer()
    _compile_part(root, backend="aot_eager")
    found = located(
        lambda: root(input_of()).sum().backward(), root, operators={"addmm", "threshold_backward"}
    )
    assert found == [
        ("addmm", "inner._orig_mod", 0),  # what torch.compile wraps is in named_modules() under this name
        ("addmm", "head", 0),
        ("threshold_backward", "inner._orig_mod", 0),
    ]
    torch._dynamo.reset()

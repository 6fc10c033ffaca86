"""Every private name of torch that this package stands on, each behind one name here and one test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from types import FunctionType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast
from torch._ops import OpOverload
from torch.autograd import profiler as autograd_profiler
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

# A named profiler range as a context manager; it does not go through the dispatcher.
NamedRange = _RecordFunctionFast

# The autograd node that this thread is running, or None, which torch's own type leaves out.
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node

# The number that the next autograd node made in this thread will get.
next_sequence_number = torch._C._autograd._get_sequence_nr

# The kind of autograd node that adds to a leaf's gradient; `variable` is the leaf.
AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # not in torch's stubs


class SessionFlag(int):
    """What our sessions put where torch keeps its "a profiler runs": as true or false as torch's own, but ours.

    Another session puts torch's plain True and False there, and so is noticed.
    """


RUNNING = SessionFlag(1)


def profiler_flag() -> object:
    """Return torch's "a profiler runs" of this process: truthy while one runs, on whatever thread."""
    return autograd_profiler._is_profiler_enabled


def set_profiler_flag(value: SessionFlag | bool) -> None:
    """Set torch's "a profiler runs"; everybody who reads it asks only whether it is true."""
    autograd_profiler._is_profiler_enabled = value  # type: ignore[assignment]  # torch asks only for its truth


def profiled_here() -> bool:
    """Return whether a profiler records this thread."""
    return torch._C._autograd._profiler_enabled()


def dispatch_mode_stack() -> tuple[TorchDispatchMode, ...]:
    """Return the dispatch modes that are on in this thread, the innermost last."""
    return tuple(_get_current_dispatch_mode_stack())


def push_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Put a dispatch mode on in this thread, above all others."""
    mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves its modes untyped


def pop_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Take a dispatch mode off that is the innermost of this thread: torch takes off that one, whichever it is."""
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch leaves its modes untyped


def direct_call(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `func(...)` of an operator calls in the end: one Python frame less for each call."""
    # An exact class: subclasses (TorchBind) do more in their __call__.
    return func._op if type(func) is OpOverload else func


def skip_in_dynamo(function: FunctionType) -> None:
    """Keep Dynamo from compiling `function`, or anything it calls, when it is called while Dynamo watches."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def session_options() -> _ExperimentalConfig | None:
    """Return profiler options that leave out the events' Python objects, or None where torch cannot (before 2.13)."""
    try:
        return _ExperimentalConfig(trace_only=True)
    except TypeError:
        return None


def record_functions_off() -> None:
    """Stop recording ranges and host ops in this thread, whatever profiler is on."""
    torch._C._autograd._enable_record_function(False)


def has_compiled() -> bool:
    """Return whether Dynamo has compiled anything in this process; does not load it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0


def hide_global_hooks(hooks: Container[int]) -> Callable[[], None]:
    """Keep torch from warning, at each call of a compiled module, of the global module hooks with these ids.

    Only that warning asks whether there is a global hook. Return what puts everything back.
    """
    asked = module_hooks._has_any_global_hook
    kinds = [found for name, found in vars(module_hooks).items() if name.startswith("_global_forward_")]

    def put_back() -> None:
        module_hooks._has_any_global_hook = asked

    module_hooks._has_any_global_hook = lambda: any(key not in hooks for found in kinds for key in found)
    return put_back


class CompileWatch:
    """Call `before` when Dynamo begins to compile and `after` when it has ended, as long as the watch is on."""

    def __init__(self, *, before: Callable[[], None], after: Callable[[], None]) -> None:
        # Slow the first time, but a compilation that comes later must not find us unprepared.
        from torch._dynamo.callback import callback_handler

        self._handler = callback_handler
        self._before, self._after = (lambda *_: before()), (lambda *_: after())

    def begin(self) -> None:
        """Begin to watch."""
        self._handler.register_start_callback(self._before)
        self._handler.register_end_callback(self._after)

    def end(self) -> None:
        """Stop watching. Does nothing when the watch is off, also when `torch._dynamo.reset()` took it off."""
        if self._before in self._handler.start_callbacks:
            self._handler.remove_start_callback(self._before)
        if self._after in self._handler.end_callbacks:
            self._handler.remove_end_callback(self._after)

"""Put ranges around the steps, with the dispatch mode on inside them only (batch boundaries -> StepBrackets)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FunctionType, TracebackType
from typing import Any, Protocol, cast

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tlk_tracking.core.records import MARKER_PREFIX, Phase, StepBracket, StepOutcome
from tlk_tracking.recording.call_markers import CallMarkers
from tlk_tracking.recording.fused_kernels import FusedKernels
from tlk_tracking.recording.module_tracker import ModuleTracker
from tlk_tracking.recording.torch_private import (
    NamedRange,
    dispatch_mode_stack,
    pop_dispatch_mode,
    push_dispatch_mode,
    skip_in_dynamo,
)


class StepBrackets:
    """The steps of one window, on the thread that made this object.

    The mode is pushed only onto `base`, the stack as it was when the fit began: a mode that somebody put on since
    may be taken off while ours is above it, and its `__exit__` would then pop ours and stay on itself.

    Attributes:
        displaced: somebody put a dispatch mode where ours has to be, or took ours away; nothing is marked since.
        steps: the brackets that have ended, in order.
    """

    def __init__(
        self,
        session: str,
        *,
        calls: CallMarkers,
        base: tuple[TorchDispatchMode, ...],
        modules: ModuleTracker | None = None,
        fused: FusedKernels | None = None,
    ) -> None:
        self.displaced = False
        self.steps: list[StepBracket] = []
        self._calls = calls
        self._base = base
        self._prefix = f"{MARKER_PREFIX}{session}::step::"
        self._step: int | None = None
        self._range: _Range | None = None
        self._phase = Phase.OTHER
        self._optimizers = _OptimizerPhase(calls)
        self._modules = modules
        self._session = session
        self._fused = fused

    @property
    def step(self) -> int | None:
        """The step whose bracket has not ended yet, or None."""
        return self._step

    def open(self, step: int, *, phase: Phase) -> None:
        """Begin the bracket of `step` in `phase`."""
        self._step = self._calls.step = step
        self._phase = phase
        if self._modules is not None:
            self._modules.begin_step()
        self.resume()

    def enter_phase(self, phase: Phase) -> None:
        """Note that the open bracket goes on in `phase`."""
        self._phase = phase
        self._calls.enter_phase(phase)

    def pause(self) -> bool:
        """Close the range and take the mode off until `resume`; return False when it was not open anyway."""
        opened, self._range = self._range, None
        if opened is None:
            return False
        was_on, self._calls.recording = self._calls.recording, False
        if not self._pop() and was_on:
            self.displaced = True
        self._detach()
        opened.__exit__(None, None, None)
        return True

    def resume(self) -> None:
        """Put the mode on and open another range of the same step. Does nothing when open, ended or displaced."""
        if self._step is None or self._range is not None or self.displaced:
            return
        if dispatch_mode_stack() != self._base:
            self.displaced = True
            return
        opened: _Range = NamedRange(f"{self._prefix}{self._step}")
        opened.__enter__()
        self._range = opened
        self._calls.enter_phase(self._phase)
        push_dispatch_mode(self._calls)
        self._calls.recording = True
        self._optimizers.install()
        if self._modules is not None:
            self._modules.attach()
        if self._fused is not None:
            self._fused.attach(self._session)

    def close(self, outcome: StepOutcome) -> None:
        """End the bracket. Does nothing when none is open."""
        self.pause()
        if self._step is not None:
            self.steps.append(StepBracket(step=self._step, outcome=outcome))
        self._step = self._calls.step = None

    def settle(self) -> bool:
        """Take off what a displaced or interrupted window left; return whether no mode of ours is left."""
        self._pop()
        self._detach()
        return self._calls not in dispatch_mode_stack()

    def _detach(self) -> None:
        """Take the hooks off; does nothing the second time."""
        self._optimizers.remove()
        if self._modules is not None:
            self._modules.detach()
        if self._fused is not None:
            self._fused.detach()

    def _pop(self) -> bool:
        """Take our mode off if it is the innermost; one that is not ours stays."""
        if dispatch_mode_stack()[-1:] != (self._calls,):
            return False
        pop_dispatch_mode(self._calls)
        return True


class _Range(Protocol):
    """What torch's range is, as far as we use it."""

    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> object: ...


class _OptimizerPhase:
    """Note the optimizer phase, by torch's hooks around every optimizer's step; a closure inside is not in it."""

    def __init__(self, calls: CallMarkers) -> None:
        self._calls = calls
        self._owner = threading.get_ident()
        self._left: list[Phase] = []
        self._hooks: list[Any] = []  # Any: torch has no public name for what it hands back

    def install(self) -> None:
        self._hooks.append(register_optimizer_step_pre_hook(self._before))
        self._hooks.append(register_optimizer_step_post_hook(self._after))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._left = []

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if threading.get_ident() != self._owner:
            return None
        try:
            self._left.append(self._calls.enter_phase(Phase.OPTIMIZER))
            # args[0] is the optimizer itself; a closure is the next argument or a keyword.
            if len(args) > 1 and callable(args[1]):
                return (args[0], self._outside(args[1]), *args[2:]), kwargs
            if callable(kwargs.get("closure")):
                return args, {**kwargs, "closure": self._outside(kwargs["closure"])}
        except Exception as error:  # noqa: BLE001 - whatever is wrong with our notes, the optimizer has to step
            self._calls.give_up(error)
        return None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self._owner and self._left:
            self._enter(self._left.pop())

    def _outside(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return the closure as one that runs in the phase around the optimizer's step."""
        around = self._left[-1]

        @functools.wraps(closure)
        def run(*args: Any, **kwargs: Any) -> Any:
            inside = self._enter(around)
            try:
                return closure(*args, **kwargs)
            finally:
                self._enter(inside)

        return run

    def _enter(self, phase: Phase) -> Phase:
        try:
            return self._calls.enter_phase(phase)
        except Exception as error:  # noqa: BLE001 - as above
            self._calls.give_up(error)
            return phase


for _hook in (_OptimizerPhase._before, _OptimizerPhase._after):
    skip_in_dynamo(cast(FunctionType, _hook))

"""Put a named range around each dispatched call and keep a row of it (calls -> CallRows -> table of ATen calls)."""

from __future__ import annotations

import itertools
import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import pyarrow as pa
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tlk_tracking.annotation.schemas import ATEN_CALLS
from tlk_tracking.core.errors import RecordingError
from tlk_tracking.core.records import MARKER_PREFIX, CallOutcome, Phase
from tlk_tracking.recording.torch_private import (
    NamedRange,
    current_autograd_node,
    direct_call,
    dispatch_mode_stack,
    pop_dispatch_mode,
    profiler_flag,
    record_functions_off,
    set_profiler_flag,
    skip_in_dynamo,
)

# (module path, which call of that module) of the running call; it gets the autograd node that runs, or None.
LocateModule = Callable[[Any], tuple[str | None, int | None]]
# (sequence, step, phase, operator, signature, thread, module path, module call): numbers point into CallRows.
Row = tuple[int, int | None, int, int, int | None, int, str | None, int | None]

_Described = tuple[torch.Size, torch.dtype, torch.device]

_PHASES = tuple(Phase)
_BACKWARD = _PHASES.index(Phase.BACKWARD)
_OTHER = _PHASES.index(Phase.OTHER)
_UNMARKED = -1
# What an argument is to a row, by its type.
_IGNORED, _TENSOR, _SEQUENCE, _TENSOR_SUBCLASS = range(4)
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _Kinds(dict[type, int]):
    """What a value of each type is to a row; learns a type when it is first asked for."""

    def __missing__(self, kind: type) -> int:
        if kind in _TENSOR_TYPES:
            found = _TENSOR
        elif issubclass(kind, torch.Tensor):
            found = _TENSOR_SUBCLASS
        else:
            found = _SEQUENCE if kind in (list, tuple) else _IGNORED
        self[kind] = found
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRows:
    """The calls of one window as they were noted, before they are text.

    Attributes:
        rows: one per call, in no sure order.
        raised: sequences of the calls that raised.
        operators: (operator, overload) by number.
        signatures: (shape, dtype, device) of each tensor of a call, with the number of that signature.
    """

    rows: Sequence[Row]
    raised: frozenset[int]
    operators: tuple[tuple[str, str | None], ...]
    signatures: dict[tuple[_Described, ...], int]


class CallMarkers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """The dispatch mode of one window; it keeps no tensor and changes no call.

    Attributes:
        recording: False makes the mode let every call through untouched.
        step: what the owner's thread is in, or None.
        fault: the first error of our own, or that the window is full; after it nothing more is recorded.
        most_calls: a window takes no more than these; torch's profiler needs some 10 kB for each when it stops.
    """

    most_calls = 500_000

    # A higher-order operator is a call like any other; without this torch refuses to run one under a mode.
    supports_higher_order_operators = True

    def __init__(self, session: str, *, locate: LocateModule | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
        self.recording = False
        self.step: int | None = None
        self.fault: Exception | None = None
        self._phase = _OTHER
        self._owner = threading.get_ident()
        self._locate = locate
        self._prefix = f"{MARKER_PREFIX}{session}::op::"
        self._phase_prefix = f"{MARKER_PREFIX}{session}::phase::"
        self._functions: list[object] = []  # held, so that no other function gets the id of one we know
        self._known: dict[int, tuple[Callable[..., Any], int]] = {}
        self._operators: list[tuple[str, str | None]] = []
        self._kinds = _Kinds()
        self._threads: dict[int, int] = {}
        self._signatures: dict[tuple[_Described, ...], int] = {}
        self._rows: list[Row] = []
        self._raised: list[int] = []
        # Autograd's threads are in here at the same time: each of these is one step for the interpreter.
        self._next_sequence = itertools.count().__next__
        self._next_signature = itertools.count().__next__
        self._note = self._rows.append
        _LIVE.add(self)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled: a mode without this turns torch.compile off."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping our method, which would cost 0.9 µs a call; `skip_in_dynamo` below suffices."""
        return False

    def enter_phase(self, phase: Phase) -> Phase:
        """Note that the owner's thread is in `phase` outside autograd; return the one it leaves."""
        left = _PHASES[self._phase]
        self._phase = _PHASES.index(phase)
        with NamedRange(f"{self._phase_prefix}{phase}"):  # a moment: the trace says when the phase began
            return left

    # Any: every call of torch passes here, with any arguments.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Long on purpose: it runs for each call, and one more Python call costs as much as several lines here.
        call, operator = self._known.get(id(func)) or self._learn(func)
        if operator < 0 or not self.recording:
            return call(*args, **kwargs) if kwargs else call(*args)
        try:
            signature = self._describe(args, kwargs)
            node = current_autograd_node()
            thread = threading.get_ident()
            native = self._threads.get(thread) or self._threads.setdefault(thread, threading.get_native_id())
            phase = _BACKWARD if node is not None else self._phase if thread == self._owner else _OTHER
            path, module_call = (None, None) if self._locate is None else self._locate(node)
            sequence = self._next_sequence()
            if sequence >= self.most_calls:
                raise RecordingError(f"the window is full: it has {self.most_calls} ATen calls")
            self._note((sequence, self.step, phase, operator, signature, native, path, module_call))
            marker = NamedRange(f"{self._prefix}{sequence}")
        except Exception as error:  # noqa: BLE001 - whatever is wrong with our notes, the call itself has to run
            self.give_up(error)
            return call(*args, **kwargs) if kwargs else call(*args)
        with marker:
            try:
                return call(*args, **kwargs) if kwargs else call(*args)
            except BaseException:  # tidied up, then raised on
                self._raised.append(sequence)
                raise

    def noted(self) -> CallRows:
        """Return what was noted so far."""
        return CallRows(
            rows=self._rows,
            raised=frozenset(self._raised),
            operators=tuple(self._operators),
            signatures=self._signatures,
        )

    def _describe(self, args: Any, kwargs: Any) -> int | None:
        """Return the number of this signature, or None when a tensor has no shape to tell (a nested one, say)."""
        kinds = self._kinds
        described: list[_Described] = []
        try:
            for value in (*args, *kwargs.values()) if kwargs else args:
                kind = kinds[type(value)]
                if kind == _TENSOR:
                    described.append((value.shape, value.dtype, value.device))
                elif kind == _SEQUENCE:
                    for item in value:
                        kind = kinds[type(item)]
                        if kind == _TENSOR:
                            described.append((item.shape, item.dtype, item.device))
                        elif kind == _TENSOR_SUBCLASS:
                            described.append(_describe_subclass(item))
                elif kind == _TENSOR_SUBCLASS:
                    described.append(_describe_subclass(value))
            signature = tuple(described)
            number = self._signatures.get(signature)
            return (
                self._signatures.setdefault(signature, self._next_signature()) if number is None else number
            )
        except Exception:  # noqa: BLE001 - shapes that torch itself refuses to tell: nested, symbolic, functorch's wrappers
            return None

    def _learn(self, func: Any) -> tuple[Callable[..., Any], int]:
        try:
            return self._name(func)
        except Exception as error:  # noqa: BLE001 - as in a call
            self.give_up(error)
            return func, _UNMARKED

    def _name(self, func: Any) -> tuple[Callable[..., Any], int]:
        operator, overload = _operator_name(func)
        number = _UNMARKED
        if not operator.startswith("profiler."):
            number = len(self._operators)
            # Two threads may learn at once: the number is where the name really came to stand.
            self._operators.append((operator, overload))
            while self._operators[number] != (operator, overload):
                number += 1
        self._functions.append(func)
        self._known[id(func)] = known = (direct_call(func), number)
        return known

    def give_up(self, error: Exception) -> None:
        """Note a fault of our own and record nothing more."""
        self.recording = False
        if self.fault is None:
            self.fault = error


def call_table(calls: CallRows) -> pa.Table:
    """Turn noted calls into the table of ATen calls (schema ATEN_CALLS), in order of their sequence.

    `(7, 12, 1, 0, 4, 4711, None, None)` becomes `7, 12, "forward", "aten.addmm", "default", null, null,
    '[[[256],"float32","cuda:0"],...]', 4711, "returned"`.
    """
    ordered = sorted(calls.rows)
    columns = list(zip(*ordered, strict=True)) if ordered else [()] * 8
    sequence, step, phase, operator, signature, thread, path, module_call = columns
    outcome = (
        [1 if number in calls.raised else 0 for number in sequence] if calls.raised else [0] * len(ordered)
    )
    inputs = _by_number(calls.signatures)
    return pa.Table.from_arrays(
        [
            pa.array(sequence, pa.int64()),
            pa.array(step, pa.int64()),
            _texts(phase, [str(name) for name in _PHASES]),
            _texts(operator, [name for name, _ in calls.operators]),
            _texts(operator, [overload for _, overload in calls.operators]),
            pa.array(path, pa.string()).dictionary_encode(),
            pa.array(module_call, pa.int64()),
            _texts(signature, [_inputs_text(one) for one in inputs]),
            pa.array(thread, pa.int64()),
            _texts(outcome, [str(CallOutcome.RETURNED), str(CallOutcome.RAISED)]),
        ],
        schema=ATEN_CALLS,
    )


def _operator_name(func: Any) -> tuple[str, str | None]:
    """Return ("aten.addmm", "default") of an operator, ("higher_order.cond", None) of a higher-order one."""
    if isinstance(func, torch._ops.OpOverload):
        name, _, overload = str(func).rpartition(".")
        return name, overload
    return f"higher_order.{func}", None


def _describe_subclass(tensor: torch.Tensor) -> _Described:
    with torch._C.DisableTorchFunctionSubclass():  # its own __torch_function__ is none of our business
        return (tensor.shape, tensor.dtype, tensor.device)


def _by_number(signatures: dict[tuple[_Described, ...], int]) -> list[tuple[_Described, ...]]:
    """Return the signatures so that each stands at its number; a number that a race left out is ()."""
    placed: list[tuple[_Described, ...]] = [()] * (max(signatures.values(), default=-1) + 1)
    for signature, number in signatures.items():
        placed[number] = signature
    return placed


def _inputs_text(signature: tuple[_Described, ...]) -> str:
    described = [
        [[int(size) for size in shape], str(dtype).removeprefix("torch."), str(device)]
        for shape, dtype, device in signature
    ]
    return json.dumps(described, separators=(",", ":"))


def _texts(numbers: Sequence[int | None], texts: Sequence[str | None]) -> pa.DictionaryArray:
    """Return the column of `texts[number]`, without a look at the single row."""
    distinct: dict[str, int] = {}
    place = [None if text is None else distinct.setdefault(text, len(distinct)) for text in texts]
    indices = pa.array([None if number is None else place[number] for number in numbers], pa.int32())
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(distinct), pa.string()))


def _forget_in_child() -> None:
    """Leave a forked child (a DataLoader's worker) nothing of a window: no mode, no ranges, no profiler's flag."""
    for mode in list(_LIVE):
        mode.recording = False
        if dispatch_mode_stack()[-1:] == (mode,):
            pop_dispatch_mode(mode)
    if profiler_flag():
        record_functions_off()
        set_profiler_flag(False)


_LIVE: weakref.WeakSet[CallMarkers] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)
for _function in (
    CallMarkers.__torch_dispatch__,
    CallMarkers._describe,
    CallMarkers._learn,
    CallMarkers._name,
    _Kinds.__missing__,
):
    skip_in_dynamo(cast(FunctionType, _function))

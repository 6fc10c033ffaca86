from __future__ import annotations

from typing import Any

import torch
from marked import SESSION, Marked
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tlk_tracking.core.records import Phase, StepBracket, StepOutcome
from tlk_tracking.recording.call_markers import CallMarkers
from tlk_tracking.recording.step_brackets import StepBrackets
from tlk_tracking.recording.torch_private import dispatch_mode_stack

COMPLETE, ABANDONED = StepOutcome.COMPLETE, StepOutcome.ABANDONED


class Theirs(TorchDispatchMode):
    """A mode of the user's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_mode_and_the_hooks_are_on_inside_a_bracket_only() -> None:
    found = Marked()
    hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    found.brackets.open(3, phase=Phase.BEFORE_BATCH)
    assert dispatch_mode_stack() == (found.calls,)
    found.brackets.close(COMPLETE)
    assert dispatch_mode_stack() == ()
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == hooks
    assert found.brackets.steps == [StepBracket(step=3, outcome=COMPLETE)]


def test_a_paused_bracket_goes_on_with_its_step_and_its_phase() -> None:
    found = Marked()
    found.brackets.open(3, phase=Phase.BEFORE_BATCH)
    torch.zeros(1)
    assert found.brackets.pause()
    assert not found.brackets.pause()
    torch.ones(1)
    found.brackets.resume()
    found.brackets.resume()
    torch.zeros(1)
    found.brackets.enter_phase(Phase.FORWARD)
    torch.zeros(1)
    found.brackets.close(COMPLETE)
    rows = found.calls.noted().rows
    zeros = len(rows) // 3
    assert [row[1] for row in rows] == [3] * len(rows)
    assert [row[2] for row in rows] == [0] * 2 * zeros + [1] * zeros
    assert found.brackets.steps == [StepBracket(step=3, outcome=COMPLETE)]


def test_closing_twice_is_closing_once() -> None:
    found = Marked()
    found.brackets.open(3, phase=Phase.FORWARD)
    found.brackets.close(ABANDONED)
    found.brackets.close(COMPLETE)
    assert found.brackets.steps == [StepBracket(step=3, outcome=ABANDONED)]


def test_a_mode_that_is_not_ours_is_never_popped() -> None:
    found, theirs = Marked(), Theirs()
    found.brackets.open(3, phase=Phase.FORWARD)
    theirs.__enter__()
    found.brackets.close(COMPLETE)
    assert found.brackets.displaced
    assert dispatch_mode_stack() == (found.calls, theirs)
    assert not found.brackets.settle()
    torch.ones(1)
    assert found.calls.noted().rows == []
    theirs.__exit__(None, None, None)
    assert found.brackets.settle()
    assert dispatch_mode_stack() == ()


def test_our_mode_goes_on_no_mode_that_came_after_the_fit_began() -> None:
    found = Marked()
    with Theirs() as theirs:
        found.brackets.open(3, phase=Phase.FORWARD)
        assert dispatch_mode_stack() == (theirs,)
    assert found.brackets.displaced
    assert dispatch_mode_stack() == ()
    found.brackets.close(ABANDONED)


def test_a_mode_that_was_on_when_the_fit_began_stays_on_below_ours() -> None:
    with Theirs() as theirs:
        found = Marked()
        found.brackets.open(3, phase=Phase.FORWARD)
        assert dispatch_mode_stack() == (theirs, found.calls)
        found.brackets.close(COMPLETE)
        assert dispatch_mode_stack() == (theirs,)
    assert not found.brackets.displaced


def test_a_mode_taken_away_by_somebody_is_noticed() -> None:
    calls = CallMarkers(SESSION)
    brackets = StepBrackets(SESSION, calls=calls, base=())
    brackets.open(3, phase=Phase.FORWARD)
    calls.__exit__(None, None, None)
    brackets.close(COMPLETE)
    assert brackets.displaced
    assert brackets.settle()


def test_an_optimizer_with_a_keyword_closure_gets_its_value() -> None:
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    found = Marked()
    found.brackets.open(3, phase=Phase.FORWARD)
    weight.sum().backward()
    result = optimizer.step(closure=lambda: 4.0)
    found.brackets.close(COMPLETE)
    assert result == 4.0
    assert weight.item() == 0.5

"""Keep what is no training out of a window's steps, and hear of errors first (Trainer -> its methods, wrapped)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer


class WrappedTrainer:
    """The methods of a Trainer and its parts that are wrapped while a window is open."""

    def __init__(self) -> None:
        """Wrap nothing yet."""
        self._put_back: list[Callable[[], None]] = []

    def wrap(
        self,
        trainer: Trainer,
        telemetry: Callback,
        *,
        pause: Callable[[], None],
        resume: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Pause around validation and checkpointing, and call `fail` before any callback hears of an error.

        Lightning's hooks are not enough: it loads validation batches before `on_validation_start`, has no hook at
        the end of saving, and runs checkpoint callbacks after all others. When a callback before `telemetry` fails
        in `on_exception`, it calls nobody else.
        """
        if self._put_back:
            return
        methods = [(trainer, "save_checkpoint"), (trainer.fit_loop.epoch_loop.val_loop, "run")]
        methods += [(callback, "on_train_batch_end") for callback in trainer.checkpoint_callbacks]
        for owner, name in methods:
            self._put_back.append(_wrap_method(owner, name, before=pause, after=resume))
        first = trainer.callbacks[0]  # type: ignore[attr-defined]  # Lightning sets it from outside the class
        if first is not telemetry:
            self._put_back.append(
                _wrap_method(first, "on_exception", before=lambda: _tell(fail), after=lambda: None)
            )

    def unwrap(self) -> None:
        """Put every method back as it was; any number of times."""
        while self._put_back:
            self._put_back.pop()()


def _tell(fail: Callable[[BaseException], None]) -> None:
    error = sys.exception()
    if error is not None:  # else somebody calls the other callback's hook for a reason of their own
        fail(error)


def _wrap_method(
    owner: Any, name: str, *, before: Callable[[], None], after: Callable[[], None]
) -> Callable[[], None]:
    """Let `before` and `after` run around a method of one object; return what puts it back as it was."""
    own = vars(owner).get(name)
    method = getattr(owner, name)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return method(*args, **kwargs)
        finally:
            after()

    def put_back() -> None:
        if vars(owner).get(name) is run:  # else somebody has wrapped it again: then ours only calls through
            del vars(owner)[name]
            if own is not None:
                vars(owner)[name] = own

    vars(owner)[name] = run
    return put_back

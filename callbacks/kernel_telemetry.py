"""Record kernel telemetry during a Lightning fit (the Trainer's hooks -> FitRecorder -> outbox -> MLflow run)."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec

from tlk_tracking.core.errors import ConfigurationError
from tlk_tracking.delivery.outbox import Outbox
from tlk_tracking.delivery.worker import WindowWorker
from tlk_tracking.recording.fit_recorder import FitFacts, FitRecorder
from tlk_tracking.recording.fused_kernels import FusedKernels
from tlk_tracking.recording.recording_ranks import choose_ranks, recording_in
from tlk_tracking.recording.schedule import WindowSchedule
from tlk_tracking.recording.torch_private import dispatch_mode_stack
from tlk_tracking.tracking.tracking_uri import Destination

from .trainer_facts import agree_on_run, default_outbox_folder, describe_fit
from .wrapped_trainer import WrappedTrainer

# One library under two names; either's Trainer takes either's callbacks, and loading both takes seconds.
if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

# How long an error that ended the fit may wait for the upload of what was recorded.
_DRAIN_AFTER_ERROR_S = 5.0

_log = logging.getLogger(__name__)
_Arguments = ParamSpec("_Arguments")


def _guarded(
    hook: Callable[Concatenate[KernelTelemetry, Trainer, _Arguments], None],
) -> Callable[Concatenate[KernelTelemetry, Trainer, _Arguments], None]:
    """Turn an error of our own in a hook into one warning; the window ends there and training goes on."""

    @functools.wraps(hook)
    def run(
        self: KernelTelemetry, trainer: Trainer, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> None:
        try:
            hook(self, trainer, *args, **kwargs)
        except ConfigurationError:  # of `setup` alone
            raise
        except Exception as error:  # noqa: BLE001 - telemetry never ends a training run, whatever is wrong with it
            self._give_up(trainer, error)

    return run


class KernelTelemetry(Callback):
    """Record windows of training steps and put what their kernels were into the Trainer's MLflow run.

    Args:
        every_n_steps: distance from the first warm-up step of one window to that of the next, in batches.
        skip_first: the step at which the first warm-up begins.
        warmup: steps in which the profiler gets ready.
        active: recorded steps of each window.
        max_windows: no more windows than this in one fit.
        min_interval_s: a window that comes due sooner than this after the last one is left out. Where several
            ranks record, steps alone decide: each rank has a clock of its own.
        at_steps: first recorded step of each window, instead of `every_n_steps`, `skip_first` and
            `min_interval_s`.
        synchronize: wait for the device before the first and after the last recorded step of a window.
        upload_timeout_s: how long the end of a fit may wait for what is still to be sent.
        outbox: folder in which windows wait until they are sent; by default below the Trainer's
            `default_root_dir`.
        run_id: MLflow run to write to, instead of the run of the Trainer's MLFlowLogger.
        tracking_uri: where `run_id` is; by default where MLflow itself is set to.
        ranks: the global ranks that record: "zero", "all" or a list of them. Rank 0's numbers are the run's metrics.
        fused: relate launches of compiled code to the ATen nodes they compute. Inductor then keeps that with each
            graph it compiles during the fit.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        skip_first: int = 10,
        warmup: int = 3,
        active: int = 3,
        max_windows: int = 10,
        min_interval_s: float = 60.0,
        at_steps: list[int] | None = None,
        synchronize: bool = True,
        upload_timeout_s: float = 30.0,
        outbox: str | Path | None = None,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        ranks: Literal["zero", "all"] | list[int] = "zero",
        fused: bool = False,
    ) -> None:
        super().__init__()
        self._schedule = WindowSchedule(
            every_n_steps=every_n_steps,
            skip_first=skip_first,
            warmup=warmup,
            active=active,
            max_windows=max_windows,
            min_interval_s=min_interval_s,
            at_steps=None if at_steps is None else tuple(at_steps),
        )
        if isinstance(upload_timeout_s, bool) or not 0 <= upload_timeout_s < float("inf"):
            raise ConfigurationError(
                f"upload_timeout_s={upload_timeout_s!r}; give a number of seconds of 0 or more"
            )
        if tracking_uri is not None and run_id is None:
            raise ConfigurationError(
                f"tracking_uri={tracking_uri!r} without a run; give run_id too, or neither"
            )
        self._synchronize = synchronize
        self._upload_timeout_s = upload_timeout_s
        self._outbox = outbox
        self._run_id = run_id
        self._tracking_uri = tracking_uri
        self._ranks = choose_ranks(ranks)
        self._fused = fused
        # Of one fit:
        self._fit: FitRecorder | None = None
        self._kernels: FusedKernels | None = None
        self._worker: WindowWorker | None = None
        self._requested = False
        self._wrapped = WrappedTrainer()

    def request_window(self) -> None:
        """Ask for a window at the next step, whatever the schedule says; from any thread."""
        self._requested = True

    @_guarded
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the run and get ready for a fit. Raises ConfigurationError when there is nowhere to log to."""
        self._leave()
        if stage != "fit":
            return
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning sets it from outside the class
            if trainer.is_global_zero:
                _log.warning("fast_dev_run: KernelTelemetry records no window")
            return
        recording = recording_in(self._ranks, world_size=trainer.world_size)
        outbox = Outbox(default_outbox_folder(trainer) if self._outbox is None else Path(self._outbox))
        token, destination = agree_on_run(trainer, run_id=self._run_id, tracking_uri=self._tracking_uri)
        if trainer.global_rank not in recording:
            return
        self._worker = self._make_worker(outbox, destination)
        if self._fused:
            self._kernels = FusedKernels()
            self._kernels.install()
        facts = FitFacts(
            token=token,
            base=dispatch_mode_stack(),
            synchronize=self._synchronize,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            recording_ranks=self._ranks,
            destination=destination,
            environment=lambda: describe_fit(trainer),
            root=pl_module,
            fused=self._kernels,
        )
        schedule = self._schedule if len(recording) == 1 else replace(self._schedule, min_interval_s=0.0)
        self._fit = FitRecorder(
            schedule, facts, outbox=outbox, worker=self._worker, global_step=lambda: trainer.global_step
        )
        # Its imports take seconds: early, so that they are over before its first window. What a checkpoint says of
        # steps that are over already is not known yet.
        if self._fit.has_window_ahead(trainer.fit_loop.total_batch_idx + 1):
            self._worker.start()

    @_guarded
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the first step of this fit."""
        if self._fit is not None:
            self._pass_boundary(trainer, self._fit)

    @_guarded
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note that the batch is on the device."""
        if self._fit is not None and self._fit.is_open:
            self._fit.begin_batch(trainer.fit_loop.total_batch_idx)

    @_guarded
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End this batch's step and begin the next one: between windows, one comparison."""
        fit = self._fit
        if fit is not None and (
            trainer.fit_loop.total_batch_idx + 1 >= fit.attention_step or self._requested
        ):
            self._pass_boundary(trainer, fit)

    @_guarded
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out of the step that comes next."""
        if self._fit is not None:
            self._fit.pause()

    @_guarded
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the step that comes next."""
        if self._fit is not None:
            self._fit.resume()

    @_guarded
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the end of the epoch out of the step that comes next."""
        if self._fit is not None:
            self._fit.pause()

    @_guarded
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the step that comes next."""
        if self._fit is not None:
            self._fit.before_epoch(trainer.fit_loop.total_batch_idx + 1)

    @_guarded
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the window that is open with what it has."""
        self._wrapped.unwrap()
        if self._fit is not None:
            self._fit.end(trainer.fit_loop.total_batch_idx + 1)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep what the open window has, before the logger is finalized; `exception` is the one that goes on."""
        try:
            self._wrapped.unwrap()
            if self._fit is not None:
                self._fit.fail(exception)
            if self._worker is not None:
                self._worker.drain(min(self._upload_timeout_s, _DRAIN_AFTER_ERROR_S))
        except BaseException as error:  # noqa: BLE001 - a second Ctrl-C too: what we raise would replace the first error
            _log.warning(
                "KernelTelemetry could not keep its window after %s: %r", type(exception).__name__, error
            )
        self._leave()

    @_guarded
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait, within `upload_timeout_s`, for what is still to be sent, and take off whatever is on."""
        try:
            self._wrapped.unwrap()
            if self._worker is not None:
                self._worker.drain(self._upload_timeout_s)
        finally:
            self._leave()

    def _make_worker(self, outbox: Outbox, destination: Destination) -> WindowWorker:
        return WindowWorker(outbox, destination, upload_timeout_s=self._upload_timeout_s)

    def _pass_boundary(self, trainer: Trainer, fit: FitRecorder) -> None:
        if self._requested:
            self._requested = False
            fit.request()
        fit.before_step(trainer.fit_loop.total_batch_idx + 1)
        if fit.is_open:
            self._wrapped.wrap(
                trainer,
                self,
                pause=lambda: self._try(trainer, fit.pause),
                resume=lambda: self._try(trainer, fit.resume),
                fail=lambda error: self.on_exception(trainer, trainer.lightning_module, error),
            )
        else:
            self._wrapped.unwrap()

    def _try(self, trainer: Trainer, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - as in a hook
            self._give_up(trainer, error)

    def _give_up(self, trainer: Trainer, error: Exception) -> None:
        """Say what is wrong with us, and record nothing more in this fit."""
        _log.warning(
            "KernelTelemetry failed at step %d and records nothing more in this fit; training goes on",
            trainer.fit_loop.total_batch_idx,
            exc_info=error,
        )
        fit, self._fit = self._fit, None
        try:
            self._wrapped.unwrap()
            if fit is not None:
                fit.close()
        except Exception:  # noqa: BLE001 - said above already
            _log.debug("closing after that failed too", exc_info=True)

    def _leave(self) -> None:
        """Take off whatever is on; for the end of a fit, whichever way it came, any number of times."""
        fit, self._fit = self._fit, None
        worker, self._worker = self._worker, None
        kernels, self._kernels = self._kernels, None
        self._requested = False
        try:
            self._wrapped.unwrap()
            if fit is not None:
                fit.close()
            if kernels is not None:
                kernels.remove()
            if worker is not None:
                worker.close()
        except Exception as error:  # noqa: BLE001 - there may be an error of the user's on its way
            _log.warning("KernelTelemetry could not close: %r", error)

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_fits import ABANDONED, COMPLETE, RAISED, SilentWorker, Small, Telemetry, batches, fit
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode

from tlk_tracking.callbacks import KernelTelemetry
from tlk_tracking.core.errors import ConfigurationError
from tlk_tracking.core.gaps import GapReason
from tlk_tracking.core.records import WindowSource
from tlk_tracking.recording.torch_private import dispatch_mode_stack, profiled_here, profiler_flag

pytestmark = [
    # Lightning's advice on workers, logging intervals and devices.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


@pytest.fixture
def telemetry(tmp_path: Path) -> Telemetry:
    return Telemetry(tmp_path / "outbox")


def nothing_is_on(trainer: Trainer | None = None) -> bool:
    wrapped = [] if trainer is None else [name for name in ("save_checkpoint",) if name in vars(trainer)]
    return dispatch_mode_stack() == () and profiler_flag() is False and not profiled_here() and wrapped == []


def reasons(telemetry: Telemetry) -> set[GapReason]:
    return {gap.reason for facts in telemetry.facts() for gap in facts.gaps}


# The main job


def test_the_worker_starts_before_the_fit_is_set_up(
    tmp_path: Path, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    class Witness(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            order.append("the fit is set up")

    monkeypatch.setattr(SilentWorker, "start", lambda worker: order.append("the worker starts"))
    fit(tmp_path, [telemetry, Witness()])
    assert order == ["the worker starts", "the fit is set up"]


def test_a_window_holds_the_steps_after_its_warm_up(tmp_path: Path, telemetry: Telemetry) -> None:
    trainer = fit(tmp_path, [telemetry])
    (facts,) = telemetry.facts()
    assert telemetry.steps() == [[(3, COMPLETE), (4, COMPLETE)]]
    assert (facts.source, facts.first_step, facts.warmup, facts.requested, facts.gaps, facts.global_step) == (
        WindowSource.CALLBACK, 3, 1, 2, (), 5,
    )  # fmt: skip
    assert (facts.environment.precision, facts.environment.strategy, facts.environment.world_size) == (
        "32-true", "SingleDeviceStrategy", 1,
    )  # fmt: skip
    assert nothing_is_on(trainer)


def test_every_step_of_a_window_has_the_same_calls(tmp_path: Path, telemetry: Telemetry) -> None:
    fit(tmp_path, [telemetry])
    calls = telemetry.calls("step", "phase", "operator", "overload", "inputs")
    assert [call[1:] for call in calls if call[0] == 3] == [call[1:] for call in calls if call[0] == 4]
    assert {call[1] for call in calls} == {"before_batch", "forward", "backward", "optimizer"}


def test_windows_come_as_scheduled_and_each_has_a_session_of_its_own(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "outbox", every_n_steps=4, max_windows=2)
    fit(tmp_path, [telemetry], steps=20)
    assert telemetry.steps() == [[(3, COMPLETE), (4, COMPLETE)], [(7, COMPLETE), (8, COMPLETE)]]
    assert len({facts.session for facts in telemetry.facts()}) == 2


def test_a_window_from_the_very_first_step(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "outbox", skip_first=0, warmup=0, active=1)
    fit(tmp_path, [telemetry], steps=2)
    assert telemetry.steps() == [[(0, COMPLETE)]]
    assert {"before_batch", "forward"} <= {phase for (phase,) in telemetry.calls("phase")}


def test_weights_losses_and_random_state_are_bit_identical(tmp_path: Path) -> None:
    class Losses(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(
            self, trainer: Trainer, module: LightningModule, outputs: Any, *rest: Any
        ) -> None:
            self.seen.append(outputs["loss"].item())

    def run(callbacks: list[Callback]) -> tuple[list[Tensor], list[float], Tensor]:
        torch.manual_seed(5)
        model, losses = Small(), Losses()
        fit(
            tmp_path, [*callbacks, losses], model=model, steps=30, validation=batches(3), val_check_interval=4
        )
        return [weight.detach() for weight in model.parameters()], losses.seen, torch.get_rng_state()

    plain = run([])
    recorded = run([telemetry := Telemetry(tmp_path / "outbox", every_n_steps=8, max_windows=3)])
    assert len(telemetry.facts()) == 3
    assert all(torch.equal(one, other) for one, other in zip(plain[0], recorded[0], strict=True))
    assert plain[1] == recorded[1]
    assert torch.equal(plain[2], recorded[2])


# What a step is


def test_validation_is_no_part_of_a_step(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "outbox", active=4)
    fit(tmp_path, [telemetry], validation=batches(3), val_check_interval=2)
    assert telemetry.steps() == [[(step, COMPLETE) for step in (3, 4, 5, 6)]]
    calls = telemetry.calls("step", "operator")
    assert "aten.erf" not in {operator for _, operator in calls}
    assert len({len([1 for step, _ in calls if step == at]) for at in (3, 4, 5, 6)}) == 1


def test_saving_a_checkpoint_is_no_part_of_a_step(tmp_path: Path, telemetry: Telemetry) -> None:
    fit(tmp_path, [telemetry], max_epochs=1)
    plain = telemetry.calls("step", "phase", "operator")
    saving = Telemetry(tmp_path / "saving")
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    trainer = fit(tmp_path, [saving, saver], enable_checkpointing=True)
    assert len(list((tmp_path / "saved").iterdir())) == 8
    assert saving.calls("step", "phase", "operator") == plain
    assert nothing_is_on(trainer)


def test_the_end_of_an_epoch_is_no_part_of_a_step(tmp_path: Path) -> None:
    class Busy(Small):
        def on_train_epoch_end(self) -> None:
            torch.erf(torch.ones(2))

    telemetry = Telemetry(tmp_path / "outbox", active=4)
    fit(tmp_path, [telemetry], model=Busy(), steps=4, max_epochs=2)
    assert telemetry.steps() == [[(step, COMPLETE) for step in (3, 4, 5, 6)]]
    assert "aten.erf" not in {operator for (operator,) in telemetry.calls("operator")}


def test_steps_are_batches_under_gradient_accumulation(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "outbox", active=4)
    fit(tmp_path, [telemetry], accumulate_grad_batches=2)
    assert telemetry.steps() == [[(step, COMPLETE) for step in (3, 4, 5, 6)]]
    stepped = {step for step, phase in telemetry.calls("step", "phase") if phase == "optimizer"}
    assert stepped == {3, 5}


def test_two_optimizers_in_manual_optimization(tmp_path: Path, telemetry: Telemetry) -> None:
    class Manual(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            for optimizer in self.optimizers():  # type: ignore[union-attr]  # two of them
                optimizer.zero_grad()
                self.manual_backward(torch.tanh(self.layers(batch[0])).sum())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layers[0], self.layers[2])]

    fit(tmp_path, [telemetry], model=Manual())
    assert telemetry.steps() == [[(3, COMPLETE), (4, COMPLETE)]]
    runs = [phase for step, phase in telemetry.calls("step", "phase") if step == 3]
    changes = [phase for phase, before in zip(runs, [None, *runs], strict=False) if phase != before]
    assert [phase for phase in changes if phase != "forward"] == [
        "before_batch",
        *["backward", "optimizer"] * 2,
    ]


def test_a_closure_based_optimizer(tmp_path: Path, telemetry: Telemetry) -> None:
    class Closing(Small):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    fit(tmp_path, [telemetry], model=Closing())
    phases = {phase for operator, phase in telemetry.calls("operator", "phase") if operator == "aten.mean"}
    assert phases == {"forward"}
    assert "optimizer" in {phase for (phase,) in telemetry.calls("phase")}


def test_a_batch_that_the_module_skips_is_no_step(tmp_path: Path) -> None:
    class Skipping(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 4 else None

    telemetry = Telemetry(tmp_path / "outbox", active=3)
    fit(tmp_path, [telemetry], model=Skipping(), steps=6, max_epochs=2)
    assert telemetry.steps() == [[(3, COMPLETE), (4, ABANDONED), (5, COMPLETE)]]
    assert reasons(telemetry) == {GapReason.WINDOW_TRUNCATED}


# How a fit ends


def test_a_fit_that_ends_before_its_first_window_says_so(
    tmp_path: Path, telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, [telemetry], steps=1)
    assert telemetry.facts() == []
    assert "without a window; the next was due at step 2" in caplog.text


@pytest.mark.parametrize("steps", [3, 4], ids=["in the warm-up", "in the first recorded step"])
def test_a_fit_that_ends_before_a_recorded_step_has_no_window_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    telemetry = Telemetry(tmp_path / "outbox", warmup=2)
    fit(tmp_path, [telemetry], steps=steps)
    assert telemetry.facts() == []
    assert f"the window due at step 4 has no step, as the fit ended before step {steps}" in caplog.text
    assert nothing_is_on()


def test_a_window_that_its_outbox_cannot_take_is_one_warning_that_names_the_outbox(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").touch()
    fit(tmp_path, [Telemetry(tmp_path / "a file")], steps=6)
    lost = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    assert len(lost) == 1
    assert lost[0].startswith(f"a window is lost, outbox {tmp_path / 'a file'}: ")
    assert nothing_is_on()


def test_a_fit_that_ends_in_a_window_leaves_a_partial_one(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "outbox", active=4)
    fit(tmp_path, [telemetry], steps=5)
    assert telemetry.steps() == [[(3, COMPLETE), (4, COMPLETE), (5, ABANDONED)]]
    assert reasons(telemetry) == {GapReason.WINDOW_TRUNCATED}
    assert nothing_is_on()


def test_fast_dev_run_is_one_line_and_no_window(
    tmp_path: Path, telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, [telemetry], fast_dev_run=8)
    assert telemetry.facts() == []
    assert [record.message for record in caplog.records if "KernelTelemetry" in record.message] == [
        "fast_dev_run: KernelTelemetry records no window"
    ]


@pytest.mark.parametrize("nothing", [{"limit_train_batches": 0}, {"max_steps": 0}, {"max_epochs": 0}])
def test_a_fit_without_a_step_has_no_window(
    tmp_path: Path, telemetry: Telemetry, nothing: dict[str, int]
) -> None:
    fit(tmp_path, [telemetry], **nothing)
    assert telemetry.facts() == []
    assert nothing_is_on()


def test_validating_alone_needs_no_run(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[KernelTelemetry()], enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.validate(Small(), batches(2), verbose=False)


def test_a_second_fit_with_one_object_begins_afresh(tmp_path: Path, telemetry: Telemetry) -> None:
    fit(tmp_path, [telemetry])
    fit(tmp_path, [telemetry])
    assert telemetry.steps() == [[(3, COMPLETE), (4, COMPLETE)]] * 2
    assert len({facts.session for facts in telemetry.facts()}) == 2


def test_a_resumed_fit_counts_on(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=4, save_top_k=-1)
    fit(tmp_path, [saver], enable_checkpointing=True)
    (middle, end) = sorted((tmp_path / "saved").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    telemetry = Telemetry(tmp_path / "outbox", skip_first=5)
    fit(tmp_path, [telemetry], checkpoint=middle)
    assert telemetry.steps() == [[(6, COMPLETE), (7, COMPLETE)]]
    finished = Telemetry(tmp_path / "finished")
    fit(tmp_path, [finished], checkpoint=end)
    assert finished.facts() == []


# Errors of the user's own


class Fails(Callback):
    """Raise in one hook at one step."""

    def __init__(self, hook: str, error: BaseException, *, at: int) -> None:
        self.error, self.at, self.seen = error, at, 0
        setattr(self, hook, self.fail)

    def fail(self, *arguments: Any, **keywords: Any) -> None:
        self.seen += 1
        if self.seen == self.at + 1:
            raise self.error


HOOKS = ["on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end"]


@pytest.mark.parametrize("first", [True, False], ids=["before ours", "after ours"])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_a_window_passes_and_what_was_recorded_is_kept(
    tmp_path: Path, telemetry: Telemetry, hook: str, first: bool
) -> None:
    fails = Fails(hook, ZeroDivisionError("theirs"), at=4)
    with pytest.raises(ZeroDivisionError) as caught:
        fit(tmp_path, [fails, telemetry] if first else [telemetry, fails])
    assert caught.value is fails.error
    assert telemetry.steps()[0][0] == (3, COMPLETE)
    ended_before = hook == "on_train_batch_end" and not first
    assert reasons(telemetry) == (
        set() if ended_before else {GapReason.CAPTURE_RAISED, GapReason.WINDOW_TRUNCATED}
    )
    assert nothing_is_on()


@pytest.mark.parametrize(
    ("error", "reaches"),
    [
        (KeyboardInterrupt("theirs"), SystemExit),
        (SystemExit(3), SystemExit),
        (torch.OutOfMemoryError("theirs"), None),
    ],
)
def test_any_kind_of_error_is_kept_by_its_type_alone(
    tmp_path: Path, telemetry: Telemetry, error: BaseException, reaches: type[BaseException] | None
) -> None:
    with pytest.raises(reaches or type(error)):
        fit(tmp_path, [telemetry, Fails("on_before_backward", error, at=4)])
    (facts,) = telemetry.facts()
    assert {gap.evidence for gap in facts.gaps if gap.reason is GapReason.CAPTURE_RAISED} == {
        type(error).__name__
    }
    assert "theirs" not in str(facts)
    assert telemetry.steps() == [[(3, COMPLETE), (4, RAISED)]]
    assert nothing_is_on()


@pytest.mark.parametrize("at", [0, 2, 6], ids=["before", "warm-up", "after"])
def test_an_error_outside_a_window_passes(tmp_path: Path, telemetry: Telemetry, at: int) -> None:
    fails = Fails("on_before_backward", ZeroDivisionError("theirs"), at=at)
    with pytest.raises(ZeroDivisionError) as caught:
        fit(tmp_path, [telemetry, fails])
    assert caught.value is fails.error
    assert len(telemetry.facts()) == (1 if at == 6 else 0)
    assert nothing_is_on()


def test_an_error_in_validation_inside_a_window(tmp_path: Path, telemetry: Telemetry) -> None:
    fails = Fails("on_validation_batch_start", ZeroDivisionError("theirs"), at=0)
    with pytest.raises(ZeroDivisionError):
        fit(
            tmp_path, [telemetry, fails],
            validation=batches(2), val_check_interval=4, num_sanity_val_steps=0,
        )  # fmt: skip
    assert telemetry.steps() == [[(3, COMPLETE), (4, ABANDONED)]]
    assert nothing_is_on()


def test_an_error_in_the_dataloader_inside_a_window(tmp_path: Path, telemetry: Telemetry) -> None:
    class Broken(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> list[Tensor]:  # type: ignore[override]  # as a TensorDataset gives it
            if index == 9:
                raise OSError("theirs")
            return [torch.ones(4)]

    trainer = Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", callbacks=[telemetry],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(OSError, match="theirs"):
        trainer.fit(Small(), torch.utils.data.DataLoader(Broken(), batch_size=2))
    assert reasons(telemetry) == {GapReason.CAPTURE_RAISED, GapReason.WINDOW_TRUNCATED}
    assert nothing_is_on(trainer)


def test_an_error_in_somebodys_setup_passes(tmp_path: Path, telemetry: Telemetry) -> None:
    for callbacks in ([telemetry, Fails("setup", OSError("theirs"), at=0)],
                      [Fails("setup", OSError("theirs"), at=0), telemetry]):  # fmt: skip
        with pytest.raises(OSError, match="theirs"):
            fit(tmp_path, callbacks)
    assert nothing_is_on()


def test_an_error_of_ours_on_the_way_out_does_not_replace_the_users(
    tmp_path: Path, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = Fails("on_before_backward", ZeroDivisionError("theirs"), at=4)

    def refuse(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tlk_tracking.recording.fit_recorder.FitRecorder.fail", refuse)
    with pytest.raises(ZeroDivisionError) as caught:
        fit(tmp_path, [telemetry, fails])
    assert caught.value is fails.error
    assert nothing_is_on()


def test_an_error_waits_at_most_five_seconds_for_the_upload(tmp_path: Path, telemetry: Telemetry) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, [telemetry, Fails("on_before_backward", ZeroDivisionError(), at=6)])
    assert telemetry.workers[0].drained == [5.0]


# Errors of our own


@pytest.mark.parametrize(
    "place",
    [
        "tlk_tracking.recording.fit_recorder.decide",
        "tlk_tracking.recording.fit_recorder.WindowRecorder.warm_up",
        "tlk_tracking.recording.fit_recorder.WindowRecorder.begin_step",
        "tlk_tracking.recording.fit_recorder.WindowRecorder.enter_phase",
        "tlk_tracking.recording.fit_recorder.WindowRecorder.end_step",
        "tlk_tracking.recording.fit_recorder.WindowRecorder.finish",
        "tlk_tracking.recording.fit_recorder.WindowRecorder.close",
        "tlk_tracking.recording.fit_recorder.call_table",
        "tlk_tracking.delivery.outbox.Outbox.open_window",
        "tlk_tracking.delivery.outbox.Outbox.seal_window",
        "lightning_fits.SilentWorker.submit",
        "lightning_fits.SilentWorker.drain",
        "lightning_fits.SilentWorker.close",
    ],
)
def test_a_fault_of_ours_is_a_warning_and_training_ends_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    telemetry = Telemetry(tmp_path / "outbox", every_n_steps=4)
    faults = []

    def refuse(*arguments: Any, **keywords: Any) -> None:
        faults.append(place)
        raise AttributeError("our own mistake")

    with monkeypatch.context() as patched:
        patched.setattr(place, refuse)
        trainer = fit(tmp_path, [telemetry], steps=12)
    assert trainer.global_step == 12
    assert faults
    assert [
        record.levelno
        for record in caplog.records
        if "our own mistake" in f"{record.getMessage()}{record.exc_info}"
    ] == [logging.WARNING]


# Somebody else's profilers and modes


def test_beside_a_users_profiler_the_window_is_skipped_and_says_so(
    tmp_path: Path, telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        fit(tmp_path, [telemetry])
    assert "aten::addmm" in {event.key for event in theirs.key_averages()}
    (facts,) = telemetry.facts()
    assert ([gap.reason for gap in facts.gaps], facts.steps) == ([GapReason.WINDOW_SKIPPED], ())
    assert "another torch profiler is running" in caplog.text


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_users_scheduled_profiler_gets_its_cycles(tmp_path: Path, telemetry: Telemetry) -> None:
    ready = []

    class Stepping(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            theirs.step()

    plan = schedule(wait=1, warmup=1, active=1)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=plan,
        on_trace_ready=lambda done: ready.append(len(done.events())),
    ) as theirs:
        fit(tmp_path, [telemetry, Stepping()], steps=9)
    assert len(ready) == 3
    assert all(ready)
    assert reasons(telemetry) == {GapReason.WINDOW_SKIPPED}


class Theirs(TorchDispatchMode):
    """A mode of the user's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class InBatch(Callback):
    """Have a mode on from a batch's start to its end."""

    mode = Theirs()

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.mode.__enter__()

    def on_train_batch_end(self, *arguments: Any) -> None:
        assert dispatch_mode_stack()[-1] is self.mode
        self.mode.__exit__(None, None, None)


def test_a_mode_that_is_put_on_over_ours_stays_and_the_window_says_so(
    tmp_path: Path, telemetry: Telemetry
) -> None:
    fit(tmp_path, [telemetry, InBatch()])
    assert GapReason.MODE_DISPLACED in reasons(telemetry)
    assert nothing_is_on()


def test_a_mode_that_comes_and_goes_inside_ours_is_no_trouble(tmp_path: Path, telemetry: Telemetry) -> None:
    fit(tmp_path, [InBatch(), telemetry])
    assert telemetry.steps() == [[(3, COMPLETE), (4, COMPLETE)]]
    assert nothing_is_on()


def test_a_mode_around_the_fit_is_on_after_it(tmp_path: Path, telemetry: Telemetry) -> None:
    with Theirs() as theirs:
        fit(tmp_path, [telemetry])
        assert dispatch_mode_stack() == (theirs,)
    assert telemetry.steps() == [[(3, COMPLETE), (4, COMPLETE)]]


# Asking for it, and asking wrongly


def test_a_requested_window_begins_with_the_next_step(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "outbox", skip_first=500)

    class Asking(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 2:
                telemetry.request_window()

    fit(tmp_path, [telemetry, Asking()])
    assert telemetry.steps() == [[(4, COMPLETE), (5, COMPLETE)]]


def test_at_steps_are_the_first_recorded_steps(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "outbox", at_steps=[1, 5], active=1)
    fit(tmp_path, [telemetry])
    assert telemetry.steps() == [[(1, COMPLETE)], [(5, COMPLETE)]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"every_n_steps": 2},
        {"active": 0},
        {"upload_timeout_s": -1.0},
        {"upload_timeout_s": float("inf")},
        {"tracking_uri": "sqlite:///mlflow.db"},
    ],
)
def test_a_wrong_argument_is_refused_with_what_to_give(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="give"):
        KernelTelemetry(**wrong)


def test_nowhere_to_log_is_an_error_that_names_both_ways(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"MLFlowLogger.*run_id=mlflow\.active_run\(\)\.info\.run_id"
    ):
        fit(tmp_path, [KernelTelemetry()])


def test_a_remote_root_folder_needs_an_outbox(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, default_root_dir="memory://somewhere", enable_checkpointing=False,
        callbacks=[KernelTelemetry(run_id="x")], enable_progress_bar=False,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"KernelTelemetry\(outbox="):
        trainer.fit(Small(), batches(2))


# Forks, threads and many windows


class Witness(torch.utils.data.Dataset[list[Tensor]]):
    """Rows of ones in a worker that has something of ours: a mode on its stack, a profiler's flag."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[Tensor]:
        return [torch.full((4,), 1.0 if dispatch_mode_stack() or profiler_flag() else 0.0)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_forked_inside_a_window_have_nothing_of_ours(tmp_path: Path) -> None:
    seen: list[float] = []

    class Watching(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            seen.extend(batch[0].flatten().tolist())
            return super().training_step(batch, batch_idx)

    telemetry = Telemetry(tmp_path / "outbox", skip_first=0, warmup=0, active=12)
    loader = torch.utils.data.DataLoader(
        Witness(), batch_size=2, num_workers=1, multiprocessing_context="fork"
    )
    trainer = Trainer(
        max_epochs=3, logger=False, enable_checkpointing=False, accelerator="cpu", callbacks=[telemetry],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Watching(), loader)
    assert [outcome for _, outcome in telemetry.steps()[0]] == [COMPLETE] * 12
    assert seen == [0.0] * 3 * 8 * 4


def test_of_two_fits_in_two_threads_one_has_the_window(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meet = threading.Barrier(2, timeout=60)

    class Meeting(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx in (3, 5):
                meet.wait()

    telemetries = [Telemetry(tmp_path / name) for name in ("one", "other")]
    threads = [
        threading.Thread(target=fit, args=(tmp_path / str(number), [telemetry, Meeting()]))
        for number, telemetry in enumerate(telemetries)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps = sorted((telemetry.steps() for telemetry in telemetries), key=str)
    assert steps == [[[(3, COMPLETE), (4, COMPLETE)]], [[]]]
    assert caplog.text.count("another window of this process is open") == 1
    assert nothing_is_on()

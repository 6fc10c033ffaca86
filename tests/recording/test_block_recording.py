from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tlk_tracking import record_kernels
from tlk_tracking.core.errors import RecordingError
from tlk_tracking.core.gaps import GapReason
from tlk_tracking.core.records import StepOutcome
from tlk_tracking.recording.torch_private import dispatch_mode_stack


def test_the_block_is_one_step_numbered_zero() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_kernels() as recording:
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    annotation = recording.annotation
    assert [(row.step, row.outcome) for row in annotation.manifest.window.steps] == [
        (0, StepOutcome.COMPLETE)
    ]
    assert annotation.manifest.gaps == ()
    calls = annotation.aten_calls
    assert set(calls["step"]) == {0}
    assert set(calls["phase"]) == {"forward", "backward", "optimizer"}
    assert list(calls["sequence"]) == list(range(len(calls)))


@pytest.mark.parametrize("error", [ValueError("theirs"), KeyboardInterrupt("theirs"), SystemExit(3)])
def test_a_block_that_raises_is_annotated_and_its_error_passes_unchanged(error: BaseException) -> None:
    def fail() -> None:
        torch.ones(2)
        raise error

    with pytest.raises(type(error)) as caught, record_kernels() as recording:
        fail()
    assert caught.value is error
    manifest = recording.annotation.manifest
    assert {(gap.reason, gap.evidence) for gap in manifest.gaps} >= {
        (GapReason.CAPTURE_RAISED, type(error).__name__)
    }
    assert [row.outcome for row in manifest.window.steps] == [StepOutcome.RAISED]
    assert "theirs" not in str(manifest)
    assert manifest.lower_bound


def test_a_second_recording_works_after_one_that_raised() -> None:
    with pytest.raises(ValueError, match="first"), record_kernels():
        raise ValueError("first")
    with record_kernels() as recording:
        torch.ones(2)
    assert len(recording.annotation.aten_calls) >= 1


def test_the_annotation_is_there_only_after_the_block() -> None:
    with record_kernels() as recording, pytest.raises(RecordingError, match="not over"):
        _ = recording.annotation
    assert recording.annotation.manifest.gaps == ()


def test_a_recording_inside_another_is_refused_before_its_block_runs() -> None:
    ran = False
    with record_kernels() as recording:
        with pytest.raises(RecordingError, match="another window"), record_kernels():
            ran = True
        torch.ones(2)
    assert not ran
    assert len(recording.annotation.aten_calls) >= 1


def test_a_recording_beside_a_users_profiler_is_refused() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        with pytest.raises(RecordingError, match="another torch profiler is running"), record_kernels():
            pass
        torch.ones(2)
    assert [event.key for event in theirs.key_averages() if event.key == "aten::ones"] == ["aten::ones"]


def test_a_profiler_inside_the_block_keeps_its_events_and_the_recording_says_so() -> None:
    with record_kernels() as recording, profile(activities=[ProfilerActivity.CPU]) as theirs:
        torch.ones(2)
    assert "aten::ones" in {event.key for event in theirs.key_averages()}
    manifest = recording.annotation.manifest
    assert manifest.availability_reason is not None
    assert {gap.reason for gap in manifest.gaps} == {GapReason.WINDOW_TRUNCATED}


def test_results_and_random_state_are_those_without_a_recording() -> None:
    def run(record: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            if record:
                with record_kernels():
                    model(torch.randn(2, 4)).sum().backward()
                    optimizer.step()
            else:
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
        return torch.cat([weight.detach().flatten() for weight in model.parameters()]), torch.get_rng_state()

    plain, recorded = run(False), run(True)
    assert torch.equal(plain[0], recorded[0])
    assert torch.equal(plain[1], recorded[1])


def test_nothing_is_left_on() -> None:
    with record_kernels():
        pass
    assert dispatch_mode_stack() == ()
    assert not torch.autograd.profiler._is_profiler_enabled

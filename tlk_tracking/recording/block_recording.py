"""Record any PyTorch code and annotate it on the spot (`with` block -> KernelAnnotation)."""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.attribution.annotate import annotate
from tlk_tracking.core.errors import RecordingError
from tlk_tracking.core.records import Phase, StepOutcome, WindowSource
from tlk_tracking.recording.call_markers import call_table
from tlk_tracking.recording.fused_kernels import FusedKernels
from tlk_tracking.recording.torch_private import dispatch_mode_stack
from tlk_tracking.recording.window_recorder import WindowPlan, WindowRecorder

_log = logging.getLogger(__name__)


class Recording:
    """What `record_kernels()` gives: it holds the annotation once the block is over."""

    def __init__(self) -> None:
        self._annotation: KernelAnnotation | None = None
        self._failure: Exception | None = None

    @property
    def annotation(self) -> KernelAnnotation:
        """What was recorded. Raises RecordingError before the block is over, or when it could not be annotated."""
        if self._annotation is not None:
            return self._annotation
        if self._failure is not None:
            raise RecordingError(f"the recording could not be annotated: {self._failure}") from self._failure
        raise RecordingError("the recording is not over; read `annotation` after the `with` block")

    def _repr_html_(self) -> str:
        return "<p>recording …</p>" if self._annotation is None else self._annotation._repr_html_()


@contextmanager
def record_kernels(
    *, model: nn.Module | None = None, fused: FusedKernels | None = None, synchronize: bool = True
) -> Iterator[Recording]:
    """Record the block as one step, number 0, and annotate it when it ends, also when it raises.

    Args:
        model: the calls are named after the parts of this module (`model.named_modules()`); None leaves that open.
        fused: relate launches of compiled code to the ATen nodes they compute, for what was compiled while this was
            on (`with FusedKernels() as fused:` around compilation and recording); None leaves them without.
        synchronize: wait for the device when the recording begins and ends, so that no kernel of before is in it
            and every kernel of the block is.

    Raises:
        RecordingError: another profiler or another window is open, a CUDA graph is being captured, or what was
            recorded could not be annotated. What the block itself raises passes unchanged.
    """
    recording = Recording()
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    plan = WindowPlan(
        session=secrets.token_hex(4),
        source=WindowSource.RECORD_KERNELS,
        first_step=0,
        warmup=0,
        requested=1,
        synchronize=synchronize,
        rank=torch.distributed.get_rank() if distributed else 0,
        world_size=torch.distributed.get_world_size() if distributed else 1,
    )
    recorder = WindowRecorder(plan, base=dispatch_mode_stack(), root=model, fused=fused)
    try:
        recorder.warm_up()
        recorder.begin_step(0, phase=Phase.FORWARD)
        yield recording
    except BaseException as error:  # tidied up, then raised on
        if recorder.step is not None:
            _finish_after(error, recorder, recording)
        raise
    else:
        recorder.end_step(StepOutcome.COMPLETE)
        recording._annotation = _finish(recorder, error=None)
    finally:
        recorder.close()


def _finish_after(error: BaseException, recorder: WindowRecorder, recording: Recording) -> None:
    """Annotate a block that raised; the block's own error is the one that goes on."""
    try:
        recording._annotation = _finish(recorder, error=error)
    except Exception as failure:  # noqa: BLE001 - it is shown when somebody asks for the annotation
        recording._failure = failure
        _log.warning("the recording of a block that raised could not be annotated: %s", failure)


def _finish(recorder: WindowRecorder, *, error: BaseException | None) -> KernelAnnotation:
    with tempfile.TemporaryDirectory(prefix="tlk_") as folder:
        recorded = recorder.finish(Path(folder) / "trace.json", global_step=0, error=error)
        return annotate(
            recorded.trace, recorded.facts, calls=call_table(recorded.calls), graphs=recorded.graphs
        )

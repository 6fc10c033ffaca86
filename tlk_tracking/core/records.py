"""The nouns that the stages pass on: closed sets, public records and the facts of one window."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tlk_tracking.core.gaps import Gap

MARKER_PREFIX = "tlk::"

# Which ranks were to record a window; a list is ascending.
RecordingRanks = Literal["all"] | tuple[int, ...]


class Phase(StrEnum):
    """Where in a training step an ATen call ran."""

    BEFORE_BATCH = "before_batch"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class CallOutcome(StrEnum):
    """How an ATen call ended."""

    RETURNED = "returned"
    RAISED = "raised"


class StepOutcome(StrEnum):
    """How a step bracket ended; an abandoned one is no step and in no total."""

    COMPLETE = "complete"
    RAISED = "raised"
    ABANDONED = "abandoned"


class StepKind(StrEnum):
    """How a recorded step was recorded: with a range around each ATen call, or with its own bracket alone."""

    MARKED = "marked"
    PLAIN = "plain"


class Clock(StrEnum):
    """Which clock timed the unprofiled steps: the device's (CUDA events) or the host's."""

    DEVICE = "device"
    HOST = "host"


class LaunchKind(StrEnum):
    """What ran on the device, from Kineto's typed category alone."""

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"


class AttributionStatus(StrEnum):
    """Whether a kernel launch is related to an ATen call."""

    ATTRIBUTED = "attributed"
    UNATTRIBUTED = "unattributed"
    UNAVAILABLE = "unavailable"


class Availability(StrEnum):
    """Whether device telemetry could be recorded."""

    RECORDED = "recorded"
    EMPTY = "empty"
    UNAVAILABLE = "unavailable"


class Origin(StrEnum):
    """What a relation between an ATen call and a kernel launch rests on."""

    DISPATCH = "dispatch"
    INDUCTOR_KERNEL = "inductor_kernel"
    INDUCTOR_GRAPH = "inductor_graph"


class CallSource(StrEnum):
    """What the rows of aten_calls are."""

    DISPATCH_MODE = "dispatch_mode"
    MARKERS_ONLY = "markers_only"
    HOST_OPS = "host_ops"


class WindowSource(StrEnum):
    """Who recorded the window."""

    CALLBACK = "callback"
    RECORD_KERNELS = "record_kernels"
    IMPORT = "import"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInput:
    """One tensor argument of an ATen call."""

    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AtenCall:
    """One call that PyTorch's dispatcher re-dispatched below autograd. None is unknown."""

    sequence: int
    step: int | None
    phase: Phase | None
    operator: str | None
    overload: str | None
    module: str | None
    inputs: tuple[TensorInput, ...] | None
    thread: int | None
    outcome: CallOutcome | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
    """The public row for one device record; `duration` is in microseconds. None is unknown."""

    launch_name: str | None
    device: int | None
    stream: int | None
    duration: float | None
    runtime_correlation: int | None
    attribution_status: AttributionStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBracket:
    """One recorded step of a window, and how it ended."""

    step: int
    outcome: StepOutcome
    kind: StepKind = StepKind.MARKED


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprofiledStep:
    """The length of one step before the warm-up, while no profiler ran.

    `phase_ns` are the lengths of its phases, in the order in which they began, a phase that came twice added up;
    None where the hooks could not tell the phases of this step apart. They add up to `length_ns`.
    """

    step: int
    length_ns: int
    phase_ns: dict[Phase, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprofiledSteps:
    """The unprofiled steps of a window. `after_session`: a profiler session had run before in this process."""

    clock: Clock
    after_session: bool
    steps: tuple[UnprofiledStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The closed list of what an annotation says of where it was recorded. None is unknown."""

    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    cupti: str | None = None
    python: str | None = None
    lightning: str | None = None
    mlflow: str | None = None
    tlk_tracking: str | None = None
    gpu_model: str | None = None
    gpu_count: int | None = None
    os_family: str | None = None
    precision: str | None = None
    strategy: str | None = None
    world_size: int | None = None
    compiled: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFacts:
    """What the recording side knows of one window and the trace does not say.

    Attributes:
        session: 8 lowercase hex digits; the markers of this window carry it.
        first_step: first step of the active part.
        warmup: warm-up steps before it.
        requested: marked steps that were asked for.
        plain: plain steps that were asked for before the marked ones, and as many after them.
        steps: the brackets that were opened after the warm-up, in order, plain and marked.
        unprofiled: the steps that were timed before the warm-up; None without two of them.
        synchronized: whether the device was synchronized at both ends of the active part.
        device_expected: False when it is known that no device record could be made (no CUDA); its
            reason is `unavailable_reason`.
        gaps: what the recording side itself could not see (`mode_displaced`, `capture_raised`, ...).
        recording_ranks: the ranks that were to record this window; None is unknown.
        global_step: the Trainer's `global_step` when the window closed: the step axis of its metrics.
    """

    session: str
    source: WindowSource
    first_step: int
    warmup: int
    requested: int
    steps: tuple[StepBracket, ...]
    synchronized: bool
    device_expected: bool = True
    unavailable_reason: str | None = None
    rank: int = 0
    world_size: int = 1
    recording_ranks: RecordingRanks | None = None
    global_step: int = 0
    gaps: tuple[Gap, ...] = ()
    plain: int = 0
    unprofiled: UnprofiledSteps | None = None
    environment: Environment = Environment()

"""What `tlk doctor` says of each subject (facts -> Line)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from tlk_tracking.core.errors import TlkError
from tlk_tracking.core.records import Availability, Environment
from tlk_tracking.core.text import plural, visible
from tlk_tracking.delivery.outbox import Outbox

PROBE_KERNELS = 3
_LOW_DISK_BYTES = 2 << 30
_PROC = Path("/proc")
# Programs that hold CUPTI or the profiling counters for themselves.
_TOOLS = frozenset(
    {"nsys", "nsys-launcher", "ncu", "nv-nsight-cu-cli", "cuda-gdb", "compute-sanitizer", "nvprof"}
)
_TOOL_VARIABLES = (
    "CUDA_INJECTION64_PATH",
    "NSYS_PROFILING_SESSION_ID",
    "NVTX_INJECTION64_PATH",
    "KINETO_USE_DAEMON",
)


class Subject(StrEnum):
    """What a line of the diagnosis is about, in the order of the lines."""

    GPU = "gpu"
    DRIVER = "driver"
    TORCH = "torch"
    SESSION = "session"
    TOOLS = "tools"
    PERMISSION = "permission"
    LIGHTNING = "lightning"
    MLFLOW = "mlflow"
    TRACKING = "tracking"
    OUTBOX = "outbox"


class State(StrEnum):
    """How it is: fine, worth knowing, or in the way."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that was looked at; `advice` says what to do where it is not fine."""

    subject: Subject
    state: State
    found: str
    advice: str | None = None


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a tiny recording of `PROBE_KERNELS` kernels came to.

    Attributes:
        gpus: the devices that torch can use.
        availability: of the recording; None when there was an error.
        reason: why it is unavailable, or the error.
        kernels: kernels that were recorded.
    """

    environment: Environment
    gpus: tuple[str, ...]
    availability: Availability | None
    reason: str | None
    kernels: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What nvidia-smi says."""

    gpus: tuple[str, ...]
    driver: str | None


def gpu_line(hardware: Hardware, probed: ProbeAnswer | None) -> Line:
    """Say which GPUs torch can use."""
    usable = probed.gpus if probed is not None else ()
    names = usable or hardware.gpus
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if usable:
        return ok(Subject.GPU, counted)
    if hardware.gpus:
        advice = "see the lines driver and torch, and look at CUDA_VISIBLE_DEVICES"
        return fail(Subject.GPU, f"{counted}, not usable by torch", advice)
    return fail(
        Subject.GPU, "no NVIDIA GPU", "train where there is one; here a run gets ATen calls only, and says so"
    )


def driver_line(hardware: Hardware, probed: ProbeAnswer | None) -> Line:
    """Say which driver there is."""
    driver = (probed.environment.driver if probed is not None else None) or hardware.driver
    if driver is not None:
        return ok(Subject.DRIVER, f"NVIDIA {driver}")
    return note(
        Subject.DRIVER,
        "no NVIDIA driver",
        "with a GPU: install its driver, or start the container with --gpus all",
    )


def torch_line(probed: ProbeAnswer | None) -> Line:
    """Say whether torch is built for CUDA."""
    installed = _installed("torch")
    if installed is None:
        return fail(Subject.TORCH, "not installed", "pip install torch")
    if probed is None:
        return note(Subject.TORCH, installed, "see the line session")
    environment = probed.environment
    if environment.cuda is None:
        return fail(
            Subject.TORCH,
            f"{environment.torch}, built without CUDA",
            "for a GPU install a CUDA build: pytorch.org/get-started",
        )
    cupti = f", CUPTI {environment.cupti}" if environment.cupti else ""
    found = f"{environment.torch}, CUDA {environment.cuda}{cupti}"
    return ok(Subject.TORCH, found)


def session_line(answer: ProbeAnswer | str) -> Line:
    """Say what the tiny recording came to."""
    if isinstance(answer, str):
        advice = "free the GPU of other profilers, then look at nvidia-smi and dmesg"
        return fail(Subject.SESSION, visible(answer), advice)
    if answer.availability is Availability.RECORDED:
        whole = answer.kernels == PROBE_KERNELS
        return Line(
            subject=Subject.SESSION,
            state=State.OK if whole else State.NOTE,
            found=f"a tiny session recorded {answer.kernels} of {PROBE_KERNELS} kernels",
            advice=None if whole else "another tool may take records; see the line tools",
        )
    what = answer.availability.value if answer.availability is not None else "no recording"
    advice = "see the lines above" if not answer.gpus else "see the lines tools and permission"
    return fail(Subject.SESSION, f"{what}: {visible(answer.reason or 'no kernel was recorded')}", advice)


def tools_line(environ: Mapping[str, str]) -> Line:
    """Say which other profilers run or are switched on."""
    running = sorted(_TOOLS & set(_process_names()))
    variables = [name for name in _TOOL_VARIABLES if environ.get(name)]
    if not running and not variables:
        return ok(Subject.TOOLS, "no other profiler seen")
    return note(
        Subject.TOOLS,
        ", ".join([*running, *(f"{name} is set" for name in variables)]),
        "one tool at a time gets device records; train without it",
    )


def permission_line() -> Line:
    """Activity records need no privilege; device files that this user cannot open, and old drivers, do."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    closed = [device.name for device in devices if not os.access(device, os.R_OK | os.W_OK)]
    if closed:
        return fail(
            Subject.PERMISSION,
            f"/dev/{closed[0]} cannot be opened by this user",
            "add the user to the group that owns it",
        )
    try:
        restricted = "RmProfilingAdminOnly: 1" in (_PROC / "driver/nvidia/params").read_text()
    except OSError:
        restricted = False
    if restricted and os.geteuid() != 0:
        return note(
            Subject.PERMISSION,
            "profiling counters are for administrators only",
            "kernels are recorded all the same unless the line session says otherwise",
        )
    return ok(Subject.PERMISSION, "nothing in the way")


def lightning_line() -> Line:
    """Say which of the two Lightning packages there is; `lightning` brings its twin along."""
    versions = {name: number for name in ("lightning", "pytorch-lightning") if (number := _installed(name))}
    found = ", ".join(f"{name} {number}" for name, number in versions.items())
    if not versions:
        return note(
            Subject.LIGHTNING,
            "neither lightning nor pytorch-lightning",
            "pip install lightning for the callback; record_kernels() needs none",
        )
    if len(set(versions.values())) == 2:
        return note(
            Subject.LIGHTNING,
            found,
            "import Trainer, callbacks and MLFlowLogger from the same one of the two",
        )
    return ok(Subject.LIGHTNING, found)


def mlflow_line() -> Line:
    """Say which of the two MLflow packages there is."""
    full, skinny = _installed("mlflow"), _installed("mlflow-skinny")
    if full is not None:
        return ok(Subject.MLFLOW, f"mlflow {full}")
    if skinny is not None:
        return ok(
            Subject.MLFLOW, f"mlflow-skinny {skinny}: servers only; sqlite:///... needs the whole mlflow"
        )
    return fail(Subject.MLFLOW, "not installed", "pip install mlflow")


def outbox_line(root: Path) -> Line:
    """Say how much room there is and what waits to be sent."""
    folder = next((path for path in (root, *root.absolute().parents) if path.is_dir()), Path("/"))
    free = shutil.disk_usage(folder).free
    space = f"{free / 1e9:.0f} GB free for {root}"
    if not os.access(folder, os.W_OK):
        return fail(
            Subject.OUTBOX, f"{folder} cannot be written", "give the callback an outbox folder elsewhere"
        )
    outbox = Outbox(root)
    try:
        unsent = len(outbox.raw_windows()) + len(outbox.entries())
    except (OSError, TlkError) as error:
        advice = "give the callback an outbox folder of your own"
        return fail(Subject.OUTBOX, visible(str(error)), advice)
    if unsent:
        advice = f"tlk upload --outbox {root}"
        found = f"{space}, {plural(unsent, 'unsent annotation')}"
        return note(Subject.OUTBOX, found, advice)
    if free < _LOW_DISK_BYTES:
        return note(
            Subject.OUTBOX, space, "a window of a large model needs some hundred MB while it is annotated"
        )
    return ok(Subject.OUTBOX, f"{space}, nothing unsent")


def ok(subject: Subject, found: str) -> Line:
    """Make a line of what is fine."""
    return Line(subject=subject, state=State.OK, found=found)


def note(subject: Subject, found: str, advice: str) -> Line:
    """Make a line of what is worth knowing."""
    return Line(subject=subject, state=State.NOTE, found=found, advice=advice)


def fail(subject: Subject, found: str, advice: str) -> Line:
    """Make a line of what is in the way."""
    return Line(subject=subject, state=State.FAIL, found=found, advice=advice)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _process_names() -> Iterable[str]:
    for path in _PROC.glob("[0-9]*/comm"):
        try:
            yield path.read_text().strip()
        except OSError:  # the process ended meanwhile
            continue

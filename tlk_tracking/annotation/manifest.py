"""The manifest of an annotation: the strict JSON of `annotation.json`, as closed structs."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from tlk_tracking.core.errors import AnnotationError
from tlk_tracking.core.gaps import Bound, GapReason
from tlk_tracking.core.places import MANIFEST_FILE
from tlk_tracking.core.records import Availability, CallSource, StepOutcome, WindowSource

SCHEMA = "tlk_tracking.kernel_annotation"
SCHEMA_VERSION = 1
NOTES = frozenset(
    {
        "empty_transfers", "launching_calls", "renumbered_steps",
        "fused_inductor_kernel", "fused_inductor_graph", "fused_autotuning", "fused_no_provenance",
    }
)  # fmt: skip
_MESSAGE_LENGTH = 500

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Text = Annotated[str, msgspec.Meta(max_length=2000)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Session = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8}$")]


class _Closed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A struct that knows all its fields and refuses others."""


class Number(_Closed, frozen=True):
    """A value with its bound; null is unknown."""

    value: int | float | None
    bound: Bound


class StepRow(_Closed, frozen=True):
    """One step bracket of the window."""

    step: _Count
    outcome: StepOutcome


class Window(_Closed, frozen=True):
    """Which steps were asked for and which were seen."""

    first_step: _Count
    warmup: _Count
    requested: _Count
    steps: Annotated[tuple[StepRow, ...], msgspec.Meta(max_length=1_000_000)]
    synchronized: bool | None


class GapRow(_Closed, frozen=True):
    """One reason why the window could not see something."""

    reason: GapReason
    count: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    evidence: _Text


class AuditRow(_Closed, frozen=True):
    """Kineto's external-id link against the markers, in launches; null when there was nothing to audit."""

    agreed: _Count | None
    disagreed: _Count | None
    not_audited: _Count | None


class EnvironmentRow(_Closed, frozen=True):
    """Where it was recorded: a closed list; null is unknown."""

    torch: _Text | None = None
    cuda: _Text | None = None
    driver: _Text | None = None
    cupti: _Text | None = None
    python: _Text | None = None
    lightning: _Text | None = None
    mlflow: _Text | None = None
    tlk_tracking: _Text | None = None
    gpu_model: _Text | None = None
    gpu_count: _Count | None = None
    os_family: _Text | None = None
    precision: _Text | None = None
    strategy: _Text | None = None
    world_size: _Count | None = None
    compiled: bool | None = None


class FileRow(_Closed, frozen=True):
    """One other file of the annotation."""

    rows: _Count
    bytes: _Count
    sha256: _Digest


class Manifest(_Closed, frozen=True):
    """Everything of an annotation that is not a table.

    `recording_ranks` are the ranks that were to record this window, null where that is unknown.
    `notes` are facts that bound nothing: `empty_transfers` copy or set calls of zero bytes, `launching_calls` runtime
    calls that launch, `renumbered_steps` steps of a trace that gave several the same number; with fused kernels,
    launches without an ATen call in compiled graphs: `fused_inductor_kernel` and `fused_inductor_graph` related to
    nodes, `fused_autotuning` and `fused_no_provenance` not.
    """

    schema: str
    schema_version: int
    session: _Session
    source: WindowSource
    call_source: CallSource
    availability: Availability
    availability_reason: _Text | None
    lower_bound: bool
    lower_bound_reasons: tuple[GapReason, ...]
    window: Window
    rank: _Count
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    recording_ranks: Literal["all"] | Annotated[tuple[_Count, ...], msgspec.Meta(max_length=1_000_000)] | None
    global_step: _Count
    counts: dict[str, Number]
    times: dict[str, Number]
    gaps: tuple[GapRow, ...]
    notes: dict[str, _Count]
    audit: AuditRow
    environment: EnvironmentRow
    files: dict[str, FileRow] = {}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as indented strict JSON with sorted keys."""
    text = msgspec.json.encode(manifest, order="sorted")
    return msgspec.json.format(text, indent=2) + b"\n"


def decode_manifest(body: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        AnnotationError: it is not strict JSON, has unknown, missing or ill-typed fields, or another schema.
    """
    try:
        head = msgspec.json.decode(body, type=_SchemaHead)
    except (msgspec.DecodeError, RecursionError) as error:
        raise AnnotationError(f"is not strict JSON: {error}", file=MANIFEST_FILE) from error
    if head.schema != SCHEMA or head.schema_version != SCHEMA_VERSION:
        raise AnnotationError(
            f"schema {head.schema!r} version {head.schema_version!r} is not {SCHEMA!r} version {SCHEMA_VERSION}; "
            "read it with the tlk_tracking that wrote it",
            file=MANIFEST_FILE,
            field="schema",
        )
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        text = str(error)[:_MESSAGE_LENGTH]
        raise AnnotationError(text, file=MANIFEST_FILE, field=_named_field(text)) from error
    for name, number in (*manifest.counts.items(), *manifest.times.items()):
        if number.value is not None and not 0 <= number.value < math.inf:
            raise AnnotationError(f"{number.value} is no count or time", file=MANIFEST_FILE, field=name)
    reasons = [gap.reason for gap in manifest.gaps]
    if len(set(reasons)) < len(reasons):
        raise AnnotationError("names a reason twice", file=MANIFEST_FILE, field="gaps")
    _check_window(manifest)
    _check_ranks(manifest)
    unknown = sorted(set(manifest.notes) - NOTES)
    if unknown:
        raise AnnotationError(f"{unknown[0]!r} is not a note", file=MANIFEST_FILE, field="notes")
    return manifest


def _check_window(manifest: Manifest) -> None:
    """Refuse steps that the window contradicts."""
    window = manifest.window
    steps = [row.step for row in window.steps]
    if any(after <= before for before, after in pairwise(steps)):
        raise AnnotationError(
            "has steps twice or not in ascending order", file=MANIFEST_FILE, field="window.steps"
        )
    complete = sum(row.outcome is StepOutcome.COMPLETE for row in window.steps)
    if complete > window.requested:
        raise AnnotationError(
            f"has {complete} complete steps of {window.requested} requested",
            file=MANIFEST_FILE,
            field="window.steps",
        )


def _check_ranks(manifest: Manifest) -> None:
    """Refuse ranks that the number of processes contradicts."""
    size, said = manifest.world_size, manifest.environment.world_size
    if manifest.rank >= size:
        raise AnnotationError(f"{manifest.rank} is no rank of {size}", file=MANIFEST_FILE, field="rank")
    chosen = manifest.recording_ranks
    if isinstance(chosen, tuple) and max(chosen, default=0) >= size:
        raise AnnotationError(
            f"{max(chosen)} is no rank of {size}", file=MANIFEST_FILE, field="recording_ranks"
        )
    # An import may be told of more ranks than its trace knows.
    smaller = said is not None and said < size and manifest.source is not WindowSource.IMPORT
    if said is not None and (said > size or smaller):
        raise AnnotationError(
            f"is {size}, the environment says {said}", file=MANIFEST_FILE, field="world_size"
        )


def _named_field(message: str) -> str | None:
    """Return the path of the field that a message of msgspec is about."""
    place = re.search(r" - at `\$\.?(.*?)`$", message)
    child = re.search(r"(?:unknown|required) field `(.*?)`", message)
    return ".".join(found[1] for found in (place, child) if found is not None and found[1]) or None


class _SchemaHead(msgspec.Struct):
    schema: str | None = None
    schema_version: int | None = None

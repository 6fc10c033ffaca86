"""Import traces as the windows and ranks of one recording (trace files and folders -> KernelAnnotations)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.attribution.annotate import import_trace
from tlk_tracking.core.errors import ConfigurationError, TraceError
from tlk_tracking.core.records import CallSource

Progress = Callable[[int], None]

_SUFFIXES = (".json", ".json.gz")
# What a comparison would like to know of where it was recorded.
_COMPARED_FACTS = ("torch", "cuda", "gpu_model", "precision", "strategy", "compiled")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTrace:
    """One trace file, what to call it among the others, and the annotation made of it."""

    trace: Path
    name: str
    annotation: KernelAnnotation

    @property
    def place(self) -> tuple[int, int]:
        """First step and rank: what tells this annotation from the others of its set."""
        manifest = self.annotation.manifest
        return manifest.window.first_step, manifest.rank


def find_traces(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files among `paths` as they are, and each `.json` and `.json.gz` file in a folder or below it.

    Raises:
        TraceError: a folder has none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(one for one in path.rglob("*") if one.name.endswith(_SUFFIXES) and one.is_file())
        if not inside:
            raise TraceError(f"{path} has no {' or '.join(_SUFFIXES)} file in it or below")
        found += inside
    return tuple(found)


def import_traces(
    traces: Sequence[Path],
    *,
    ops: Sequence[Path] = (),
    ranks: Sequence[int] = (),
    reading: Callable[[Path], AbstractContextManager[Progress | None]] = lambda _: nullcontext(),
) -> tuple[ImportedTrace, ...]:
    """Import each trace; traces of the same first step are the ranks of one window.

    Traces without markers have no session of their own: the ranks of a window get one made of their files'
    content, so that another window does not take their place in a run, and the same files again do.

    Args:
        traces: Kineto's Chrome exports, `.json` or `.json.gz`.
        ops: the ops file of each trace, in the same order, or none at all.
        ranks: the rank of each trace, in the same order; none at all takes the traces' own, else 0.
        reading: is entered around each trace; gives what is called with the number of bytes read.

    Raises:
        ConfigurationError: there are not as many `ops` or `ranks` as traces.
        TraceError: a file cannot be read, or two are the same rank of the same window.
    """
    for given, what in ((ops, "ops"), (ranks, "rank")):
        if given and len(given) != len(traces):
            raise ConfigurationError(
                f"{len(given)} --{what} for {len(traces)} traces; give one for each, in their order, or none"
            )
    imported = []
    for index, (trace, name) in enumerate(zip(traces, _names(traces), strict=True)):
        try:
            with reading(trace) as progress:
                annotation = import_trace(
                    trace,
                    ops=ops[index] if ops else None,
                    rank=ranks[index] if ranks else None,
                    progress=progress,
                )
        except TraceError as error:
            if name == trace.name:
                raise
            raise TraceError(f"{name}: {error}") from error
        imported.append(ImportedTrace(trace=trace, name=name, annotation=annotation))
    imported.sort(key=lambda one: one.place)
    for before, after in pairwise(imported):
        if before.place == after.place:
            raise TraceError(
                f"{before.name} and {after.name} are both rank {after.place[1]} of the window that begins with "
                f"step {after.place[0]}; if they are of different runs, or of training and validation, import them "
                "apart; if they are ranks of one run, give --rank once for each trace"
            )
    return tuple(one for window in _windows(imported) for one in _with_window_facts(window))


def what_is_missing(annotation: KernelAnnotation) -> tuple[str, ...]:
    """Say, a sentence each, what an import did not find in its trace."""
    manifest = annotation.manifest
    found = []
    if manifest.call_source is CallSource.HOST_OPS:
        found.append(
            "no markers: the innermost host ops are the call rows; their modules, phases and inputs are unknown"
        )
        if [row.step for row in manifest.window.steps] == [0]:
            found.append("no steps but 0: without ProfilerStep#N ranges the whole trace is step 0")
        if "renumbered_steps" in manifest.notes:
            found.append(
                "no number of its own for each step: they are numbered in their order, up to the last one's"
            )
    elif manifest.call_source is CallSource.MARKERS_ONLY:
        found.append("no --ops: operators, inputs, modules and phases of the marked calls are unknown")
    if manifest.availability_reason is not None:
        found.append(f"no device telemetry: {manifest.availability_reason}")
    unknown = [name for name in _COMPARED_FACTS if getattr(manifest.environment, name) is None]
    if unknown:
        found.append(f"no word on {', '.join(unknown)}")
    return tuple(found)


def _names(traces: Sequence[Path]) -> list[str]:
    """Call each trace by its file's name, or by its path from their common folder where names repeat."""
    names = [trace.name for trace in traces]
    if len(set(names)) == len(names):
        return names
    paths = [Path(os.path.abspath(trace)) for trace in traces]  # noqa: PTH100  # resolve() follows links
    common = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(common).as_posix() for path in paths]


def _windows(imported: Sequence[ImportedTrace]) -> Iterator[list[ImportedTrace]]:
    by_step: dict[int, list[ImportedTrace]] = {}
    for one in imported:
        by_step.setdefault(one.place[0], []).append(one)
    yield from by_step.values()


def _with_window_facts(window: Sequence[ImportedTrace]) -> Iterator[ImportedTrace]:
    """Give the ranks of one window what only all of them together say."""
    session = _session_of_all(window)
    ranks = 1 + max(one.annotation.manifest.rank for one in window)
    for one in window:
        manifest = one.annotation.manifest
        manifest = msgspec.structs.replace(
            manifest,
            session=session if manifest.call_source is CallSource.HOST_OPS else manifest.session,
            world_size=max(ranks, manifest.world_size),
            # The trace does not know the Trainer's step; its own puts several windows of a run in order.
            global_step=manifest.window.first_step,
        )
        yield replace(one, annotation=replace(one.annotation, manifest=manifest))


def _session_of_all(window: Sequence[ImportedTrace]) -> str:
    """Return one session for the traces without markers, each of which has one of its own content, in any order."""
    manifests = [one.annotation.manifest for one in window]
    own = sorted(manifest.session for manifest in manifests if manifest.call_source is CallSource.HOST_OPS)
    return own[0] if len(own) == 1 else hashlib.sha256("".join(own).encode()).hexdigest()[:8]

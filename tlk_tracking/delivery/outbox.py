"""Keep windows and annotations on disk until they are sent (raw window -> annotation entry -> nothing).

<root>/raw/<name>/          window.json, destination.json, and if there are any trace.json and calls.parquet
<root>/annotations/<name>/  destination.json, kernel_telemetry/window_…/rank_…/ (one whole annotation)

A folder whose name starts with a dot is being made or being removed. A process killed at any point leaves
every other folder whole; `sweep` takes away what it left half.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from tlk_tracking.core.errors import TrackingError
from tlk_tracking.core.places import ARTIFACT_ROOT, window_folder
from tlk_tracking.core.records import WindowFacts
from tlk_tracking.delivery.durable_files import (
    is_abandoned,
    make_locked,
    size_bytes,
    synchronize,
    synchronize_tree,
    try_lock,
    wait_for_lock,
)
from tlk_tracking.tracking.tracking_uri import Address, Destination, address_of

TRACE_FILE = "trace.json"
CALLS_FILE = "calls.parquet"
GRAPHS_FILE = "graphs.json"
DEFAULT_FOLDER = "kernel_telemetry_outbox"
DEFAULT_MAX_BYTES = 4 * 1024**3

_WINDOW_FILE = "window.json"
_DESTINATION_FILE = "destination.json"
_LOCK_FILE = "lock"
_PARTIAL = ".partial-"
_GONE = ".gone-"
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawWindow:
    """A closed window that has yet to become an annotation."""

    name: str
    folder: Path

    @property
    def trace(self) -> Path | None:
        """The raw trace, or None when the window has none."""
        path = self.folder / TRACE_FILE
        return path if path.exists() else None

    @property
    def calls(self) -> Path | None:
        """The ATen calls as a parquet file (schema `tables.ATEN_CALLS`), or None when the window has none."""
        path = self.folder / CALLS_FILE
        return path if path.exists() else None

    @property
    def graphs(self) -> Path | None:
        """What Inductor said of compiled graphs (`fused_notes`), or None when the window has none."""
        path = self.folder / GRAPHS_FILE
        return path if path.exists() else None

    def facts(self) -> WindowFacts:
        """Return what the recording side knew of the window. Raises TrackingError when it cannot be read."""
        return _read(self.folder / _WINDOW_FILE, WindowFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A whole annotation that waits to be sent."""

    name: str
    folder: Path

    def address(self) -> Address:
        """Return where the annotation goes. Raises TrackingError when that cannot be read."""
        return _read(self.folder / _DESTINATION_FILE, Address)

    @property
    def annotation_folder(self) -> Path:
        """The folder of the annotation itself. Raises TrackingError when there is not exactly one."""
        found = [path for path in self.folder.glob(f"{ARTIFACT_ROOT}/window_*/rank_*") if path.is_dir()]
        if len(found) != 1:
            raise TrackingError(f"{self.folder} holds {len(found)} annotations instead of one; remove it")
        return found[0]


class DeliveryState(StrEnum):
    """How far a window has come."""

    RAW = "raw"
    SAVED = "saved"
    SENT = "sent"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What became of one window: `folder` is where its files wait, `reason` why they do; None once sent.

    GONE: its files are not in the outbox, so another process sent it or somebody removed them.
    `run_is_missing`: the store has no such run, so that sending it again is in vain.
    """

    name: str
    state: DeliveryState
    folder: Path | None = None
    reason: str | None = None
    run_is_missing: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether its files wait in the outbox."""
        return self.state in (DeliveryState.RAW, DeliveryState.SAVED)


class Outbox:
    """The folder in which windows wait: private to the user, capped in size, safe for several processes.

    The recording side calls `open_window`, writes `TRACE_FILE` and `CALLS_FILE` into the folder it gets, then
    `seal_window` (or `discard_window`). Whoever annotates and sends works under `claim`.
    """

    def __init__(self, root: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.root = Path(root).absolute()
        self.max_bytes = max_bytes
        self._raw = self.root / "raw"
        self._annotations = self.root / "annotations"
        self._making: dict[Path, int] = {}

    def is_there(self) -> bool:
        """Return whether the folder has been used as an outbox."""
        return self._raw.is_dir() and self._annotations.is_dir()

    def open_window(self) -> Path:
        """Make a private folder for a window that is closing; nobody sees it before it is sealed.

        Raises TrackingError when the outbox is full or not the user's own, OSError when the disk refuses.
        """
        self._make_private()
        self._refuse_beyond_cap(0)
        return self._make_partial(self._raw)

    def seal_window(self, folder: Path, facts: WindowFacts, destination: Destination | None) -> RawWindow:
        """Make a folder from `open_window` a raw window, whole and visible at once.

        Raises TrackingError when the outbox would be over its cap or has this window already; the folder is
        then gone.
        """
        try:
            self._refuse_beyond_cap(size_bytes(folder))
            (folder / _WINDOW_FILE).write_bytes(msgspec.json.encode(facts))
            address = address_of(destination, facts.global_step)
            (folder / _DESTINATION_FILE).write_bytes(msgspec.json.encode(address))
            name = _entry_name(address.run_id, facts)
            # No fsync in the training process: only a power cut loses what the kernel already holds.
            return RawWindow(name=name, folder=self._publish(folder, self._raw / name, durable=False))
        except BaseException:  # tidied up, then raised on
            self.discard_window(folder)
            raise

    def discard_window(self, folder: Path) -> None:
        """Take away a folder from `open_window` that will not be sealed; never raises."""
        shutil.rmtree(folder, ignore_errors=True)
        self._release(folder)

    def add_annotation(self, window: RawWindow, save: Callable[[Path], None]) -> Entry:
        """Make the annotation that `save` writes an entry, then remove the raw window; call under its claim.

        `save` gets a folder that does not exist yet. Raises what it raises (nothing is left then), and
        TrackingError when the window's own files cannot be read.
        """
        standing = self._annotations / window.name
        if not standing.exists():
            facts = window.facts()
            partial = self._make_partial(self._annotations)
            try:
                place = window_folder(facts.first_step, facts.session, facts.rank)
                annotation = partial / ARTIFACT_ROOT / place
                annotation.parent.mkdir(parents=True)
                save(annotation)
                shutil.copyfile(window.folder / _DESTINATION_FILE, partial / _DESTINATION_FILE)
                self._publish(partial, standing, durable=True)
            except BaseException:  # tidied up, then raised on
                self.discard_window(partial)
                raise
        self._remove(window.folder)
        return Entry(name=window.name, folder=standing)

    def raw_windows(self) -> tuple[RawWindow, ...]:
        """Return the windows that have yet to become annotations, oldest step first within a run."""
        return tuple(RawWindow(name=path.name, folder=path) for path in _visible(self._raw))

    def entries(self) -> tuple[Entry, ...]:
        """Return the annotations that wait to be sent, oldest step first within a run."""
        return tuple(Entry(name=path.name, folder=path) for path in _visible(self._annotations))

    def raw_window(self, name: str) -> RawWindow:
        """Return the raw window of that name, which may be gone."""
        return RawWindow(name=name, folder=self._raw / name)

    def entry(self, name: str) -> Entry:
        """Return the entry of that name, which may be gone."""
        return Entry(name=name, folder=self._annotations / name)

    @contextmanager
    def claim(self, item: RawWindow | Entry) -> Iterator[bool]:
        """Yield whether the item is there and, until the block ends, this caller's alone."""
        lock = try_lock(item.folder / _LOCK_FILE)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                os.close(lock)

    @contextmanager
    def tag_turn(self) -> Iterator[None]:
        """Wait for this process's turn to read and rewrite a run's tags."""
        self._make_private()
        descriptor = wait_for_lock(self.root / "tags.lock")
        try:
            yield
        finally:
            os.close(descriptor)

    def remove(self, entry: Entry) -> None:
        """Take a sent entry away, with the raw window it came from if a killed process left that."""
        self._remove(self._raw / entry.name)
        self._remove(entry.folder)

    def sweep(self) -> None:
        """Take away what killed processes left half made or half removed."""
        for stage in (self._raw, self._annotations):
            for path in _hidden(stage):
                if path.name.startswith(_GONE) or is_abandoned(path / _LOCK_FILE):
                    shutil.rmtree(path, ignore_errors=True)

    def size_bytes(self) -> int:
        """Return how much the outbox holds, unfinished folders included."""
        return size_bytes(self._raw) + size_bytes(self._annotations)

    def _make_private(self) -> None:
        if not self.root.exists():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self._raw, self._annotations):
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            foreign = hasattr(os, "getuid") and status.st_uid != os.getuid()
            if foreign or not stat.S_ISDIR(status.st_mode):
                raise TrackingError(f"{folder} is not a folder of this user's own; give another `outbox`")
            if stat.S_IMODE(status.st_mode) & 0o077:
                folder.chmod(0o700)

    def _refuse_beyond_cap(self, more: int) -> None:
        held = self.size_bytes()
        if held > self.max_bytes:
            raise TrackingError(
                f"the outbox {self.root} holds {held / 1e6:.0f} MB and may hold {self.max_bytes / 1e6:.0f} MB"
                f"{f', {more / 1e6:.0f} MB of them this window' if more else ''}; this window is not kept. "
                f"`tlk upload --outbox {self.root}` sends what waits there"
            )

    def _make_partial(self, stage: Path) -> Path:
        folder = stage / f"{_PARTIAL}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        self._making[folder] = make_locked(folder / _LOCK_FILE)
        return folder

    def _publish(self, folder: Path, target: Path, *, durable: bool) -> Path:
        if durable:
            synchronize_tree(folder)
        try:
            folder.rename(target)
        except OSError as error:
            if target.exists():
                raise TrackingError(f"{target} is there already; a window is kept once") from error
            raise
        self._release(folder)
        if durable:
            synchronize(target.parent)
        return target

    def _release(self, folder: Path) -> None:
        descriptor = self._making.pop(folder, None)
        if descriptor is not None:
            os.close(descriptor)

    def _remove(self, folder: Path) -> None:
        # Renamed first: a process killed half-way leaves no folder that looks whole.
        gone = folder.with_name(f"{_GONE}{secrets.token_hex(8)}")
        with suppress(FileNotFoundError):
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _entry_name(run_id: str | None, facts: WindowFacts) -> str:
    run = "no_run" if run_id is None else re.sub(r"[^A-Za-z0-9_-]", "_", run_id)[:64]
    return f"{run}.{window_folder(facts.first_step, facts.session, facts.rank).replace('/', '.')}"


def _read(path: Path, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TrackingError(f"{path} cannot be read ({error}); remove {path.parent}") from error


def _visible(stage: Path) -> list[Path]:
    return [path for path in _children(stage) if not path.name.startswith(".")]


def _hidden(stage: Path) -> list[Path]:
    return [path for path in _children(stage) if path.name.startswith((_PARTIAL, _GONE))]


def _children(stage: Path) -> list[Path]:
    try:
        return sorted(path for path in stage.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return []

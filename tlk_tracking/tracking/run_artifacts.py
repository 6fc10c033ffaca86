"""Read the annotations among a run's artifacts, trusting none (repository -> KernelAnnotation)."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from tlk_tracking.annotation.kernel_annotation import (
    MAX_MANIFEST_BYTES,
    MODULES_FILE,
    OPTIONAL_TABLE_FILES,
    REPORT_FILE,
    SUMMARY_FILE,
    TABLE_FILES,
    KernelAnnotation,
    load_annotation,
)
from tlk_tracking.annotation.table_files import MAX_FILE_BYTES
from tlk_tracking.core.errors import AnnotationError, TrackingError
from tlk_tracking.core.places import ARTIFACT_ROOT, MANIFEST_FILE, is_rank_name, is_window_name

# As they are sent: what a person looks at, then the tables, and last the manifest that vouches for them.
_IN_ORDER = (SUMMARY_FILE, MODULES_FILE, REPORT_FILE, *TABLE_FILES, *OPTIONAL_TABLE_FILES, MANIFEST_FILE)
_NO_NAME = re.compile(r"[/\\\x00-\x1f\x7f-\x9f]")


class ListedFile(Protocol):
    """What a store lists: `file_size` is in bytes and None where the store does not say."""

    @property
    def path(self) -> str: ...  # noqa: D102 - the class says it
    @property
    def is_dir(self) -> bool: ...  # noqa: D102
    @property
    def file_size(self) -> int | None: ...  # noqa: D102


class Repository(Protocol):
    """What is used of MLflow's artifact repositories."""

    def list_artifacts(self, path: str | None = None) -> Sequence[ListedFile]:
        """Return what is directly in `path`."""

    # Of a repository's methods the only one that writes one file to the one place it is told; the public
    # `download_artifacts` lists first and writes whatever names a hostile listing gives.
    def _download_file(self, remote_file_path: str, local_path: str) -> None: ...


class RunArtifacts:
    """The kernel telemetry among a run's artifacts; no link is followed, no name of theirs becomes a path."""

    def __init__(self, repository: Repository, *, local_root: Path | None) -> None:
        """Take the repository; `local_root` is its folder where it is one on this machine."""
        self._repository = repository
        self._local_root = local_root

    def places(self) -> Iterator[str]:
        """Yield `window_…/rank_…` of each annotation, whole or not; a hostile name is a TrackingError."""
        for window in self._names(ARTIFACT_ROOT, folders=True):
            if is_window_name(window):
                for rank in self._names(f"{ARTIFACT_ROOT}/{window}", folders=True):
                    if is_rank_name(rank):
                        yield f"{window}/{rank}"

    def fetch(self, place: str) -> KernelAnnotation | None:
        """Return the annotation of a place, validated; None while its manifest, sent last, is not there.

        Raises:
            TrackingError: an artifact is a link or has a hostile name.
            AnnotationError: a file is too large or damaged, or the annotation belongs elsewhere.
        """
        names = self._names(f"{ARTIFACT_ROOT}/{place}", folders=False)
        if MANIFEST_FILE not in names:
            return None
        with tempfile.TemporaryDirectory(prefix="tlk_") as parent:
            folder = Path(parent, "annotation")
            folder.mkdir()
            for name in _IN_ORDER:
                if name in names and name != REPORT_FILE:
                    self._download(f"{ARTIFACT_ROOT}/{place}/{name}", folder / name, names[name])
            annotation = load_annotation(folder)
        if annotation.folder_name != place:
            raise AnnotationError(f"lies in {place} and says {annotation.folder_name}", file=MANIFEST_FILE)
        return annotation

    def _download(self, path: str, target: Path, listed_size: int | None) -> None:
        _refuse_size(target.name, listed_size)
        self._refuse_links(path)
        self._repository._download_file(path, str(target))
        require_regular(target)
        _refuse_size(target.name, target.stat().st_size)

    def _names(self, path: str, *, folders: bool) -> Mapping[str, int | None]:
        self._refuse_links(path)
        found = {}
        for listed in self._repository.list_artifacts(path):
            name = listed.path.removeprefix(f"{path}/")
            if name in ("", ".", "..") or _NO_NAME.search(name):
                raise TrackingError(
                    f"the run lists {listed.path[:200]!r} in {path!r}; its artifacts are not read"
                )
            if listed.is_dir is folders:
                found[name] = listed.file_size
        return found

    def _refuse_links(self, path: str) -> None:
        here = self._local_root
        for part in PurePosixPath(path).parts if here is not None else ():
            here = here / part  # type: ignore[operator]  # not None, or there is no part
            if here.is_symlink():
                raise TrackingError(f"{here} is a link; artifacts that are links are not read")


def files_to_send(folder: Path) -> tuple[Path, ...]:
    """Return the files of an annotation's folder in the order to send them; a link is a TrackingError."""
    files = tuple(folder / name for name in _IN_ORDER if os.path.lexists(folder / name))
    for file in files:
        require_regular(file)
    return files


def require_regular(file: Path) -> None:
    """Raise TrackingError unless the path is a regular file itself."""
    if file.is_symlink() or not file.is_file():
        raise TrackingError(f"{file} is not a regular file; links are neither sent nor read")


def _refuse_size(name: str, size: int | None) -> None:
    limit = MAX_MANIFEST_BYTES if name == MANIFEST_FILE else MAX_FILE_BYTES
    if size is not None and size > limit:
        raise AnnotationError(f"has {size} bytes, more than the limit of {limit}", file=name)

"""Where annotations lie below a run or an outbox (first step, session, rank <-> relative path)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ARTIFACT_ROOT = "kernel_telemetry"
MANIFEST_FILE = "annotation.json"

_WINDOW_NAME = re.compile(r"window_([0-9]{6,19})_([0-9a-f]{8})")
_RANK_NAME = re.compile(r"rank_(0|[1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WindowPlace:
    """Which window and rank an annotation is of, as its folder's name says."""

    first_step: int
    session: str
    rank: int

    @property
    def folder(self) -> str:
        """The relative path below `ARTIFACT_ROOT`, with `/` between its parts."""
        return window_folder(self.first_step, self.session, self.rank)


def window_folder(first_step: int, session: str, rank: int) -> str:
    """Return the place of one annotation below `ARTIFACT_ROOT`, with `/` between its parts."""
    return f"window_{first_step:06d}_{session}/rank_{rank}"


def is_window_name(name: str) -> bool:
    """Return whether a folder of that name holds the ranks of a window."""
    return _WINDOW_NAME.fullmatch(name) is not None


def is_rank_name(name: str) -> bool:
    """Return whether a folder of that name, in a window's folder, holds one annotation."""
    return _RANK_NAME.fullmatch(name) is not None


def read_place(folder: Path) -> WindowPlace | None:
    """Return what the names of `window_*/rank_*` say; None where they are others."""
    window, rank = _WINDOW_NAME.fullmatch(folder.parent.name), _RANK_NAME.fullmatch(folder.name)
    if window is None or rank is None:
        return None
    return WindowPlace(first_step=int(window[1]), session=window[2], rank=int(rank[1]))


def find_annotation_folders(root: Path) -> tuple[Path, ...]:
    """Return every folder `window_*/rank_*` below `root` (or `root` itself, a window or a rank) with a manifest."""
    if (root / MANIFEST_FILE).exists():
        return (root,)
    found = {path.parent for path in root.glob(f"rank_*/{MANIFEST_FILE}")}
    found |= {path.parent for path in root.glob(f"**/window_*/rank_*/{MANIFEST_FILE}")}
    return tuple(sorted(found))

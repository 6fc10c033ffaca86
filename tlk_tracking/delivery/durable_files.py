"""Lock, measure and flush files: a killed process leaves nothing half (paths -> descriptors, bytes)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has none: every lock is then granted, and what is done twice must be idempotent
    _HAS_LOCKS = False
else:
    _HAS_LOCKS = True

# Only where locks do not work does the age of an unfinished folder decide whether its maker is dead.
_ABANDONED_AFTER_S = 24 * 3600.0


def make_locked(path: Path) -> int:
    """Make a file that does not exist yet; return a descriptor that holds its lock until it is closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    _lock(descriptor)
    return descriptor


def wait_for_lock(path: Path) -> int:
    """Wait for the lock of a file, made if need be; return a descriptor that holds it until it is closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if _HAS_LOCKS:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the file's lock; None when it is somebody's or the file is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    # Its last owner may have removed the folder between opening and locking.
    with suppress(FileNotFoundError):
        if _lock(descriptor) is not False and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    os.close(descriptor)
    return None


def is_abandoned(lock: Path) -> bool:
    """Return whether whoever made the folder of this lock file is dead and will not finish it."""
    try:
        age_s = time.time() - lock.parent.lstat().st_mtime
    except FileNotFoundError:
        return False
    granted = None
    with suppress(FileNotFoundError):  # killed, or about to make it
        descriptor = os.open(lock, os.O_RDWR)
        granted = _lock(descriptor)
        os.close(descriptor)
    return age_s > _ABANDONED_AFTER_S if granted is None else granted


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files below the folder; 0 when it is not there."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # another process took it away
                total += Path(parent, name).lstat().st_size
    return total


def synchronize_tree(folder: Path) -> None:
    """Flush every file and folder below, and the folder itself, to the disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            synchronize(Path(parent, name))
        synchronize(Path(parent))


def synchronize(path: Path) -> None:
    """Flush one file or folder to the disk."""
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Return whether the lock was granted; None where the file system has no locks."""
    if not _HAS_LOCKS:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True

"""Progress on standard error for work that people wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_SHOWN_FROM_BYTES = 8 << 20


@contextmanager
def reading(path: Path) -> Iterator[Callable[[int], None] | None]:
    """Show how much of a trace has been read; nothing for a short one or where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if path.stat().st_size < _SHOWN_FROM_BYTES or not console.is_terminal:
        yield None
        return
    # The size of what a .gz holds is not known before its end.
    total = None if path.suffix == ".gz" else path.stat().st_size
    columns = (TextColumn(f"reading {path.name}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("read", total=total)
        yield lambda done: bar.update(task, completed=done)


def opening(targets: Sequence[str]) -> Iterator[str]:
    """Give the targets one by one and show how many are done, where somebody watches."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(
        targets,
        description="reading",
        console=console,
        transient=True,
        disable=not console.is_terminal or not any(target.startswith("runs:/") for target in targets),
    )

"""Record a program with record_kernels() after a first run outside, for tests on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pandas as pd
import torch
from plain_profiler import Work

from tlk_tracking import KernelAnnotation, record_kernels


def recorded(program: Callable[[], object]) -> KernelAnnotation:
    """Run `program` once for what happens only the first time, then once recorded."""
    program()
    torch.cuda.synchronize()
    with record_kernels() as recording:
        program()
    return recording.annotation


def work_of_launches(annotation: KernelAnnotation) -> Counter[Work]:
    """Count equal launches inside a step, as `plain_profiler.work_of` counts records."""
    return count_work(annotation.launches[annotation.launches["step"].notna()])


def count_work(launches: pd.DataFrame) -> Counter[Work]:
    """Count equal rows of a frame of launches."""
    facts = launches[["kind", "launch_name", "grid", "block", "bytes"]].astype(object)
    return Counter(
        Work(
            kind=str(kind),
            name=str(name),
            grid=None if pd.isna(grid) else str(grid),
            block=None if pd.isna(block) else str(block),
            bytes=None if pd.isna(size) else int(size),
        )
        for kind, name, grid, block, size in facts.itertuples(index=False)
    )

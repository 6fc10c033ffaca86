"""A hand-written Triton kernel; imported only by tests that run on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _double(pointer, size, block: tl.constexpr):  # type: ignore[no-untyped-def]  # triton reads the source
    offset = tl.program_id(0) * block + tl.arange(0, block)
    inside = offset < size
    tl.store(pointer + offset, 2 * tl.load(pointer + offset, mask=inside), mask=inside)


def double_in_place(x: torch.Tensor) -> None:
    """Launch one kernel that doubles `x`."""
    _double[(triton.cdiv(x.numel(), 1024),)](x, x.numel(), block=1024)

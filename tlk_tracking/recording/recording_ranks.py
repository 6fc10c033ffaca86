"""Choose the ranks of a fit that record (argument, world size -> ranks)."""

from __future__ import annotations

from collections.abc import Sequence

from tlk_tracking.core.errors import ConfigurationError
from tlk_tracking.core.records import RecordingRanks


def choose_ranks(ranks: str | Sequence[int]) -> RecordingRanks:
    """Return what `ranks` asks for: "zero", "all" or a list of global ranks.

    Raises:
        ConfigurationError: it is something else, names no rank, or one twice.
    """
    if ranks == "all":
        return "all"
    if ranks == "zero":
        return (0,)
    if isinstance(ranks, list | tuple) and ranks:
        are_ranks = all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks)
        if are_ranks and len(set(ranks)) == len(ranks):
            return tuple(sorted(ranks))
    raise ConfigurationError(f'ranks={ranks!r}; give "zero", "all" or a list of different global ranks')


def recording_in(chosen: RecordingRanks, *, world_size: int) -> tuple[int, ...]:
    """Return the ranks that record in a world of that size.

    Raises:
        ConfigurationError: a rank that was named is not in it.
    """
    if chosen == "all":
        return tuple(range(world_size))
    if chosen[-1] >= world_size:
        raise ConfigurationError(
            f"ranks={list(chosen)} names rank {chosen[-1]}, and this fit has the ranks 0 to {world_size - 1}"
        )
    return chosen

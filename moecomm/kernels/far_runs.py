"""What is put to far ranks: runs of bytes that lie next to each other in both places, as a table for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FarRun", "Memory", "Runs", "make_runs"]

_MOST_BYTES = 1 << 20  # a put of this size keeps a network busy; more of them spread over the programs of a rank


class Memory(NamedTuple):
    """Memory of mine in the symmetric heap.

    Attributes:
        address: where it begins.
        nbytes: how much there is.
    """

    address: int
    nbytes: int


class FarRun(NamedTuple):
    """Bytes that go to a far rank.

    Attributes:
        rank: the far rank.
        target: their offset in its part of the region.
        source: their offset in what is put.
        nbytes: how many; 0 = none, then the run is left out.
    """

    rank: int
    target: int
    source: int
    nbytes: int


@dataclass(frozen=True)
class Runs:
    """Runs as kernels read them, from `make_runs`.

    Attributes:
        table: `[N, 3]` int64, by rank: offset in the region, offset from the source, bytes (at least 1).
        starts: `[R + 1]` int64.
        region_bytes, source_bytes: what the region and the source must have at least.
        most: the most runs that a rank gets.
    """

    table: Tensor
    starts: Tensor
    region_bytes: int
    source_bytes: int
    most: int


def make_runs(
    runs: Sequence[FarRun], num_ranks: int, device: torch.device | str, *, most_bytes: int = _MOST_BYTES
) -> Runs:
    """Sorts runs by rank, in the order given, and cuts long ones into pieces of at most `most_bytes`.

    Raises:
        ValueError: a run names no rank, or a number is negative.
    """
    if most_bytes < 1:
        raise ValueError(f"most_bytes is {most_bytes}; at least 1 is needed")
    by_rank: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    for run in runs:
        if not 0 <= run.rank < num_ranks or min(run.target, run.source, run.nbytes) < 0:
            raise ValueError(f"runs has {run}; there are {num_ranks} ranks, and no number may be negative")
        by_rank[run.rank] += [
            (run.target + at, run.source + at, min(most_bytes, run.nbytes - at))
            for at in range(0, run.nbytes, most_bytes)
        ]
    starts = [0]
    for pieces in by_rank:
        starts.append(starts[-1] + len(pieces))
    table = [piece for pieces in by_rank for piece in pieces]
    return Runs(
        _upload(torch.tensor(table, dtype=torch.int64).reshape(-1, 3), torch.device(device)),
        _upload(torch.tensor(starts, dtype=torch.int64), torch.device(device)),
        region_bytes=max((run.target + run.nbytes for run in runs), default=0),
        source_bytes=max((run.source + run.nbytes for run in runs), default=0),
        most=max(map(len, by_rank), default=0),
    )


def _upload(numbers: Tensor, device: torch.device) -> Tensor:
    """The numbers on the device; the host does not wait, as it would for memory that is not pinned."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers

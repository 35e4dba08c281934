"""Placement: which rank hosts which expert."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Placement"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Contiguous blocks of experts; the first `num_experts % num_ranks` ranks hold one more.

    Arguments:
        num_experts: E, over all ranks; at least 1.
        num_ranks: R; at least 1, and may exceed E (the last ranks then host none).
    """

    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {self.num_experts}")
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {self.num_ranks}")

    def local_experts(self, rank: int) -> range:
        """Global ids of the experts that `rank` hosts, in local order."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank must be in [0, {self.num_ranks}), got {rank}")
        return range(*self.expert_range(rank))

    def expert_range(self, rank: int) -> tuple[int, int]:
        """First expert of `rank`, and the first one behind its last."""
        return self._ranges[rank]

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        first = self.first_expert.tolist()
        return list(zip(first[:-1], first[1:], strict=True))

    @cached_property
    def first_expert(self) -> npt.NDArray[np.int64]:
        """`[R + 1]` int64: id of each rank's first expert; the last entry is E."""
        each, more = divmod(self.num_experts, self.num_ranks)
        ranks = np.arange(self.num_ranks + 1)
        return (ranks * each + np.minimum(ranks, more)).astype(np.int64)

    @cached_property
    def expert_rank(self) -> torch.Tensor:
        """`[E]` int32: the rank that hosts each expert."""
        return torch.from_numpy(self.rank_of_expert)

    @cached_property
    def rank_of_expert(self) -> npt.NDArray[np.int32]:
        """`expert_rank` as an array."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.first_expert))

    @cached_property
    def expert_local(self) -> torch.Tensor:
        """`[E]` int32: each expert's index on its rank."""
        first = self.first_expert[self.rank_of_expert]
        return torch.from_numpy((np.arange(self.num_experts) - first).astype(np.int32))

"""What the host must know of a rank's choices before it can plan: counts, fingerprint, ids that are none.

A device leaves all of it in one tensor, so that the host waits for it once.

    T tokens   K num_topk   E num_experts   R num_ranks

A summary is `[3 + E + R]` int64: the sum of mixed ids, the first position of a bad id (NOWHERE if there is none), the
id there, routes per expert, distinct tokens per rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moecomm.kernels.base import RowKernels

__all__ = ["HEAD", "NOWHERE", "SummarizingKernels", "finished_fingerprint", "mixed", "read_summary"]

HEAD = 3
NOWHERE = (1 << 63) - 1
_MASK = (1 << 64) - 1


class SummarizingKernels(RowKernels, Protocol):
    """Row kernels of a device that the host does not wait for."""

    def summarize_routes(self, topk_idx: Tensor, expert_rank: Tensor, num_ranks: int, summary: Tensor) -> None:
        """Fills a summary on the device; what it counts where an id is bad is of no use.

        Arguments:
            topk_idx: `[T, K]` int32 or int64 contiguous.
            expert_rank: `[E]` int32, ranks from 0 to R - 1.
            num_ranks: R.
            summary: `[3 + E + R]` int64 contiguous, overwritten.
        """
        ...

    def count_tokens(self, topk_idx: Tensor, expert_group: Tensor, num_groups: int, totals: Tensor) -> None:
        """Counts the tokens that have an expert in each group of experts.

        Arguments:
            topk_idx: `[T, K]` int32 or int64 contiguous; bad ids are counted nowhere.
            expert_group: `[E]` int32, groups from 0 to G - 1.
            num_groups: G.
            totals: `[G]` int64 contiguous, overwritten.
        """
        ...


def read_summary(summary: Tensor, topk_shape: torch.Size, num_experts: int, counts: Tensor) -> int:
    """Checks a summary that has come to the host, and takes the counts from it.

    Arguments:
        summary: on the host.
        topk_shape: T, K.
        num_experts: E.
        counts: `[E + R]` int32 on the host, overwritten.

    Returns:
        The fingerprint that `count_routes` gives.

    Raises:
        ValueError: an id is no expert, as in `count_routes`.
    """
    total, first_bad, bad = summary[:HEAD].tolist()
    num_tokens, num_topk = topk_shape
    if first_bad != NOWHERE:
        t, k = divmod(first_bad, num_topk)
        raise ValueError(
            f"topk_idx[{t}, {k}] = {bad} is not an expert: valid ids are 0 to {num_experts - 1}, or -1 for no expert"
        )
    counts.copy_(summary[HEAD:])
    return finished_fingerprint(total, num_tokens, num_topk)


def finished_fingerprint(total: int, num_tokens: int, num_topk: int) -> int:
    """The fingerprint of ids whose mixed values add up to `total`."""
    return mixed(total & _MASK, mixed(num_tokens, num_topk)) >> 1


def mixed(value: int, position: int) -> int:
    """A number that depends on a value and its position; as in csrc/cpu/routing.cc."""
    x = (value + 0x9E3779B97F4A7C15) * (2 * position + 0xBF58476D1CE4E5B9) & _MASK
    x ^= x >> 32
    x = x * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 29)

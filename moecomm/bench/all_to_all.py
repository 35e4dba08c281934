"""The dispatcher that frameworks build on an all-to-all collective: sort, gather, exchange, group; and the way back.

    dispatch   count routes per expert            bincount
               exchange the counts                all-to-all of [R, E_local] integers
               sort routes by expert              stable argsort of the flat expert ids
               gather rows in that order          index_select: one copy of a row per route
               exchange rows, then weights        all-to-all with uneven splits
               group by local expert              one `cat` of the (source rank, expert) pieces
    combine    ungroup                            one `cat` of the same pieces in the order of ranks
               exchange rows back                 all-to-all with the splits swapped
               weigh and add up                   float32, scatter-add onto the tokens

Two ways of writing it (`BenchConfig.competitors`). `framework`: every step returns a fresh tensor and the rows are
added by scatter-add, as the dispatchers of training frameworks are written. `tuned`: every step writes to a buffer that
is kept between calls, and the rows are added by K gathering passes, which torch does several times faster. Results of a
tuned dispatcher are overwritten by its next call.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from moecomm.bench.dispatchers import Arrived, Dispatcher, Setup

__all__ = ["AllToAllDispatcher"]

Piece = TypeVar("Piece")


@dataclass(frozen=True)
class Exchanged:
    """What arrived, and the routing that brings it home.

    Arguments:
        x, topk_weights, num_tokens_per_expert: as in `Arrived`.
        order: `[routes]` int64, the flat (token, k) index of each row sent, in the order sent.
        pieces: rows of each piece as received, by source rank, then local expert.
        splits_sent, splits_received: rows per rank.
    """

    x: Tensor
    topk_weights: Tensor
    num_tokens_per_expert: Tensor
    order: Tensor
    pieces: tuple[int, ...]
    splits_sent: list[int]
    splits_received: list[int]


class AllToAllDispatcher(Dispatcher):
    """Everything but the collective itself, which a subclass gives (`exchange`)."""

    def __init__(self, setup: Setup) -> None:
        config = setup.config
        self._num_ranks = config.ranks
        self._num_experts = config.experts
        self._is_tuned = config.competitors == "tuned"
        self._buffers: dict[str, Tensor] = {}
        # Contiguous blocks of experts; the first E % R ranks hold one more.
        quotient, remainder = divmod(config.experts, config.ranks)
        self._experts_per_rank = [quotient + (rank < remainder) for rank in range(config.ranks)]
        self._num_local_experts = self._experts_per_rank[setup.rank]

    @abc.abstractmethod
    def exchange(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], source_splits: Sequence[int]
    ) -> None:
        """Send `source_splits[r]` entries of `source` to each rank r, receive `output_splits[r]` from it.

        Arguments:
            output, source: contiguous, of the same dtype and trailing shape; an entry is one of the first dimension.
        """

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Exchanged:
        flat = topk_idx.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat + 1, minlength=self._num_experts + 1)
        received_counts = counts.new_empty(self._num_ranks * self._num_local_experts)
        self.exchange(received_counts, counts[1:], [self._num_local_experts] * self._num_ranks, self._experts_per_rank)
        # Both at once: the host waits for a device every time it looks.
        numbers = torch.cat([counts, received_counts]).tolist()
        num_masked, sent, pieces = numbers[0], numbers[1 : self._num_experts + 1], numbers[self._num_experts + 1 :]
        # Masked routes sort in front of all experts and are cut off.
        order = order[num_masked:]
        splits_sent = _sums(sent, self._experts_per_rank)
        splits_received = _sums(pieces, [self._num_local_experts] * self._num_ranks)
        num_rows = sum(splits_received)

        rows = self._select("sent", x, order // topk_idx.shape[1])
        weights = topk_weights.reshape(-1, 1).index_select(0, order)
        received = self._empty("received", num_rows, x)
        received_weights = weights.new_empty(num_rows, 1)
        self.exchange(received, rows, splits_received, splits_sent)
        self.exchange(received_weights, weights, splits_received, splits_sent)

        return Exchanged(
            x=self._concatenate("grouped", _transposed(received.split_with_sizes(pieces), self._num_ranks), received),
            topk_weights=self._concatenate(
                "grouped weights",
                _transposed(received_weights.split_with_sizes(pieces), self._num_ranks),
                received_weights,
            ).squeeze(1),
            num_tokens_per_expert=received_counts.view(self._num_ranks, self._num_local_experts).sum(0),
            order=order,
            pieces=tuple(pieces),
            splits_sent=splits_sent,
            splits_received=splits_received,
        )

    def output_buffer(self, arrived: Arrived) -> Tensor:
        return self._empty("output", arrived.x.shape[0], arrived.x)

    def combine(self, y: Tensor, arrived: Arrived, topk_weights: Tensor) -> Tensor:
        assert isinstance(arrived, Exchanged)
        # The pieces lie by expert, then rank; bring them to the order of ranks in which they came.
        grouped_sizes = _transposed(arrived.pieces, self._num_ranks)
        rows = self._concatenate(
            "sent back", _transposed(y.split_with_sizes(grouped_sizes), self._num_local_experts), y
        )
        returned = self._empty("returned", arrived.order.shape[0], y)
        self.exchange(returned, rows, arrived.splits_sent, arrived.splits_received)
        del rows
        if self._is_tuned:
            return self._gather_add(returned, arrived.order, topk_weights)
        accumulator = torch.promote_types(y.dtype, torch.float32)
        weights = topk_weights.reshape(-1).index_select(0, arrived.order)
        total = torch.zeros(topk_weights.shape[0], y.shape[1], dtype=accumulator, device=y.device)
        tokens = arrived.order // topk_weights.shape[1]
        total.index_add_(0, tokens, returned.to(accumulator).mul_(weights.unsqueeze(1)))
        return total.to(y.dtype)

    def close(self) -> None:
        self._buffers.clear()

    def _gather_add(self, returned: Tensor, order: Tensor, topk_weights: Tensor) -> Tensor:
        num_tokens, num_topk = topk_weights.shape
        accumulator = torch.promote_types(returned.dtype, torch.float32)
        position = torch.zeros(num_tokens * num_topk, dtype=torch.int64, device=order.device)
        weights = torch.zeros(num_tokens * num_topk, dtype=accumulator, device=order.device)
        position[order] = torch.arange(order.shape[0], device=order.device)
        weights[order] = topk_weights.reshape(-1)[order].to(accumulator)
        total = self._empty("total", num_tokens, returned, accumulator).zero_()
        if order.shape[0] > 0:
            by_k = position.view(num_tokens, num_topk).t().contiguous()
            weights_by_k = weights.view(num_tokens, num_topk).t().contiguous()
            for k in range(num_topk):
                rows = self._select("gathered", returned, by_k[k])
                # A masked route reads row 0 with weight 0.
                total.addcmul_(rows, weights_by_k[k].unsqueeze(1))
        return self._empty("out", num_tokens, returned).copy_(total)

    def _empty(self, purpose: str, num_rows: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or like.dtype
        if not self._is_tuned:
            return torch.empty(num_rows, like.shape[1], dtype=dtype, device=like.device)
        kept = self._buffers.get(purpose)
        if kept is None or kept.shape[0] < num_rows or kept.shape[1] != like.shape[1] or kept.dtype != dtype:
            kept = torch.empty(num_rows + num_rows // 8, like.shape[1], dtype=dtype, device=like.device)
            self._buffers[purpose] = kept
        return kept[:num_rows]

    def _select(self, purpose: str, rows: Tensor, index: Tensor) -> Tensor:
        if not self._is_tuned:
            return rows.index_select(0, index)
        return torch.index_select(rows, 0, index, out=self._empty(purpose, index.shape[0], rows))

    def _concatenate(self, purpose: str, pieces: list[Tensor], like: Tensor) -> Tensor:
        if not self._is_tuned and pieces:
            return torch.cat(pieces)
        num_rows = sum(piece.shape[0] for piece in pieces)
        output = self._empty(purpose, num_rows, like)
        return torch.cat(pieces, out=output) if pieces else output


def _sums(numbers: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The sum of each of the pieces, of these sizes, that a list consists of."""
    ends = list(itertools.accumulate(sizes))
    return [sum(numbers[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _transposed(pieces: Sequence[Piece], num_rows: int) -> list[Piece]:
    """Read a list that lies as a matrix of `num_rows` rows by its columns: the first column, then the second, ..."""
    columns = len(pieces) // num_rows if num_rows else 0
    return [piece for column in range(columns) for piece in pieces[column::columns]]

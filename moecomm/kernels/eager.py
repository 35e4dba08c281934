"""Low-latency kernels: one message per source and destination carries ids, weights and rows; the receiver sorts.

    T tokens of a source   K num_topk   E num_experts   E_local experts here   R ranks   H hidden   N rows of the block

The message format is that of csrc/cpu/eager.h. Rows follow the canonical order: by local expert, source rank, source
token, k; what no route fills is zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from moecomm import _C
from moecomm.kernels.checks import check_ids, check_values

__all__ = ["Block", "CpuEagerKernels", "EagerKernels", "Incoming", "Overflow", "Sorted", "message_bytes"]

_LINE = 64


def message_bytes(num_tokens: int, num_topk: int, row_bytes: int, value_bytes: int) -> int:
    """Most bytes that a message of `num_tokens` tokens takes."""
    parts = (num_tokens * num_topk * 4, num_tokens * num_topk * value_bytes, num_tokens * row_bytes)
    return sum(-(-part // _LINE) * _LINE for part in parts)


class Incoming(NamedTuple):
    """The messages of one call, as they lie in my windows.

    Attributes:
        windows: address of each source's message, by rank.
        num_tokens: T of each source, by rank.
        num_topk: K.
        row_bytes: bytes of a row.
        value_bytes: bytes of a weight; 0 = none travel.
    """

    windows: Sequence[int]
    num_tokens: Sequence[int]
    num_topk: int
    row_bytes: int
    value_bytes: int


class Block(NamedTuple):
    """Where the rows go.

    Attributes:
        rows: address of `[E_local, capacity, H]` (slab) or `[num_rows, H]` (expert_major).
        values: address of the weights, in the same order, or 0.
        used: `[max(1, E_local)]` int64, kept between the uses of a block: how many rows hold something; slab: of each
            expert; expert_major: used[0] of all. The rest is zero.
        capacity: slab: rows per expert; 0 = expert_major.
        alignment: expert_major: each expert's rows are padded to a multiple of it.
        num_rows: expert_major: N, the same at every rank.
        num_local: E_local.
    """

    rows: int
    values: int
    used: Tensor
    capacity: int
    alignment: int
    num_rows: int
    num_local: int


class Sorted(NamedTuple):
    """What the receiver learns.

    Attributes:
        counts: `[R, E + R]` int32: per source its routes per expert, then its distinct tokens per rank.
        routes: `[T, K]` int64 of my tokens, see kernels/base.py.
        num_tokens_per_expert: `[E_local]` int32.
        offsets: `[E_local]` int32: where each expert's rows end; expert_major: padded.
    """

    counts: Tensor
    routes: Tensor
    num_tokens_per_expert: Tensor
    offsets: Tensor


@dataclasses.dataclass
class Overflow(Exception):
    """Rows that do not fit, the same on every rank; nothing was written.

    Attributes:
        index: the expert (slab) or the rank (expert_major).
        need: its rows.
        room: the rows there are.
    """

    index: int
    need: int
    room: int


class EagerKernels(Protocol):
    """Low-latency kernels of one device."""

    def send_eager(
        self, rows: Tensor, topk_idx: Tensor, weights: Tensor | None, expert_rank: Tensor, windows: Sequence[int]
    ) -> tuple[Tensor, int]:
        """Checks the ids, then writes my message into my window at every rank.

        Arguments:
            rows: `[T, H]`, last dimension contiguous.
            topk_idx: `[T, K]` int32 or int64, any strides, -1 = no expert.
            weights: `[T, K]` float32 or float64 contiguous, or None.
            expert_rank: `[E]` int32.
            windows: address of my window at each rank, by rank.

        Returns:
            A copy of the ids, `[T, K]` int32, and the fingerprint that `count_routes` gives.

        Raises:
            ValueError: an id is below -1 or not below E.
        """
        ...

    def receive_eager(
        self, incoming: Incoming, block: Block, expert_rank: Tensor, expert_local: Tensor, rank: int
    ) -> Sorted:
        """Counts, places and copies what arrived.

        Raises:
            Overflow: it does not fit at some rank.
        """
        ...

    def copy_expert_rows(
        self, out: int, rows: Tensor, counts: Tensor, local_experts: tuple[int, int], capacity: int, alignment: int
    ) -> None:
        """Copies the rows that routes name, and no others, to a block of the same form.

        Arguments:
            out: address of the block.
            rows: `[N, ...]` contiguous.
            counts: `[R, E + R]` int32, as in a handle.
            local_experts: first expert here, and the first one behind the last.
            capacity, alignment: as in `Block`.
        """
        ...


@final
class CpuEagerKernels:
    """Native low-latency kernels."""

    def send_eager(
        self, rows: Tensor, topk_idx: Tensor, weights: Tensor | None, expert_rank: Tensor, windows: Sequence[int]
    ) -> tuple[Tensor, int]:
        ids = check_ids("topk_idx", topk_idx)
        num_tokens, num_topk = ids.shape
        ids_out = torch.empty((num_tokens, num_topk), dtype=torch.int32)
        itemsize = rows.element_size()
        if weights is not None:
            check_values("weights", weights, (num_tokens, num_topk))
        fingerprint = _C.send_eager(
            ids.data_ptr(),
            ids.dtype is torch.int64,
            num_tokens,
            num_topk,
            expert_rank.data_ptr(),
            expert_rank.numel(),
            rows.data_ptr(),
            rows.stride(0) * itemsize,
            rows.shape[1] * itemsize,
            0 if weights is None else weights.data_ptr(),
            0 if weights is None else weights.element_size(),
            windows,
            ids_out.data_ptr(),
        )
        return ids_out, fingerprint

    def receive_eager(
        self, incoming: Incoming, block: Block, expert_rank: Tensor, expert_local: Tensor, rank: int
    ) -> Sorted:
        num_experts = expert_rank.numel()
        num_ranks = len(incoming.windows)
        counts = torch.empty((num_ranks, num_experts + num_ranks), dtype=torch.int32)
        routes = torch.empty((incoming.num_tokens[rank], incoming.num_topk), dtype=torch.int64)
        tokens = torch.empty(block.num_local, dtype=torch.int32)
        offsets = torch.empty(block.num_local, dtype=torch.int32)
        index, need, room = _C.receive_eager(
            incoming.windows,
            incoming.num_tokens,
            incoming.num_topk,
            expert_rank.data_ptr(),
            expert_local.data_ptr(),
            num_experts,
            rank,
            incoming.row_bytes,
            incoming.value_bytes,
            block.capacity,
            block.alignment,
            block.num_rows,
            block.rows,
            block.values,
            block.used.data_ptr(),
            counts.data_ptr(),
            routes.data_ptr(),
            tokens.data_ptr(),
            offsets.data_ptr(),
        )
        if index >= 0:
            raise Overflow(index, need, room)
        return Sorted(counts, routes, tokens, offsets)

    def copy_expert_rows(
        self, out: int, rows: Tensor, counts: Tensor, local_experts: tuple[int, int], capacity: int, alignment: int
    ) -> None:
        num_ranks, width = counts.shape
        first, end = local_experts
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        _C.copy_expert_rows(
            out,
            rows.data_ptr(),
            row_bytes,
            counts.data_ptr(),
            num_ranks,
            width - num_ranks,
            first,
            end - first,
            capacity,
            alignment,
        )

"""Low-latency kernels: one message per source and destination carries ids, weights and rows; the receiver sorts.

A destination is a rank, or a domain whose ranks all read the same message, each its own rows.

    T tokens of a source   K num_topk   E num_experts   E_local experts here   R ranks   H hidden   N rows of the block

The message format is that of csrc/cpu/eager.h. Rows follow the canonical order: by local expert, source rank, source
token, k; what no route fills is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["EagerKernels", "Form", "Home", "Overflow", "Sorted", "message_bytes"]

_LINE = 64


def message_bytes(num_tokens: int, num_topk: int, row_bytes: int, value_bytes: int) -> int:
    """Most bytes that a message of `num_tokens` tokens takes."""
    parts = (num_tokens * num_topk * 4, num_tokens * num_topk * value_bytes, num_tokens * row_bytes)
    return sum(-(-part // _LINE) * _LINE for part in parts)


class Form(NamedTuple):
    """What messages and the block that they fill look like: the same for calls of one kind.

    Attributes:
        num_topk: K.
        row_bytes: bytes of a row.
        value_bytes: bytes of a weight; 0 = none travel.
        capacity: slab: rows per expert; 0 = expert_major.
        alignment: expert_major: each expert's rows are padded to a multiple of it.
        num_rows: expert_major: N, the same at every rank.
    """

    num_topk: int
    row_bytes: int
    value_bytes: int
    capacity: int
    alignment: int
    num_rows: int


class Home(NamedTuple):
    """Who receives: the same for all calls.

    Attributes:
        rank: mine.
        expert_rank, expert_local: `[E]` int32: rank of each expert, and its index there.
        tokens_per_expert: `[E_local]` int64; what arrives is added.
        domain_experts: `[E]` bool: experts of my domain; None if `domain_sources` is.
        domain_sources: `[R]` bool: sources whose message holds the rows of my whole domain, not mine alone; None: there
            are none.
    """

    rank: int
    expert_rank: Tensor
    expert_local: Tensor
    tokens_per_expert: Tensor
    domain_experts: Tensor | None = None
    domain_sources: Tensor | None = None


class Sorted(NamedTuple):
    """What the receiver learns.

    Attributes:
        counts: `[R, E + R]` int32: per source its routes per expert, then its distinct tokens per rank.
        routes: `[T, K]` int64 of my tokens, see kernels/base.py.
        num_tokens_per_expert: `[E_local]` int32.
        offsets: `[E_local]` int32: where each expert's rows end, padding included; slab: None.
    """

    counts: Tensor
    routes: Tensor
    num_tokens_per_expert: Tensor
    offsets: Tensor | None


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
    """Low-latency kernels of one device. But for the values of ids they check nothing: a call must not cost more."""

    def send_eager(
        self, rows: Tensor, topk_idx: Tensor, weights: Tensor | None, expert_rank: Tensor, windows: Sequence[int]
    ) -> tuple[Tensor, int]:
        """Checks the ids, then writes my message into my window at every destination.

        Arguments:
            rows: `[T, H]`, last dimension contiguous.
            topk_idx: `[T, K]` int32 or int64 contiguous, -1 = no expert.
            weights: `[T, K]` float32 or float64 contiguous, or None.
            expert_rank: `[E]` int32: the destination of each expert's rows: its rank, or a number for its domain.
            windows: address of my window at each destination.

        Returns:
            A copy of the ids, `[T, K]` int32, and the fingerprint that `count_routes` gives.

        Raises:
            ValueError: an id is below -1 or not below E.
        """
        ...

    def receive_eager(
        self,
        home: Home,
        form: Form,
        windows: Sequence[int],
        num_tokens: Sequence[int],
        rows: int,
        values: int,
        used: Tensor,
    ) -> Sorted:
        """Counts, places and copies what arrived.

        Arguments:
            home: who receives.
            form: of messages and block.
            windows: address of each source's message to me or to my domain, by rank.
            num_tokens: T of each source, by rank.
            rows: address of `[E_local, capacity, H]` (slab) or `[num_rows, H]` (expert_major).
            values: address of the weights, in the same order, or 0.
            used: `[max(1, E_local)]` int64, kept between the uses of a block: how many rows hold something; slab: of
                each expert; expert_major: used[0] of all. The rest is zero.

        Raises:
            Overflow: it does not fit at some rank.
        """
        ...

    def copy_expert_rows(
        self,
        out: int,
        rows: Tensor,
        row_bytes: int,
        counts: Tensor,
        local_experts: tuple[int, int],
        capacity: int,
        alignment: int,
    ) -> None:
        """Copies the rows that routes name, and no others, to a block of the same form.

        Arguments:
            out: address of the block.
            rows: N contiguous rows, in any number of dimensions.
            row_bytes: of one.
            counts: `[R, E + R]` int32, as in a handle.
            local_experts: first expert here, and the first one behind the last.
            capacity, alignment: as in `Form`.
        """
        ...

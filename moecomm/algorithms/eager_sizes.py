"""The fixed shapes of low-latency calls: functions of the communicator's arguments alone. Those of `capacity`, too."""

from __future__ import annotations

import math
from typing import NamedTuple

from moecomm.algorithms.mailbox import CARD_HEAD_BYTES
from moecomm.algorithms.plan import BlockLayout, Layout, block_layout
from moecomm.algorithms.signature import Words, shape_words
from moecomm.codecs.base import RowFormat
from moecomm.kernels.eager import Form, message_bytes

__all__ = ["EagerForm", "EagerSizes"]

_WIDEST_NUMBER = 8
_LINE = 64
_TILE = 128  # as far as the kernels that multiply align experts


class EagerForm(NamedTuple):
    """What a dispatch of fixed shape brings to one rank: rows, weights and (flat) local ids in one block.

    Attributes:
        kernel: what the kernels want to know.
        shape: of the rows received but for H: `(E_local, capacity)` (slab) or `(N,)`.
        choices: shape of weights, and of local ids: `shape`, flat: `(N, K)`.
        content: of blocks with equal content the same is known when it is known which rows hold something.
        block: where rows, ids and weights lie in the block.
        ids_at: where ids begin, flat; None: the layout is another.
        values_at: where weights begin.
        words: what the ranks must agree on, but for the handle; see `moecomm.algorithms.signature`.
    """

    kernel: Form
    shape: tuple[int, ...]
    choices: tuple[int, ...]
    content: tuple[int, ...]
    block: BlockLayout
    ids_at: int | None
    values_at: int
    words: Words


class EagerSizes:
    """The fixed shapes of a communicator's low-latency calls.

    Arguments:
        num_ranks, max_local_experts, num_local_experts: R, most experts of one rank, E_local.
        max_tokens_per_rank, max_topk, hidden: most T, most K, H.
        widest: bytes of the widest number of a row.

    Attributes:
        capacity: rows per expert of a slab: R * T, what arrives if every token chooses the expert once.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        max_local_experts: int,
        num_local_experts: int,
        max_tokens_per_rank: int,
        max_topk: int,
        hidden: int,
        widest: int = _WIDEST_NUMBER,
    ) -> None:
        self.num_ranks = num_ranks
        self.widest = widest
        self.max_local_experts = max_local_experts
        self.num_local_experts = num_local_experts
        self.max_tokens_per_rank = max_tokens_per_rank
        self.max_topk = max_topk
        self.hidden = hidden
        self.capacity = num_ranks * max_tokens_per_rank
        self._forms: dict[tuple[object, ...], EagerForm] = {}

    def check(self, num_tokens: int) -> None:
        """Raises ValueError if a call cannot have so many tokens."""
        if num_tokens > self.max_tokens_per_rank:
            raise ValueError(
                f"x has {num_tokens} tokens, a low-latency call takes at most "
                f"max_tokens_per_rank={self.max_tokens_per_rank}; split the batch, use mode='throughput', or construct "
                "the Communicator with a larger one"
            )

    def narrowed(self, widest: int) -> EagerSizes:
        """The same for rows of numbers of so many bytes."""
        return EagerSizes(
            num_ranks=self.num_ranks,
            max_local_experts=self.max_local_experts,
            num_local_experts=self.num_local_experts,
            max_tokens_per_rank=self.max_tokens_per_rank,
            max_topk=self.max_topk,
            hidden=self.hidden,
            widest=widest,
        )

    def rows(self, layout: str, expert_alignment: int) -> int:
        """Rows per expert of a slab; of expert_major N: what arrives if every token chooses all the experts it can."""
        if layout == "slab":
            return self.capacity
        rows = self.capacity * min(self.max_topk, self.max_local_experts)
        rows += self.max_local_experts * (expert_alignment - 1)
        return -(-rows // expert_alignment) * expert_alignment

    def form(
        self,
        layout: Layout,
        capacity: int,
        expert_alignment: int,
        row_format: RowFormat,
        num_topk: int,
        value_bytes: int,
    ) -> EagerForm:
        """What a dispatch brings here: `capacity` as `rows` gives it, `value_bytes` 0 without weights."""
        key = (layout, capacity, expert_alignment, row_format, num_topk, value_bytes)
        form = self._forms.get(key)
        if form is None:
            is_slab, is_flat = layout == "slab", layout == "flat"
            shape = (self.num_local_experts, capacity) if is_slab else (capacity,)
            slab, row_bytes = capacity if is_slab else 0, row_format.row_bytes
            planes = (row_bytes, 4 * num_topk, value_bytes * num_topk) if is_flat else (row_bytes, value_bytes)
            block = block_layout(math.prod(shape), planes)
            form = self._forms[key] = EagerForm(
                Form(num_topk, row_bytes, value_bytes, slab, expert_alignment, capacity),
                shape,
                (*shape, num_topk) if is_flat else shape,
                (row_bytes, value_bytes, *shape),
                block,
                block.offsets[1] if is_flat else None,
                block.offsets[-1],
                shape_words(layout, expert_alignment, capacity, row_format, num_topk, value_bytes > 0),
            )
        return form

    @property
    def window_bytes(self) -> int:
        """Bytes of one window for one source: a card, and a message of the widest rows and weights."""
        message = message_bytes(self.max_tokens_per_rank, self.max_topk, self.row_bytes, _WIDEST_NUMBER)
        return CARD_HEAD_BYTES + message

    @property
    def row_bytes(self) -> int:
        """Bytes of the longest row."""
        return self.hidden * self.widest

    @property
    def output_rows(self) -> int:
        """Most rows of a combine: slabs, or the rows of expert_major in tiles."""
        return max(self.max_local_experts * self.capacity, self.rows("expert_major", _TILE))

    @property
    def landing_bytes(self) -> int:
        """Bytes that the widest rows and values take that come home in one combine."""
        numbers = (self.hidden + 1) * _WIDEST_NUMBER + 2 * _LINE
        return self.max_tokens_per_rank * self.max_topk * numbers

    @property
    def block_bytes(self) -> int:
        """Bytes of one slab of the widest rows and weights."""
        return self.max_local_experts * self.capacity * (self.hidden + 1) * _WIDEST_NUMBER

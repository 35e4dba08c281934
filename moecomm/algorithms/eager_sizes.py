"""The fixed shapes of low-latency calls: functions of the communicator's arguments alone."""

from __future__ import annotations

from typing import NamedTuple

from moecomm.algorithms.plan import BlockLayout, block_layout
from moecomm.kernels.eager import message_bytes

__all__ = ["EagerForm", "EagerSizes"]

_WIDEST_NUMBER = 8


class EagerForm(NamedTuple):
    """What a low-latency dispatch brings to one rank: rows and weights in one block.

    Attributes:
        row_bytes: bytes of a row.
        value_bytes: bytes of a weight; 0 = none travel.
        capacity: slab: rows per expert; 0 = expert_major.
        num_rows: N.
        num_local: E_local.
        block: where rows and weights lie in the block.
    """

    row_bytes: int
    value_bytes: int
    capacity: int
    num_rows: int
    num_local: int
    block: BlockLayout

    @property
    def num_used(self) -> int:
        """How many numbers say which rows of the block hold something; see `moecomm.kernels.eager.Block`."""
        return max(1, self.num_local)


class EagerSizes:
    """The fixed shapes of a communicator's low-latency calls.

    Arguments:
        num_ranks, max_local_experts, num_local_experts: R, most experts of one rank, E_local.
        max_tokens_per_rank, max_topk, hidden: most T, most K, H.

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
    ) -> None:
        self.max_local_experts = max_local_experts
        self.num_local_experts = num_local_experts
        self.max_tokens_per_rank = max_tokens_per_rank
        self.max_topk = max_topk
        self.hidden = hidden
        self.capacity = num_ranks * max_tokens_per_rank
        self._forms: dict[tuple[str, int, int, int], EagerForm] = {}

    def check(self, num_tokens: int) -> None:
        """Raises ValueError if a call cannot have so many tokens."""
        if num_tokens > self.max_tokens_per_rank:
            raise ValueError(
                f"x has {num_tokens} tokens, a low-latency call takes at most "
                f"max_tokens_per_rank={self.max_tokens_per_rank}; split the batch, use mode='throughput', or construct "
                "the Communicator with a larger one"
            )

    def rows(self, layout: str, expert_alignment: int) -> int:
        """Rows per expert of a slab; of expert_major N: what arrives if every token chooses all the experts it can."""
        if layout == "slab":
            return self.capacity
        rows = self.capacity * min(self.max_topk, self.max_local_experts)
        rows += self.max_local_experts * (expert_alignment - 1)
        return -(-rows // expert_alignment) * expert_alignment

    def form(self, layout: str, capacity: int, row_bytes: int, value_bytes: int) -> EagerForm:
        """What a dispatch brings here: `capacity` as `rows` gives it, `value_bytes` 0 without weights."""
        key = (layout, capacity, row_bytes, value_bytes)
        if key not in self._forms:
            is_slab = layout == "slab"
            num_rows = self.num_local_experts * capacity if is_slab else capacity
            block = block_layout(num_rows, (row_bytes, value_bytes))
            slab = capacity if is_slab else 0
            self._forms[key] = EagerForm(row_bytes, value_bytes, slab, num_rows, self.num_local_experts, block)
        return self._forms[key]

    @property
    def window_bytes(self) -> int:
        """Bytes of one window for one source: a message of the widest rows and weights."""
        return message_bytes(self.max_tokens_per_rank, self.max_topk, self.hidden * _WIDEST_NUMBER, _WIDEST_NUMBER)

    @property
    def block_bytes(self) -> int:
        """Bytes of one slab of the widest rows and weights."""
        return self.max_local_experts * self.capacity * (self.hidden + 1) * _WIDEST_NUMBER

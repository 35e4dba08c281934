"""The fixed shapes of low-latency calls: functions of the communicator's arguments alone."""

from __future__ import annotations

from moecomm.kernels.eager import message_bytes

__all__ = ["EagerSizes"]

_WIDEST_NUMBER = 8


class EagerSizes:
    """The fixed shapes of a communicator's low-latency calls.

    Arguments:
        num_ranks, max_local_experts: R, and most experts of one rank.
        max_tokens_per_rank, max_topk, hidden: most T, most K, H.

    Attributes:
        capacity: rows per expert of a slab: R * T, what arrives if every token chooses the expert once.
    """

    def __init__(
        self, *, num_ranks: int, max_local_experts: int, max_tokens_per_rank: int, max_topk: int, hidden: int
    ) -> None:
        self.max_local_experts = max_local_experts
        self.max_tokens_per_rank = max_tokens_per_rank
        self.max_topk = max_topk
        self.hidden = hidden
        self.capacity = num_ranks * max_tokens_per_rank

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

    @property
    def window_bytes(self) -> int:
        """Bytes of one window for one source: a message of the widest rows and weights."""
        return message_bytes(self.max_tokens_per_rank, self.max_topk, self.hidden * _WIDEST_NUMBER, _WIDEST_NUMBER)

    @property
    def block_bytes(self) -> int:
        """Bytes of one slab of the widest rows and weights."""
        return self.max_local_experts * self.capacity * (self.hidden + 1) * _WIDEST_NUMBER

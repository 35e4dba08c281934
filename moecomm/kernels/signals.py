"""The contract of signals between devices: counters that tell how far each is, added to and waited for in a stream.

    R ranks   slot: a purpose that counters serve   lane: one counter, of one slot and one source

Every rank has a board `[num_slots, R]` int64 in memory that all ranks' devices address, zero at first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["SignalKernels"]


class SignalKernels(Protocol):
    """Signals and waits of one device, in the order of its current stream."""

    def board_bytes(self, num_ranks: int, num_slots: int) -> int:
        """What a board takes."""
        ...

    def make_status(self, num_ranks: int, device: torch.device) -> Tensor:
        """An int64 tensor in which a wait that fails says so; word 0 is not 0 then."""
        ...

    def signal_all(self, boards: Tensor, rank: int, slot: int, *, n: int, status: Tensor) -> None:
        """Adds n to lane (slot, rank) of all boards, `[R]` int64 addresses, unless a wait has failed."""
        ...

    def wait(self, board: int, slot: int, at_least: int, *, status: Tensor, timeout_ns: int) -> None:
        """Lets the stream wait until every lane of a slot of my board is `at_least`; `status` says if it has failed."""
        ...

    def raise_if_behind(self, status: Tensor, operation: str, *, describe: Callable[[int], str]) -> None:
        """Raises PeerTimeout if the status, of which this may be a copy, says that a wait has failed."""
        ...

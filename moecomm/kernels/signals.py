"""The contract of signals between devices: counters that tell how far each is, added to and waited for in a stream.

    R ranks   slot: a purpose that counters serve   lane: one counter, of one slot and one source

Every rank has a board `[num_slots, R]` int64 in memory that all ranks' devices address, zero at first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moecomm.kernels.far_runs import Memory, Runs
from moecomm.kernels.wire import Wire

__all__ = ["SignalKernels", "WireKernels"]


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


class WireKernels(Protocol):
    """The same where some ranks' memory has no address here: puts as well, over a network, in the order of the stream.

    What the boards' owners may rely on: whoever has waited for a signal sees what its source had stored or put before.
    """

    def push(
        self,
        wire: Wire,
        runs: Runs,
        memory: Memory,
        slot: int,
        *,
        n: int,
        parts: int,
        arrivals: Tensor,
        status: Tensor,
        to: int | None = None,
    ) -> None:
        """Puts runs from my memory to the same region of far ranks, then adds n to my lane of a slot of all boards.

        Arguments:
            wire: who is reached how.
            runs: from `make_runs`; none for near ranks.
            memory: my part of the region, which holds what is put as well.
            slot, n: as in `SignalKernels.signal_all`; the lane of a far rank's board is added to behind its runs.
            parts: programs per rank.
            arrivals: `[R]` int32 zeros, for one launch at a time.
            status: nothing is put or added once a wait has failed.
            to: the only rank that something is put to, and whose board is added to; None: all.
        """
        ...

    def wait(
        self,
        wire: Wire,
        slot: int,
        at_least: int,
        *,
        status: Tensor,
        timeout_ns: int,
        awaited: Tensor | None = None,
    ) -> None:
        """As `SignalKernels.wait`, for a board to which a network adds as well.

        Arguments:
            wire: who is reached how.
            slot, at_least, status, timeout_ns: as there.
            awaited: `[R]` int32: only lanes of ranks are waited for where it is not 0; None: all.
        """
        ...

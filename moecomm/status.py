"""What a communicator says of itself."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moecomm.exchanger import Exchanger
from moecomm.explanation import explain

__all__ = ["Status", "WaitingTimes"]


class WaitingTimes(NamedTuple):
    """Seconds that one rank's waits have lasted, by the rank waited for.

    Attributes:
        total: `[R]` float32: over all waits.
        longest: `[R]` float32: in one wait.
    """

    total: torch.Tensor
    longest: torch.Tensor


class Status:
    """What a communicator says of itself; not collective."""

    rank: int
    transport_name: str
    _exchanger: Exchanger

    @property
    def stats(self) -> dict[str, int]:
        """Counters: `calls` and `announcements` (exchanges of counts) so far; receive memory alive, at its peak, ever
        touched; `fixed_blocks_alive` (results and outputs of low-latency calls); `copies` (tensors that combines had to
        copy to where peers can read them); `bytes_between_hosts` (payload put to ranks of other domains; what is
        stored through their addresses, as between domains of one host, is not counted) and `bytes_forwarded` (passed on
        inside this rank's domain); `receive_blocks_alive`; `memory_limit`."""
        return self._exchanger.session.statistics()

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """`[E_local]` int64: routes that arrived for each local expert, over all dispatches so far; kept up to date.
        On a device, to read it is to wait for the device."""
        return self._exchanger.session.arrived_tokens()

    def check(self) -> None:
        """Waits for the device and raises what has gone wrong in calls that kernels make alone, replayed ones included.

        Those are low-latency calls and, where all ranks address each other's memory, throughput calls with a capacity.
        The device finds these errors, so calls and `wait` raise them only if they are known by then. They stop the
        later calls by kernels of every rank, so that nothing of a result is worth anything before `check` has not
        raised. All ranks call it behind the same calls. On the CPU there is nothing to wait for, and nothing to raise.

        Raises:
            CapacityExceeded: rows did not fit (low latency: duplicates in `topk_idx`); all ranks raise it, and may go
                on behind it.
            ValueError: an id of some rank is no expert; likewise.
            CallMismatch: the ranks' calls differ; likewise.
            RoutingChanged: under activation checkpointing, a recompute of some rank routes otherwise; likewise.
            PeerTimeout, PeerLost: the ranks did not all make a call in time; a new Communicator is needed.
        """
        self._exchanger.check()

    @property
    def waiting_times(self) -> WaitingTimes:
        """How long this rank has waited for each rank, to find slow ones."""
        return WaitingTimes(*map(torch.tensor, self._exchanger.session.waiting_times()))

    def explain(self) -> str:
        """What was chosen and why: transport, topology, algorithm of each mode and, between domains, which way the last
        dispatch and combine went, with the bytes of each hop, and of the link the other way. Not collective."""
        return explain(self._exchanger.session, self.transport_name, self.rank)

"""Barriers for use just before a timed operation. Nothing is guarded by them but the clock.

SpinBarrier    processes of one host: about a microsecond. Each rank owns one 64-byte line of a shared page and writes
               there how often it has arrived; it leaves when every line says as much
SignalBarrier  any hosts: everyone signals everyone, and leaves when all signals have come: ranks leave within about
               the time of one signal
GroupBarrier   where no transport has counters: that of `torch.distributed`
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Protocol, final

import torch.distributed as dist

from moecomm.errors import PeerTimeout, TransportUnavailable
from moecomm.groups import Group
from moecomm.transports.base import WaitOutcome
from moecomm.transports.peers import gather_peers
from moecomm.transports.registry import choose_together

__all__ = ["Barrier", "GroupBarrier", "SignalBarrier", "SpinBarrier", "make_barrier"]

LINE_BYTES = 64
# Rounds of looking before the core is offered to somebody else, and before the clock is read.
SPINS_BEFORE_YIELD = 200
SPINS_BEFORE_CLOCK = 20_000


class Barrier(Protocol):
    """A place where all ranks meet."""

    def wait(self) -> None:
        """Return when every rank has called as often as this one; PeerTimeout if one does not come in time."""

    def close(self) -> None:
        """Let go of what the barrier holds."""


@final
class SpinBarrier:
    """A barrier over a shared page.

    Arguments:
        path: a file that all ranks can open; made when it does not exist.
        rank: of this process.
        num_ranks: how many meet.
        timeout: seconds after which `wait` gives up.
    """

    def __init__(self, path: Path, *, rank: int, num_ranks: int, timeout: float) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout = timeout
        self._arrivals = 0
        size = num_ranks * LINE_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._lines = memoryview(self._map).cast("q")
        self._others = [other * LINE_BYTES // 8 for other in range(num_ranks) if other != rank]
        self._mine = rank * LINE_BYTES // 8
        cores = len(os.sched_getaffinity(0))
        # With more ranks than cores the rank waited for may need this core at once.
        self._spins_before_yield = SPINS_BEFORE_YIELD if num_ranks <= cores else 1

    def wait(self) -> None:
        """Return when every rank has called as often as this one.

        Raises:
            PeerTimeout: a rank did not come in time.
        """
        self._arrivals += 1
        arrivals = self._arrivals
        lines = self._lines
        lines[self._mine] = arrivals
        deadline = 0.0
        for line in self._others:
            spins = 0
            while lines[line] < arrivals:
                spins += 1
                if spins % self._spins_before_yield == 0:
                    os.sched_yield()
                if spins % SPINS_BEFORE_CLOCK == 0:
                    now = time.monotonic()
                    deadline = deadline or now + self._timeout
                    if now > deadline:
                        raise self._late(arrivals)

    def close(self) -> None:
        """Unmap the page."""
        self._lines.release()
        self._map.close()

    def _late(self, arrivals: int) -> PeerTimeout:
        missing = tuple(r for r in range(self._num_ranks) if self._lines[r * LINE_BYTES // 8] < arrivals)
        return PeerTimeout(
            f"ranks {list(missing)} did not reach barrier {arrivals} of the benchmark within {self._timeout:g} s.",
            operation=f"barrier #{arrivals}",
            peers=missing,
        )


@final
class SignalBarrier:
    """A barrier of signals of a transport of its own. Construction is collective.

    Arguments:
        group: who meets.
        timeout: seconds after which `wait` gives up.

    Raises:
        TransportUnavailable: no transport with counters reaches all ranks.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        peers = gather_peers(group)
        self._transport = choose_together("auto", group, peers).transport(group, peers, 1)
        self._timeout = timeout
        self._arrivals = 0

    def wait(self) -> None:
        """As `Barrier.wait`."""
        self._arrivals += 1
        self._transport.signal_all(0, 1)
        if self._transport.wait(0, self._arrivals, self._timeout) is WaitOutcome.REACHED:
            return
        missing = tuple(r for r in range(self._transport.num_ranks) if self._transport.lane(0, r) < self._arrivals)
        who = ", ".join(self._transport.describe_peer(rank) for rank in missing)
        raise PeerTimeout(
            f"{who} did not reach barrier {self._arrivals} of the benchmark within {self._timeout:g} s.",
            operation=f"barrier #{self._arrivals}",
            peers=missing,
        )

    def close(self) -> None:
        """As `Barrier.close`."""
        self._transport.close()


@final
class GroupBarrier:
    """The barrier of `torch.distributed`, with the timeout of the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def wait(self) -> None:
        """As `Barrier.wait`, but what is raised is torch's."""
        dist.barrier(group=self._group)

    def close(self) -> None:
        """Nothing is held."""


def make_barrier(group: Group, process_group: dist.ProcessGroup, timeout: float) -> Barrier:
    """The best barrier for ranks on any hosts. Collective."""
    try:
        return SignalBarrier(group, timeout)
    except TransportUnavailable:
        return GroupBarrier(process_group)

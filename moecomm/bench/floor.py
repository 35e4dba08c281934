"""What a low-latency exchange cannot be faster than here, measured in the same run by the same processes.

    signal     one-way: a counter of the transport goes round all ranks, each waiting for the one before it; the time of
               one step of the ring. With two ranks: half a ping-pong
    idle       a loop that only reads the clock, for as long as a pair takes: its 99th percentile is the machine's noise
    Python     the same calls on one rank with one token of one element: nobody to wait for, nothing to carry

The floor of dispatch or combine is one signal and the memory bound of its bytes; that of the pair is the sum of both.
"""

from __future__ import annotations

import statistics
import time
from typing import final

import torch

import moecomm
from moecomm.bench.config import BenchConfig
from moecomm.errors import PeerTimeout, TransportUnavailable
from moecomm.groups import Group, SoloGroup
from moecomm.transports.base import WaitOutcome
from moecomm.transports.peers import gather_peers
from moecomm.transports.registry import choose_together, transport_names

__all__ = ["SignalRing", "make_signal_ring", "measure_python", "spin"]

_ROUNDS = 8
_PYTHON_CALLS = 400
# Added at once to the lanes that the ring does not use, so that a wait, which looks at all lanes, looks at one.
_NEVER_REACHED = 1 << 40


@final
class SignalRing:
    """Counters of a transport of its own, passed around all ranks. Construction and calls are collective.

    Arguments:
        group: the ranks, two or more.
        transport: name of the transport, or `auto`.
        timeout: seconds that one wait may last.

    Raises:
        TransportUnavailable: the transport does not reach all ranks.
    """

    def __init__(self, group: Group, *, transport: str, timeout: float) -> None:
        peers = gather_peers(group)
        self._transport = choose_together(transport, group, peers).transport(group, peers, 1)
        self._rank, self._num_ranks = group.rank, group.size
        self._timeout = timeout
        self._next = (group.rank + 1) % group.size
        self._count = 0
        for rank in range(group.size):
            if rank != self._next:
                self._transport.signal(rank, 0, _NEVER_REACHED)
        group.all_gather(None)  # a lane that is still empty would be waited for

    def one_way(self) -> int:
        """Nanoseconds of one signal from one rank to the next, as rank 0 finds them; 0 on the others."""
        signal, wait, after = self._transport.signal, self._wait, self._next
        if self._rank != 0:
            for _ in range(_ROUNDS):
                wait()
                signal(after, 0)
            return 0
        begin = time.perf_counter_ns()
        for _ in range(_ROUNDS):
            signal(after, 0)
            wait()
        return (time.perf_counter_ns() - begin) // (_ROUNDS * self._num_ranks)

    def _wait(self) -> None:
        self._count += 1
        if self._transport.wait(0, self._count, self._timeout) is not WaitOutcome.REACHED:
            before = (self._rank - 1) % self._num_ranks
            raise PeerTimeout(
                f"rank {before} gave no signal within {self._timeout:g} s.",
                operation=f"signal #{self._count}",
                peers=(before,),
            )

    def close(self) -> None:
        """Lets go of the transport."""
        self._transport.close()


def make_signal_ring(config: BenchConfig, group: Group) -> SignalRing | None:
    """The ring for a run, or None where there is none: one rank, or no transport with counters. Collective."""
    if config.mode != "low_latency" or not config.bound or config.ranks == 1:
        return None
    if config.transport not in ("auto", *transport_names()):
        return None
    try:
        return SignalRing(group, transport=config.transport, timeout=min(config.timeout, 100.0))
    except TransportUnavailable:
        return None


def spin(nanoseconds: float) -> int:
    """Reads the clock until so many nanoseconds have passed; returns how many it were."""
    clock = time.perf_counter_ns
    begin = now = clock()
    end = begin + nanoseconds
    while now < end:
        now = clock()
    return now - begin


def measure_python(config: BenchConfig) -> dict[str, int]:
    """Median nanoseconds of a dispatch and of a combine of one token of one element on one rank, by operation."""
    dispatches, combines = [], []
    clock = time.perf_counter_ns
    x, topk_idx, weights = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    alone = moecomm.Communicator(SoloGroup(), num_experts=1, hidden=1, num_topk=1, max_tokens_per_rank=1)
    with alone as communicator, torch.no_grad():
        for _ in range(_PYTHON_CALLS):
            t0 = clock()
            received = communicator.dispatch(x, topk_idx, weights, mode=config.mode)
            t1 = clock()
            communicator.combine(received.x, received.handle, weights)
            t2 = clock()
            dispatches.append(t1 - t0)
            combines.append(t2 - t1)
    return {"dispatch": int(statistics.median(dispatches)), "combine": int(statistics.median(combines))}

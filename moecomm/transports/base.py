"""The contract of a transport: how a peer is reached. It knows bytes, counters and deadlines; no tokens, no experts.

rank 0                                       rank 1
Region  [ mine | rank 1's, if addressable ]  Region  [ rank 0's, if addressable | mine ]
Board   slot 0: lane per source rank         Board   slot 0: lane per source rank
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import os
from collections.abc import Sequence
from typing import ClassVar

from moecomm import _C
from moecomm.devices.base import Device
from moecomm.errors import TransportUnavailable
from moecomm.groups import Group
from moecomm.kernels.wire import Wire
from moecomm.transports.peers import Peer

__all__ = ["Capabilities", "Region", "Transport", "WaitOutcome"]

# Long enough for a peer on another core to finish a microsecond's work, short against a scheduler's time slice.
_SPIN_NS = 50_000


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a transport can do.

    Attributes:
        device_types: kinds of devices whose memory it carries.
        addressable: a peer's region can be read and written through a pointer.
        crosses_hosts: reaches processes of other hosts.
        stream_ordered: works in the order of a device stream.
        device_initiated: device code starts transfers; see `Transport.make_wire`.
    """

    device_types: tuple[str, ...]
    addressable: bool
    crosses_hosts: bool = False
    stream_ordered: bool = False
    device_initiated: bool = False


@dataclasses.dataclass(frozen=True)
class Region:
    """Symmetric memory: every rank has one of the same size, addressed by (region, offset).

    Attributes:
        index: its number, the same on every rank.
        nbytes: size of each rank's part.
        address: address of my part.
    """

    index: int
    nbytes: int
    address: int


class WaitOutcome(enum.Enum):
    """How a wait ended."""

    REACHED = 0
    TIMEOUT = 1
    LOST = 2


class Transport(abc.ABC):
    """Reaches the other ranks of a group.

    Construction is collective. Counters only grow; a slot has one lane per source rank.

    Arguments:
        group: who takes part.
        peers: identities of all ranks, as `gather_peers` gives them.
        num_slots: number of counter slots.

    Attributes:
        stall_timeout: seconds that a put, a signal or a flush waits for a peer that takes nothing in; where peers'
            memory is written to directly there is no such wait.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    stall_timeout = 100.0

    def __init__(self, group: Group, peers: Sequence[Peer], num_slots: int) -> None:
        self.group = group
        self.rank = group.rank
        self.num_ranks = group.size
        self.peers = tuple(peers)
        self.num_slots = num_slots

    @classmethod
    @abc.abstractmethod
    def probe(cls, me: Peer, peers: Sequence[Peer]) -> list[str | None]:
        """Says for each peer None if it can be reached, else the sentence why not."""

    @classmethod
    @abc.abstractmethod
    def remedy(cls) -> str:
        """The sentence that says what would make this transport usable."""

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Region:
        """Makes a symmetric region of `nbytes` zero bytes per rank; pages exist once touched. Collective."""

    def allocate_on(self, device: Device, nbytes: int) -> Region:
        """`allocate`, in memory of my device, where there is no more than `nbytes` and all exists at once. Collective.

        Raises:
            TransportUnavailable: on all ranks, if one cannot have the memory.
        """
        assert device.is_host, f"transport {self.name} carries {self.capabilities.device_types}"
        return self.allocate(nbytes)

    def make_wire(self, board: Region, device: Device) -> Wire:
        """What kernels need to put to far ranks and to signal them; `device_initiated` transports have it. Collective.

        Arguments:
            board: of `allocate_on`, whole slots of a counter per rank.
            device: mine.

        Raises:
            TransportUnavailable: on all ranks: one has no code for its kernels to be linked with.
        """
        raise AssertionError(f"transport {self.name} is not device_initiated")

    @abc.abstractmethod
    def peer(self, region: Region, rank: int) -> int | None:
        """The address of `rank`'s part of the region in my address space, or None where there is none."""

    @abc.abstractmethod
    def mapping(self, region: Region) -> _C.Mapping:
        """The memory of my part of the region; while this or a block of it lives, so does the memory."""

    @abc.abstractmethod
    def put(self, region: Region, offset: int, address: int, nbytes: int, rank: int) -> None:
        """Copies `nbytes` from my `address` to `offset` in `rank`'s part of the region; mine may change afterwards."""

    @abc.abstractmethod
    def signal(self, rank: int, slot: int, n: int = 1) -> None:
        """Adds `n` to my lane of `rank`'s counter `slot`, ordered after my earlier puts and stores to that rank."""

    @abc.abstractmethod
    def wait(self, slot: int, at_least: int, timeout: float) -> WaitOutcome:
        """Waits at most `timeout` seconds until every lane of my counter `slot` is `at_least`."""

    @abc.abstractmethod
    def lane(self, slot: int, source: int) -> int:
        """The value of my counter `slot`, lane `source`."""

    def wait_at(self, slot: int, lanes: Sequence[tuple[int, int]], at_least: int, timeout: float) -> WaitOutcome:
        """`wait` for lanes of others' counters: what their sources have put there can be read from here then, too.

        Arguments:
            slot: which counter.
            lanes: pairs of a rank whose memory has an address here, and a source.
            at_least, timeout: as in `wait`.

        Returns:
            LOST: a rank at which a lane is behind has gone; whether the source has is not looked at.
        """
        raise AssertionError(f"transport {self.name}: no rank's counters have an address at another")

    def lane_at(self, slot: int, rank: int, source: int) -> int:
        """The value of such a lane."""
        raise AssertionError(f"transport {self.name}: no rank's counters have an address at another")

    def total(self, slot: int) -> int:
        """The sum of all lanes of my counter `slot`."""
        return sum(self.lane(slot, source) for source in range(self.num_ranks))

    @abc.abstractmethod
    def traffic(self, slots: range) -> int:
        """The sum of all lanes of my counters `slots`, a range of step 1."""

    @abc.abstractmethod
    def wait_traffic(self, slots: range, beyond: int, timeout: float) -> bool:
        """Waits at most `timeout` seconds until that sum exceeds `beyond`; whether it does.

        A rank that goes does not end the wait: any other may be the one that goes on.
        """

    @abc.abstractmethod
    def gone(self) -> list[int]:
        """Ranks that will not signal again: their process has ended or they have closed."""

    def waiting_times(self) -> tuple[list[float], list[float]]:
        """Seconds that waits have waited for each rank, by rank: in all, and at most in one wait; zeros if not kept."""
        return [0.0] * self.num_ranks, [0.0] * self.num_ranks

    @abc.abstractmethod
    def flush(self) -> None:
        """Returns when all my puts have arrived."""

    @abc.abstractmethod
    def close(self) -> None:
        """Says goodbye to the peers and lets go of everything; idempotent, and needs no peer."""

    def post(
        self,
        region: Region,
        offset: int,
        address: int,
        nbytes: int,
        slot: int,
        n: int,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Puts the same bytes at the same offset of every rank and signals it; given `ranks`: of these, in order."""
        for rank in self._everyone() if ranks is None else ranks:
            self.put(region, offset, address, nbytes, rank)
            self.signal(rank, slot, n)

    def signal_all(self, slot: int, n: int) -> None:
        """Signals every rank, those behind me first."""
        for rank in self._everyone():
            self.signal(rank, slot, n)

    def _everyone(self) -> list[int]:
        """All ranks, those behind me first, so that the ranks spread over different receivers."""
        return [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks + 1)]

    def describe_wires(self) -> list[str]:
        """What carries puts to ranks whose memory has no address here, a line for each kind; or nothing."""
        return []

    def describe_peer(self, rank: int) -> str:
        """Names a rank for messages."""
        peer = self.peers[rank]
        return f"rank {rank} (pid {peer.pid} on {peer.hostname})"

    def refused(self, nbytes: int, error: OSError) -> str:
        """The sentence for memory that the system does not give."""
        return f"rank {self.rank} cannot make {nbytes} bytes of memory: {error}."

    def no_memory(self, reason: str) -> TransportUnavailable:
        """What all ranks raise when one of them cannot make its part of a region."""
        remedy = (
            "Construct the Communicator with a smaller memory_limit or max_tokens_per_rank (each rank reserves several "
            "times that as address space, which costs no memory), or raise the limit on address space (`ulimit -v`)."
        )
        return TransportUnavailable(f"transport {self.name!r}", reason, remedy)

    def _spin_ns(self) -> int:
        """A waiting rank gives its core away at once when there are more ranks than cores."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        here = sum(peer.machine == self.peers[self.rank].machine for peer in self.peers)
        return _SPIN_NS if here <= cores else 0

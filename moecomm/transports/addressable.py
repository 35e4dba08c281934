"""What transports share whose peers' memory can be addressed: regions by pointer, counters on native boards."""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Sequence

from moecomm import _C
from moecomm.devices.base import AsynchronousDevice, Device
from moecomm.groups import Group
from moecomm.transports.base import Region, Transport, WaitOutcome
from moecomm.transports.peers import Peer

__all__ = ["AddressableTransport"]

_OUTCOMES = (WaitOutcome.REACHED, WaitOutcome.TIMEOUT, WaitOutcome.LOST)


class AddressableTransport(Transport):
    """Peers' regions are mapped here; only how a mapping is made differs."""

    def __init__(self, group: Group, peers: Sequence[Peer], num_slots: int) -> None:
        super().__init__(group, peers, num_slots)
        self._regions: list[list[_C.Mapping]] = []
        self._addresses: list[list[int]] = []
        self._closed = False
        board = self.allocate(_C.SignalBoard.board_bytes(self.num_ranks, num_slots))
        self.board = _C.SignalBoard(
            rank=self.rank,
            num_slots=num_slots,
            boards=self._addresses[board.index],
            pids=self._pids(),
            spin_ns=self._spin_ns(),
            mappings=self._regions[board.index],
        )

    @abc.abstractmethod
    def _map(self, nbytes: int) -> list[_C.Mapping]:
        """Makes my part of a region and maps everybody's, by rank. Collective."""

    @abc.abstractmethod
    def _pids(self) -> list[int]:
        """Per rank the process whose end means that the rank is gone; 0 where it lives in this process."""

    def _map_on(self, device: AsynchronousDevice, nbytes: int) -> list[_C.Mapping]:
        """`_map`, in memory of my device. Collective."""
        raise AssertionError(f"transport {self.name} carries {self.capabilities.device_types}")

    def allocate(self, nbytes: int) -> Region:
        return self._keep(self._map(nbytes), nbytes)

    def allocate_on(self, device: Device, nbytes: int) -> Region:
        if not isinstance(device, AsynchronousDevice):
            return super().allocate_on(device, nbytes)
        return self._keep(self._map_on(device, nbytes), nbytes)

    def _keep(self, mappings: list[_C.Mapping], nbytes: int) -> Region:
        self._regions.append(mappings)
        self._addresses.append([mapping.address for mapping in mappings])
        return Region(len(self._regions) - 1, nbytes, mappings[self.rank].address)

    def mapping(self, region: Region) -> _C.Mapping:
        return self._regions[region.index][self.rank]

    def addresses(self, region: Region) -> list[int]:
        """The addresses of everybody's part of the region, by rank."""
        return self._addresses[region.index]

    def peer(self, region: Region, rank: int) -> int | None:
        return self._addresses[region.index][rank]

    def put(self, region: Region, offset: int, address: int, nbytes: int, rank: int) -> None:
        if not 0 <= offset <= region.nbytes - nbytes:
            raise ValueError(f"put: [{offset}, {offset + nbytes}) is outside the region of {region.nbytes} bytes")
        ctypes.memmove(self._addresses[region.index][rank] + offset, address, nbytes)

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
        if ranks is not None:
            super().post(region, offset, address, nbytes, slot, n, ranks)
            return
        self.board.post(address, nbytes, self._addresses[region.index], offset, slot, n)

    def signal(self, rank: int, slot: int, n: int = 1) -> None:
        self.board.signal(rank, slot, n)

    def wait(self, slot: int, at_least: int, timeout: float) -> WaitOutcome:
        return _OUTCOMES[self.board.wait(slot, at_least, timeout)]

    def lane(self, slot: int, source: int) -> int:
        return self.board.lane(slot, source)

    def wait_at(self, slot: int, lanes: Sequence[tuple[int, int]], at_least: int, timeout: float) -> WaitOutcome:
        return _OUTCOMES[self.board.wait_at(slot, lanes, at_least, timeout)]

    def lane_at(self, slot: int, rank: int, source: int) -> int:
        return self.board.lane_at(slot, rank, source)

    def total(self, slot: int) -> int:
        return self.board.total(slot)

    def traffic(self, slots: range) -> int:
        return self.board.traffic(slots.start, len(slots))

    def wait_traffic(self, slots: range, beyond: int, timeout: float) -> bool:
        return self.board.wait_traffic(slots.start, len(slots), beyond, timeout) == 0

    def signal_all(self, slot: int, n: int) -> None:
        self.board.signal_all(slot, n)

    def gone(self) -> list[int]:
        return self.board.gone()

    def waiting_times(self) -> tuple[list[float], list[float]]:
        return [ns * 1e-9 for ns in self.board.waited_ns()], [ns * 1e-9 for ns in self.board.longest_wait_ns()]

    def flush(self) -> None:
        """Stores and counters are ordered by the memory itself; nothing is ever in flight."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.board.depart()
        self._regions.clear()
        self._addresses.clear()

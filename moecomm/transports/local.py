"""Transport `local`: the ranks are threads of one process (or there is one rank). Plain memory, or that of one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moecomm import _C
from moecomm.devices.base import AsynchronousDevice
from moecomm.groups import Group, LocalGroup
from moecomm.transports.addressable import AddressableTransport
from moecomm.transports.base import Capabilities, WaitOutcome
from moecomm.transports.device_memory import map_within_process
from moecomm.transports.peers import Peer

__all__ = ["LocalTransport"]


class LocalTransport(AddressableTransport):
    """Ranks of one process, as threads, stepped one at a time, or a single rank."""

    name = "local"
    capabilities = Capabilities(device_types=("cpu", "cuda"), addressable=True, stream_ordered=True)

    def __init__(self, group: Group, peers: Sequence[Peer], num_slots: int) -> None:
        super().__init__(group, peers, num_slots)
        self._hub = group.hub if isinstance(group, LocalGroup) else None
        self._stop_watching: Callable[[], None] | None = None
        if self._hub is not None:
            # Each rank watches for itself, for as long as it may wait.
            board = self.board
            self._stop_watching = self._hub.on_leave(lambda rank, reason: board.mark_departed(rank))

    @classmethod
    def probe(cls, me: Peer, peers: Sequence[Peer]) -> list[str | None]:
        return [cls._refusal(me, peer) for peer in peers]

    @staticmethod
    def _refusal(me: Peer, peer: Peer) -> str | None:
        if peer.process != me.process or not peer.in_process:
            return f"rank {peer.rank} (pid {peer.pid} on {peer.hostname}) is a process, not a thread of a LocalHub."
        if peer.device.name != me.device.name:
            return f"rank {peer.rank} uses the GPU {peer.device.name}, rank {me.rank} {me.device.name}."
        return None

    @classmethod
    def remedy(cls) -> str:
        return "Use a moecomm.LocalHub's groups, one per thread (on CUDA: all on one GPU), or another transport."

    def close(self) -> None:
        super().close()
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None

    def _map(self, nbytes: int) -> list[_C.Mapping]:
        own: _C.Mapping | str
        try:
            own = _C.Mapping.create_private(nbytes)
        except OSError as error:
            own = self.refused(nbytes, error)
        offers: list[_C.Mapping | str] = self.group.all_gather(own)
        mappings = [offer for offer in offers if not isinstance(offer, str)]
        if len(mappings) < len(offers):
            raise self.no_memory(next(offer for offer in offers if isinstance(offer, str)))
        return mappings

    def _map_on(self, device: AsynchronousDevice, nbytes: int) -> list[_C.Mapping]:
        return map_within_process(self, device, nbytes)

    def _pids(self) -> list[int]:
        return [0] * self.num_ranks

    def wait(self, slot: int, at_least: int, timeout: float) -> WaitOutcome:
        if self._hub is None or not self._hub.stepped:
            return super().wait(slot, at_least, timeout)

        def settled() -> bool:
            return self.board.reached(slot, at_least) or any(
                self.board.lane(slot, rank) < at_least for rank in self.board.gone()
            )

        if not self._hub.wait_until(self.rank, settled, timeout):
            return WaitOutcome.TIMEOUT
        return WaitOutcome.REACHED if self.board.reached(slot, at_least) else WaitOutcome.LOST

    def wait_at(self, slot: int, lanes: Sequence[tuple[int, int]], at_least: int, timeout: float) -> WaitOutcome:
        if self._hub is None or not self._hub.stepped:
            return super().wait_at(slot, lanes, at_least, timeout)

        def behind() -> set[int]:
            return {rank for rank, source in lanes if self.board.lane_at(slot, rank, source) < at_least}

        def settled() -> bool:
            return not behind() or not behind().isdisjoint(self.board.gone())

        if not self._hub.wait_until(self.rank, settled, timeout):
            return WaitOutcome.TIMEOUT
        return WaitOutcome.LOST if behind() else WaitOutcome.REACHED

    def wait_traffic(self, slots: range, beyond: int, timeout: float) -> bool:
        if self._hub is None or not self._hub.stepped:
            return super().wait_traffic(slots, beyond, timeout)
        return self._hub.wait_until(self.rank, lambda: self.traffic(slots) > beyond, timeout)

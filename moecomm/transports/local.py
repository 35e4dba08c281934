"""Transport `local`: the ranks are threads of one process (or there is one rank). Plain memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moecomm import _C
from moecomm.groups import Group, LocalGroup
from moecomm.transports.addressable import AddressableTransport
from moecomm.transports.base import Capabilities, WaitOutcome
from moecomm.transports.peers import Peer

__all__ = ["LocalTransport"]


class LocalTransport(AddressableTransport):
    """Ranks of one process, as threads, stepped one at a time, or a single rank."""

    name = "local"
    capabilities = Capabilities(device_types=("cpu",), addressable=True)

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
        return [
            None
            if peer.process == me.process and peer.in_process
            else f"rank {peer.rank} (pid {peer.pid} on {peer.hostname}) is a process, not a thread of a LocalHub."
            for peer in peers
        ]

    @classmethod
    def remedy(cls) -> str:
        return "Use a moecomm.LocalHub's groups, one per thread, or another transport."

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

    def wait_traffic(self, slots: range, beyond: int, timeout: float) -> bool:
        if self._hub is None or not self._hub.stepped:
            return super().wait_traffic(slots, beyond, timeout)
        return self._hub.wait_until(self.rank, lambda: self.traffic(slots) > beyond, timeout)

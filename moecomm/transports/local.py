"""Transport `local`: the ranks are threads of one process (or there is one rank). Plain memory."""

from __future__ import annotations

from collections.abc import Sequence

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
        if self._hub is not None and self.rank == 0:
            # One watcher is enough: all boards are visible from here.
            board = self.board
            self._hub.on_leave(lambda rank, reason: board.mark_departed(rank))

    @classmethod
    def probe(cls, me: Peer, peers: Sequence[Peer]) -> list[str | None]:
        return [
            None
            if peer.process == me.process and peer.in_process
            else f"rank {peer.rank} is not a thread of this process (pid {peer.pid} on {peer.hostname})."
            for peer in peers
        ]

    @classmethod
    def remedy(cls) -> str:
        return "Use a moecomm.LocalHub's groups, one per thread, or another transport."

    def _map(self, nbytes: int) -> list[_C.Mapping]:
        mappings: list[_C.Mapping] = self.group.all_gather(_C.Mapping.create_private(nbytes))
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

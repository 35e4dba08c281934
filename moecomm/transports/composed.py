"""Transport `shm+ucx`: processes of several hosts. Ranks of one host address each other's memory; others are sent to.

Each rank has one memory and one board: neighbours write to them directly, and what comes over the wire is put there by
the thread that serves it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from moecomm import _C
from moecomm.groups import Group
from moecomm.transports.base import Region, WaitOutcome
from moecomm.transports.peers import Peer
from moecomm.transports.shared_memory import map_shared
from moecomm.transports.shm import ShmTransport
from moecomm.transports.ucx import OUTCOMES, UcxTransport
from moecomm.transports.ucx_library import find_library

__all__ = ["ComposedTransport"]


class ComposedTransport(UcxTransport):
    """Processes of any hosts that UCX connects; shared memory inside each host."""

    name = "shm+ucx"

    def __init__(self, group: Group, peers: Sequence[Peer], num_slots: int) -> None:
        self._near = [rank for rank, peer in enumerate(peers) if _is_near(peers[group.rank], peer)]
        self._mappings: list[list[_C.Mapping | None]] = []
        super().__init__(group, peers, num_slots)

    @classmethod
    def probe(cls, me: Peer, peers: Sequence[Peer]) -> list[str | None]:
        over_wire = super().probe(me, peers)
        # Neighbours need no wire between them, but each rank has one.
        missing = find_library().problem or None
        return [missing if _is_near(me, peer) else reason for peer, reason in zip(peers, over_wire, strict=True)]

    def _make_board(self) -> _C.SignalBoard:
        """Counters in shared memory. Of far ranks' boards only the heads are here, which say that a rank has gone."""
        size, head = (_C.SignalBoard.board_bytes(count, self.num_slots) for count in (self.num_ranks, 0))
        boards = map_shared(self, size, self._near)
        heads = _C.Mapping.create_private(head * self.num_ranks)
        me = self.peers[self.rank]
        return _C.SignalBoard(
            rank=self.rank,
            num_slots=self.num_slots,
            boards=[
                heads.address + head * rank if board is None else board.address for rank, board in enumerate(boards)
            ],
            pids=[peer.pid if peer.rank != me.rank and _is_near(me, peer) else 0 for peer in self.peers],
            spin_ns=self._poll_ns,
            mappings=[heads, *(board for board in boards if board is not None)],
        )

    def allocate(self, nbytes: int) -> Region:
        mappings = map_shared(self, nbytes, self._near)
        own = mappings[self.rank]
        assert own is not None
        self._open_wire().set_region(len(self._regions), own)
        self._regions.append(own)
        self._mappings.append(mappings)
        # A peer may put into the region as soon as it knows that everybody has it.
        self.group.all_gather(None)
        return Region(len(self._regions) - 1, nbytes, own.address)

    def peer(self, region: Region, rank: int) -> int | None:
        mapping = self._mappings[region.index][rank]
        return None if mapping is None else mapping.address

    def _put(self, region: Region, offset: int, address: int, nbytes: int, rank: int, slot: int, n: int) -> None:
        target = self.peer(region, rank)
        if target is None:
            super()._put(region, offset, address, nbytes, rank, slot, n)
            return
        if not 0 <= offset <= region.nbytes - nbytes:
            raise ValueError(f"put: [{offset}, {offset + nbytes}) is outside the region of {region.nbytes} bytes")
        ctypes.memmove(target + offset, address, nbytes)
        if n > 0:
            self.board.signal(rank, slot, n)

    def _is_sent_to(self, rank: int) -> bool:
        return rank not in self._near

    def signal(self, rank: int, slot: int, n: int = 1) -> None:
        if rank in self._near:
            self.board.signal(rank, slot, n)
        else:
            super().signal(rank, slot, n)

    def wait_at(self, slot: int, lanes: Sequence[tuple[int, int]], at_least: int, timeout: float) -> WaitOutcome:
        return OUTCOMES[self.board.wait_at(slot, lanes, at_least, timeout)]

    def lane_at(self, slot: int, rank: int, source: int) -> int:
        assert rank in self._near, f"the counters of rank {rank} are on another host"
        return self.board.lane_at(slot, rank, source)

    def close(self) -> None:
        super().close()
        self._mappings.clear()


def _is_near(me: Peer, peer: Peer) -> bool:
    """Whether both can open each other's memory."""
    return ShmTransport.refusal(me, peer) is None and ShmTransport.refusal(peer, me) is None

"""Transport `ucx`: processes of several hosts, CPU tensors. Over whatever UCX finds: RDMA, TCP.

Large puts are one-sided where the wire can write to a peer's memory; else they are active messages, as small ones and
signals always are. Which networks and protocols are used is UCX's business and that of its `UCX_*` variables, which are
left alone. Ranks prove by a secret, made for each transport and shared through the group, that they belong to it. All
ranks must have the same byte order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from moecomm import _C
from moecomm.errors import PeerTimeout, TransportUnavailable
from moecomm.groups import Group
from moecomm.transports.base import Capabilities, Region, Transport, WaitOutcome
from moecomm.transports.peers import Peer
from moecomm.transports.ucx_lanes import is_one_sided
from moecomm.transports.ucx_library import find_library

__all__ = ["OUTCOMES", "UcxTransport"]

_log = logging.getLogger("moecomm.transports")

# How long a waiting rank serves what arrives by itself. Then it sleeps, and for each message the thread wakes first it
# and then the rank. Where ranks outnumber cores, who finds nothing to serve gives the core away; so it may wait longer.
_POLL_NS, _YIELDING_POLL_NS = 50_000, 500_000
_SECRET_BYTES = 16
OUTCOMES = (WaitOutcome.REACHED, WaitOutcome.TIMEOUT, WaitOutcome.LOST)
_NO_SLOT = -1


class UcxTransport(Transport):
    """Processes of any hosts that UCX connects.

    Attributes:
        connect_timeout: seconds in which all ranks must have met.
        goodbye_timeout: seconds that closing waits until the peers have taken in what was sent.
        one_sided: whether large puts are one-sided: None = to the peers whose wire can do that, True = to all (UCX
            emulates it where the wire cannot), False = to none, and peers' puts to me neither.
        one_sided_bytes: the least bytes of a large put.
    """

    name = "ucx"
    capabilities = Capabilities(device_types=("cpu",), addressable=False, crosses_hosts=True)
    connect_timeout = 60.0
    goodbye_timeout = 2.0
    one_sided: bool | None = None
    one_sided_bytes = 64 << 10

    def __init__(self, group: Group, peers: Sequence[Peer], num_slots: int) -> None:
        super().__init__(group, peers, num_slots)
        self._regions: list[_C.Mapping] = []
        self._wire: _C.UcxWire | None = None
        self._wires: dict[str, list[int]] = {}
        self.board = self._make_board()
        problem, address = "", b""
        try:
            library = find_library()
            if library.problem:
                raise OSError(library.problem.removesuffix("."))
            self._wire = _C.UcxWire(library.path, self.rank, self.num_ranks, self.board, self._yields)
            address = self._wire.address()
        except (OSError, RuntimeError) as error:
            problem = f"rank {self.rank} ({self.peers[self.rank].hostname}) cannot use UCX: {error}."
        offers = self.group.all_gather((problem, address, self._secret()))
        try:
            self._all_or_none([problem for problem, _, _ in offers])
            problem = self._meet([address for _, address, _ in offers], offers[0][2])
            self._all_or_none(self.group.all_gather(problem))
        except BaseException:
            self.close()
            raise

    @classmethod
    def probe(cls, me: Peer, peers: Sequence[Peer]) -> list[str | None]:
        return [cls._refusal(me, peer) for peer in peers]

    @staticmethod
    def _refusal(me: Peer, peer: Peer) -> str | None:
        who = f"rank {peer.rank} (pid {peer.pid} on {peer.hostname})"
        if peer.rank != me.rank and peer.process == me.process:
            return f"{who} is a thread of the same process."
        if peer.ucx_problem:
            return f"{who}: {peer.ucx_problem}"
        return find_library().problem or None

    @classmethod
    def remedy(cls) -> str:
        wanted = ".".join(map(str, _C.UCX_API_VERSION))
        return (
            f"On every host `pip install 'moecomm[ucx]'` (TCP), or a system UCX {wanted} or newer (for RDMA) and no "
            "wheel libucx."
        )

    @property
    def _yields(self) -> bool:
        return self._spin_ns() == 0

    @property
    def _poll_ns(self) -> int:
        return _YIELDING_POLL_NS if self._yields else _POLL_NS

    def _secret(self) -> bytes:
        return os.urandom(_SECRET_BYTES) if self.rank == 0 else b""

    def _make_board(self) -> _C.SignalBoard:
        """Counters in plain memory. Of the peers' boards only the heads are here, which say that a rank has gone."""
        mine = _C.SignalBoard.board_bytes(self.num_ranks, self.num_slots)
        head = _C.SignalBoard.board_bytes(0, self.num_slots)
        memory = _C.Mapping.create_private(mine + head * self.num_ranks)
        heads = [memory.address + mine + head * rank for rank in range(self.num_ranks)]
        me = self.peers[self.rank]
        return _C.SignalBoard(
            rank=self.rank,
            num_slots=self.num_slots,
            boards=[memory.address if rank == self.rank else heads[rank] for rank in range(self.num_ranks)],
            pids=[peer.pid if _is_visible(me, peer) else 0 for peer in self.peers],
            spin_ns=self._poll_ns,
            mappings=[memory],
        )

    def _meet(self, addresses: list[bytes], secret: bytes) -> str:
        """Connects to everybody and waits until everybody has come; why that failed, or nothing."""
        wire = self._open_wire()
        wire.connect(addresses, secret)
        silent = wire.greeted(self.connect_timeout)
        self._log_notes()
        if not silent:
            self._choose_ways(wire)
            return ""
        who = ", ".join(self.describe_peer(rank) for rank in silent)
        return f"rank {self.rank} ({self.peers[self.rank].hostname}) has not met {who} within {self.connect_timeout} s."

    def _choose_ways(self, wire: _C.UcxWire) -> None:
        if self.one_sided is False:
            wire.withhold_memory()
        for rank in range(self.num_ranks):
            if rank == self.rank or not self._is_sent_to(rank):
                continue
            lanes = sorted(set(wire.lanes(rank)))
            is_chosen = is_one_sided(lanes) if self.one_sided is None else self.one_sided
            if is_chosen:
                wire.allow_one_sided(rank, self.one_sided_bytes)
            way = f"one-sided from {self.one_sided_bytes} bytes on" if is_chosen else "messages"
            self._wires.setdefault(f"{way} ({', '.join(lanes)})", []).append(rank)
        for line in self.describe_wires():
            _log.info("%s: rank %d puts %s", self.name, self.rank, line)

    def _is_sent_to(self, rank: int) -> bool:
        """Whether puts to a peer go over the wire."""
        return True

    def describe_wires(self) -> list[str]:
        return [f"to {_ranks(ranks)}: {way}" for way, ranks in self._wires.items()]

    def _all_or_none(self, problems: list[str]) -> None:
        for problem in problems:
            if problem:
                raise TransportUnavailable(f"transport {self.name!r}", problem, self.remedy())

    def _open_wire(self) -> _C.UcxWire:
        if self._wire is None:
            raise ValueError(f"transport {self.name!r} is closed")
        return self._wire

    def _log_notes(self) -> None:
        for note in self._wire.notes() if self._wire is not None else []:
            _log.warning("%s: %s", self.name, note)

    def allocate(self, nbytes: int) -> Region:
        own, refused = None, ""
        try:
            own = _C.Mapping.create_private(nbytes)
            self._open_wire().set_region(len(self._regions), own)
        except OSError as error:
            refused = self.refused(nbytes, error)
        # A peer may put into the region as soon as it knows that everybody has it.
        refusals = [text for text in self.group.all_gather(refused) if text]
        if own is None or refusals:
            raise self.no_memory(refusals[0])
        self._regions.append(own)
        return Region(len(self._regions) - 1, nbytes, own.address)

    def peer(self, region: Region, rank: int) -> int | None:
        return region.address if rank == self.rank else None

    def mapping(self, region: Region) -> _C.Mapping:
        return self._regions[region.index]

    def put(self, region: Region, offset: int, address: int, nbytes: int, rank: int) -> None:
        self._put(region, offset, address, nbytes, rank, _NO_SLOT, 0)

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
        # The signal rides on the last message of the put.
        for rank in self._everyone() if ranks is None else ranks:
            self._put(region, offset, address, nbytes, rank, slot, n)

    def _put(self, region: Region, offset: int, address: int, nbytes: int, rank: int, slot: int, n: int) -> None:
        if not 0 <= offset <= region.nbytes - nbytes:
            raise ValueError(f"put: [{offset}, {offset + nbytes}) is outside the region of {region.nbytes} bytes")
        wire = self._open_wire()
        if not wire.put(rank, region.index, offset, address, nbytes, slot, n, self.stall_timeout):
            raise self._stalled("put", [rank])

    def signal(self, rank: int, slot: int, n: int = 1) -> None:
        if not self._open_wire().signal(rank, slot, n, self.stall_timeout):
            raise self._stalled("signal", [rank])

    def wait(self, slot: int, at_least: int, timeout: float) -> WaitOutcome:
        outcome = OUTCOMES[self.board.wait(slot, at_least, timeout)]
        if outcome is not WaitOutcome.REACHED:
            self._log_notes()
        return outcome

    def lane(self, slot: int, source: int) -> int:
        return self.board.lane(slot, source)

    def total(self, slot: int) -> int:
        return self.board.total(slot)

    def traffic(self, slots: range) -> int:
        return self.board.traffic(slots.start, len(slots))

    def wait_traffic(self, slots: range, beyond: int, timeout: float) -> bool:
        return self.board.wait_traffic(slots.start, len(slots), beyond, timeout) == 0

    def gone(self) -> list[int]:
        self._log_notes()
        return self.board.gone()

    def waiting_times(self) -> tuple[list[float], list[float]]:
        return [ns * 1e-9 for ns in self.board.waited_ns()], [ns * 1e-9 for ns in self.board.longest_wait_ns()]

    def flush(self) -> None:
        late = self._open_wire().flush(self.stall_timeout)
        self._log_notes()
        if late:
            raise self._stalled("flush", late)

    def close(self) -> None:
        if self._wire is None:
            return
        wire, self._wire = self._wire, None
        try:
            wire.close(self.goodbye_timeout)
        finally:
            self.board.depart()
            for note in wire.notes():
                _log.warning("%s: %s", self.name, note)
            self._regions.clear()

    def _stalled(self, operation: str, ranks: list[int]) -> PeerTimeout:
        who = ", ".join(self.describe_peer(rank) for rank in ranks)
        message = f"{operation}: nothing that rank {self.rank} sent to {who} was taken in for {self.stall_timeout} s."
        return PeerTimeout(message, operation=operation, peers=tuple(ranks))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_visible(me: Peer, peer: Peer) -> bool:
    """Whether the end of the peer's process can be seen from here."""
    here = (peer.host, peer.pid_namespace) == (me.host, me.pid_namespace)
    return here and peer.rank != me.rank and peer.process != me.process

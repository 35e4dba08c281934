"""Transport `nvshmem`: GPUs of several hosts, CUDA tensors. A symmetric heap; RDMA that kernels start by themselves.

Control (counters that the host waits for, deadlines, who has gone) travels between the processes as it does for CPU
tensors, by whatever transport reaches them: `shm`, or `shm+ucx` between hosts. Rows, and the counters by which devices
wait for each other, lie in NVSHMEM's symmetric memory: kernels store through a pointer where a peer's memory has one
(NVLink) and put where it has none; see `moecomm.kernels.triton.far_push`, and `moecomm.devices.wire_queue` for the
order.

Which network is used is NVSHMEM's business and that of its `NVSHMEM_*` variables, which are left alone.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch

from moecomm import _C
from moecomm.devices.base import Device
from moecomm.errors import PeerLost, TransportError, TransportUnavailable
from moecomm.groups import Group
from moecomm.kernels.wire import DeviceLibrary, Wire
from moecomm.transports.base import Capabilities, Region, Transport, WaitOutcome
from moecomm.transports.nvshmem_engine import Engine, EngineError, Nvshmem4py
from moecomm.transports.nvshmem_library import REMEDY, find_library
from moecomm.transports.nvshmem_runtime import Runtime, SymmetricUse, acquire
from moecomm.transports.peers import Peer, gather_peers
from moecomm.transports.registry import choose, choose_together

__all__ = ["NvshmemTransport"]

_log = logging.getLogger("moecomm.transports")


class NvshmemTransport(Transport):
    """Processes of any hosts whose GPUs NVSHMEM connects.

    Attributes:
        host: carries what the hosts' sides say to each other.
        goodbye_timeout: seconds that closing waits for all ranks to close, which giving back symmetric memory needs.
        agreed_timeout: seconds that it waits once all have said that they do.
    """

    name = "nvshmem"
    capabilities = Capabilities(
        device_types=("cuda",), addressable=False, crosses_hosts=True, stream_ordered=True, device_initiated=True
    )
    goodbye_timeout = 2.0
    agreed_timeout = 10.0
    engine_class: ClassVar[type[Engine]] = Nvshmem4py

    def __init__(self, group: Group, peers: Sequence[Peer], num_slots: int) -> None:
        super().__init__(group, peers, num_slots)
        self._symmetric: dict[int, Region] = {}
        self._uses: dict[int, weakref.ref[SymmetricUse]] = {}
        self._has_put = False
        self._runtime: Runtime | None = None
        carriers = gather_peers(group)
        # Two more slots, for leaving together.
        self.host = choose_together("auto", group, carriers).transport(group, carriers, num_slots + 2)
        self._closing, self._agreed = num_slots, num_slots + 1
        try:
            self._runtime = acquire(group, self.engine_class(), self.remedy())
        except BaseException:
            self.host.close()
            raise

    @classmethod
    def probe(cls, me: Peer, peers: Sequence[Peer]) -> list[str | None]:
        control = cls._control_refusal(me, peers)
        return [cls._refusal(me, peer) or (control if peer.rank != me.rank else None) for peer in peers]

    @classmethod
    def _control_refusal(cls, me: Peer, peers: Sequence[Peer]) -> str | None:
        """Why the processes have no way to talk to each other, or None if they have."""
        carriers = [dataclasses.replace(peer, device_type="cpu") for peer in peers]
        try:
            choose("auto", dataclasses.replace(me, device_type="cpu"), carriers)
        except TransportUnavailable as error:
            return f"what the processes say to each other needs a transport of its own. {error.reason}"
        return None

    @classmethod
    def _refusal(cls, me: Peer, peer: Peer) -> str | None:
        for one in (me, peer):
            if one.device_type != "cuda":
                return f"it carries CUDA tensors; those of rank {one.rank} are on {one.device_type}."
        if peer.rank != me.rank and peer.process == me.process:
            return f"rank {peer.rank} (pid {peer.pid} on {peer.hostname}) is a thread of the same process."
        if peer.nvshmem_problem:
            return f"rank {peer.rank} (pid {peer.pid} on {peer.hostname}): {peer.nvshmem_problem}"
        return cls.engine_class().problem() or None

    @classmethod
    def remedy(cls) -> str:
        return f"{REMEDY} Each process needs a CUDA device of its own, and torch with CUDA."

    # -- what the hosts' sides say ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Region:
        return self.host.allocate(nbytes)

    def allocate_on(self, device: Device, nbytes: int) -> Region:
        return self.allocate(nbytes) if device.is_host else self.allocate_symmetric(nbytes)

    def mapping(self, region: Region) -> _C.Mapping:
        if not self._is_symmetric(region):
            return self.host.mapping(region)
        known = self._uses.get(region.index)
        use = known() if known is not None else None
        if use is None:
            use = SymmetricUse()
            self._uses[region.index] = weakref.ref(use)
        return _C.Mapping.borrow(region.address, region.nbytes, use)

    def signal(self, rank: int, slot: int, n: int = 1) -> None:
        self._settle()
        self.host.signal(rank, slot, n)

    def signal_all(self, slot: int, n: int) -> None:
        self._settle()
        self.host.signal_all(slot, n)

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
        if self._is_symmetric(region):
            super().post(region, offset, address, nbytes, slot, n, ranks)
            return
        self._settle()
        self.host.post(region, offset, address, nbytes, slot, n, ranks)

    def wait(self, slot: int, at_least: int, timeout: float) -> WaitOutcome:
        return self.host.wait(slot, at_least, timeout)

    def lane(self, slot: int, source: int) -> int:
        return self.host.lane(slot, source)

    def wait_at(self, slot: int, lanes: Sequence[tuple[int, int]], at_least: int, timeout: float) -> WaitOutcome:
        return self.host.wait_at(slot, lanes, at_least, timeout)

    def lane_at(self, slot: int, rank: int, source: int) -> int:
        return self.host.lane_at(slot, rank, source)

    def total(self, slot: int) -> int:
        return self.host.total(slot)

    def traffic(self, slots: range) -> int:
        return self.host.traffic(slots)

    def wait_traffic(self, slots: range, beyond: int, timeout: float) -> bool:
        return self.host.wait_traffic(slots, beyond, timeout)

    def gone(self) -> list[int]:
        return self.host.gone()

    def waiting_times(self) -> tuple[list[float], list[float]]:
        return self.host.waiting_times()

    # -- symmetric memory ------------------------------------------------------------------------------------------

    def allocate_symmetric(self, nbytes: int) -> Region:
        """Makes a region of `nbytes` zero bytes of device memory per rank, all of it there at once. Collective.

        Raises:
            TransportUnavailable: on all ranks, if one cannot have the memory.
            TransportError: NVSHMEM fails.
        """
        runtime = self._open()
        try:
            address = runtime.engine.allocate(max(1, nbytes))
        except EngineError as error:
            raise self._failed("allocate", error, range(self.num_ranks)) from error
        short = [rank for rank, there in enumerate(self.group.all_gather(address != 0)) if not there]
        if short:
            remedy = (
                "Construct the Communicator with a smaller memory_limit or max_tokens_per_rank, free memory of the GPU "
                "or let NVSHMEM's heap be larger (NVSHMEM_SYMMETRIC_SIZE, NVSHMEM_MAX_MEMORY_PER_GPU)."
            )
            reason = f"rank {short[0]} cannot make {nbytes} bytes of symmetric memory."
            raise TransportUnavailable(f"transport {self.name!r}", reason, remedy)
        region = Region(-1 - len(self._symmetric), nbytes, address)
        self._symmetric[region.index] = region
        return region

    def peer(self, region: Region, rank: int) -> int | None:
        if not self._is_symmetric(region):
            return self.host.peer(region, rank)
        if rank == self.rank:
            return region.address
        runtime = self._open()
        return runtime.engine.pointer(region.address, runtime.pes[rank]) or None

    def put(self, region: Region, offset: int, address: int, nbytes: int, rank: int) -> None:
        """As for the host; in symmetric memory in the order of the current stream, until when the source must stay."""
        if not self._is_symmetric(region):
            self.host.put(region, offset, address, nbytes, rank)
            return
        if not 0 <= offset <= region.nbytes - nbytes:
            raise ValueError(f"put: [{offset}, {offset + nbytes}) is outside the region of {region.nbytes} bytes")
        runtime = self._open()
        if nbytes == 0:
            return
        self._has_put = True
        try:
            runtime.engine.put(region.address + offset, address, nbytes, runtime.pes[rank])
        except EngineError as error:
            raise self._failed("put", error, [rank]) from error

    def flush(self) -> None:
        self._settle()
        self.host.flush()

    def _settle(self) -> None:
        """What the host signals comes behind what it has put on streams."""
        if self._has_put:
            self._has_put = False
            try:
                self._open().engine.quiet()
            except EngineError as error:
                raise self._failed("flush", error, range(self.num_ranks)) from error

    def make_wire(self, board: Region, device: Device) -> Wire:
        runtime, problem, bitcode, where = self._open(), "", None, device.torch_device
        if where.type == "cuda":
            major, minor = torch.cuda.get_device_capability(where)
            bitcode = find_library().bitcode(10 * major + minor)
            if bitcode is None:
                problem = f"rank {self.rank}: NVSHMEM in {find_library().path} has no bitcode for sm_{major}{minor}."
        problem = next((text for text in self.group.all_gather(problem) if text), "")
        if problem:
            remedy = "Install a newer NVSHMEM on every host: `pip install --upgrade nvidia-nvshmem-cu13`."
            raise TransportUnavailable(f"transport {self.name!r}", problem, remedy)
        return Wire(
            rank=self.rank,
            boards=torch.tensor([self.peer(board, rank) or 0 for rank in range(self.num_ranks)], device=where),
            pes=torch.tensor(runtime.pes, dtype=torch.int32, device=where),
            board=board.address,
            num_slots=board.nbytes // (8 * self.num_ranks),
            library=None if bitcode is None else DeviceLibrary(bitcode, runtime.engine.initialise_module),
        )

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        # When the interpreter ends, CUDA may have gone before; the memory goes with the process.
        if sys.is_finalizing() or not self._leave_together(runtime):
            runtime.abandon()
        self._symmetric.clear()
        self.host.close()

    def _leave_together(self, runtime: Runtime) -> bool:
        """Gives back symmetric memory, and NVSHMEM with its last user; False if not all ranks are here to do so.

        Memory that tensors lie in on some rank stays, until a later start or end finds that they are gone everywhere.
        """
        try:
            # Whoever does not come within the first wait leaves, which ends the others' second wait at once.
            if not self._meet(self._closing, self.goodbye_timeout):
                return False
            runtime.engine.quiet()
            used = [index for index, use in self._uses.items() if use() is not None]
            # One more than once: that no memory is in use here, so all of it can go.
            if not self._meet(self._agreed, self.agreed_timeout, n=1 if used else 2):
                return False
            if any(self.host.lane(self._agreed, rank) < 2 for rank in range(self.num_ranks)):
                runtime.leave([(region.address, self._uses.get(index)) for index, region in self._symmetric.items()])
            else:
                for region in reversed(self._symmetric.values()):
                    runtime.engine.free(region.address)
            runtime.release()
        except (EngineError, TransportError) as error:
            _log.warning("%s: rank %d cannot close in order: %s", self.name, self.rank, error)
            return False
        return True

    def _meet(self, slot: int, timeout: float, n: int = 1) -> bool:
        """Whether all ranks have come here in time."""
        self.host.signal_all(slot, n)
        if self.host.wait(slot, 1, timeout) is WaitOutcome.REACHED:
            return True
        _log.warning(
            "%s: rank %d closes without all others, so its symmetric memory stays until the process ends",
            *(self.name, self.rank),
        )
        return False

    def _is_symmetric(self, region: Region) -> bool:
        return region.index < 0

    def _open(self) -> Runtime:
        if self._runtime is None:
            raise ValueError(f"transport {self.name!r} is closed")
        return self._runtime

    def _failed(self, operation: str, error: EngineError, ranks: Sequence[int]) -> TransportError:
        """What became of an operation: a peer that is gone explains most that NVSHMEM can fail with."""
        gone = [rank for rank in self.gone() if rank in ranks]
        if gone:
            who = ", ".join(self.describe_peer(rank) for rank in gone)
            message = f"{operation}: {who} has gone; rank {self.rank}: {error}."
            return PeerLost(message, operation=operation, peers=tuple(gone))
        who = self.describe_peer(self.rank)
        return TransportError(f"{operation}: {who}: {error}.", operation=operation, peers=tuple(ranks))

"""Transport `nvlink`: GPUs of one host that can address each other, one process per rank; CUDA tensors.

Messages between the hosts' sides go through shared memory, as with `shm`. Rows lie in device memory that each process
exports (CUDA IPC) and its peers open: kernels store to it and load from it. Two processes may use one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from moecomm import _C
from moecomm.devices.base import AsynchronousDevice, DeviceMemory
from moecomm.groups import Group
from moecomm.transports.base import Capabilities
from moecomm.transports.device_memory import map_between_processes
from moecomm.transports.peers import Peer
from moecomm.transports.shm import ShmTransport

__all__ = ["NvlinkTransport"]

# Memory of closed transports that peers may still have open; given back once they have departed.
_lingering: list[tuple[NvlinkTransport, list[DeviceMemory]]] = []


class NvlinkTransport(ShmTransport):
    """Processes of one host, CUDA tensors."""

    name = "nvlink"
    capabilities = Capabilities(device_types=("cuda",), addressable=True, stream_ordered=True)

    def __init__(self, group: Group, peers: Sequence[Peer], num_slots: int) -> None:
        self._exported: list[DeviceMemory] = []
        super().__init__(group, peers, num_slots)
        _give_back()

    @classmethod
    def probe(cls, me: Peer, peers: Sequence[Peer]) -> list[str | None]:
        return [cls.refusal(me, peer) or cls._device_refusal(me, peer) for peer in peers]

    @staticmethod
    def _device_refusal(me: Peer, peer: Peer) -> str | None:
        if peer.rank == me.rank:
            return None
        for one in (me, peer):
            if one.device.ipc_problem:
                return f"rank {one.rank}: {one.device.ipc_problem} Help for rank {one.rank}: {one.device.remedy}"
        if peer.device.name not in me.device.reachable:
            return (
                f"the GPU of rank {me.rank} ({me.device.name}) cannot address that of rank {peer.rank} "
                f"({peer.device.name}): no peer access with atomics between them, as over NVLink, or this process does "
                "not see it."
            )
        return None

    @classmethod
    def remedy(cls) -> str:
        return (
            "Run all ranks as processes of one user, on one host and in one container, on Linux, with CuPy installed, "
            "on GPUs with peer access to each other (`nvidia-smi topo -p2p a`) that all processes see "
            "(CUDA_VISIBLE_DEVICES alike; choose by torch.cuda.set_device)."
        )

    def _map_on(self, device: AsynchronousDevice, nbytes: int) -> list[_C.Mapping]:
        mappings, own = map_between_processes(self, device, nbytes)
        self._exported.append(own)
        return mappings

    def close(self) -> None:
        if self._exported:
            _lingering.append((self, self._exported))
            self._exported = []
        super().close()
        _give_back()


def _give_back() -> None:
    """Lets go of exported memory that nobody has open any more."""
    _lingering[:] = [
        (transport, memory)
        for transport, memory in _lingering
        if not set(range(transport.num_ranks)) - {transport.rank} <= set(transport.gone())
    ]

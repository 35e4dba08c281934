"""Regions in the memory of devices: by address within a process, by what the devices export between processes."""

from __future__ import annotations

from moecomm import _C
from moecomm.devices.base import AsynchronousDevice, DeviceMemory
from moecomm.errors import TransportUnavailable
from moecomm.transports.base import Transport

__all__ = ["map_between_processes", "map_within_process"]


def map_within_process(transport: Transport, device: AsynchronousDevice, nbytes: int) -> list[_C.Mapping]:
    """Makes my part of a region and maps everybody's, by rank; all ranks share a process and a device. Collective.

    Raises:
        TransportUnavailable: on all ranks, if one cannot have the memory.
    """
    own: DeviceMemory | str
    try:
        own = device.allocate(nbytes, is_exported=False)
    except OSError as error:
        own = transport.refused(nbytes, error)
    offers: list[DeviceMemory | str] = transport.group.all_gather(own)
    mappings = [_borrowed(offer) for offer in offers if not isinstance(offer, str)]
    if len(mappings) < len(offers):
        raise _no_memory(transport, next(offer for offer in offers if isinstance(offer, str)))
    return mappings


def map_between_processes(
    transport: Transport, device: AsynchronousDevice, nbytes: int
) -> tuple[list[_C.Mapping], DeviceMemory]:
    """The same for ranks that are processes; also gives my memory, which must outlive the peers' use of it. Collective.

    Raises:
        TransportUnavailable: on all ranks, if one cannot have the memory or cannot open a peer's.
    """
    own, handle, problem = None, b"", ""
    try:
        own = device.allocate(nbytes, is_exported=transport.num_ranks > 1)
        if transport.num_ranks > 1:
            handle = device.export(own)
    except OSError as error:
        problem = transport.refused(nbytes, error)
    offers: list[tuple[str, bytes]] = transport.group.all_gather((problem, handle))
    problem = next((text for text, _ in offers if text), "")
    if own is None or problem:
        raise _no_memory(transport, problem)
    mappings: list[_C.Mapping] = []
    for rank, (_, handle) in enumerate(offers):
        try:
            mappings.append(_borrowed(own if rank == transport.rank else device.open(handle, nbytes)))
        except OSError as error:
            problem = f"rank {transport.rank} cannot open the device memory of rank {rank}: {error}."
            break
    problem = next((text for text in transport.group.all_gather(problem) if text), "")
    if problem:
        raise TransportUnavailable(f"transport {transport.name!r}", problem, transport.remedy())
    return mappings, own


def _borrowed(memory: DeviceMemory) -> _C.Mapping:
    return _C.Mapping.borrow(memory.address, memory.nbytes, memory)


def _no_memory(transport: Transport, reason: str) -> TransportUnavailable:
    remedy = (
        "Construct the Communicator with a smaller memory_limit (which is allocated at once on a device) or "
        "max_tokens_per_rank, or free memory of the device."
    )
    return TransportUnavailable(f"transport {transport.name!r}", reason, remedy)

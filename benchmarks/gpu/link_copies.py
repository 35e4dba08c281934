"""The bound of an exchange between processes: copies of its bytes from each rank's memory into every rank's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moecomm.devices.base import AsynchronousDevice, DeviceMemory
from moecomm.groups import Group

__all__ = ["LinkCopies"]

_POISON = 0xA5


class LinkCopies:
    """Copies to all ranks at once, a stream each, behind what the current stream has; that then waits for all.

    Arguments:
        device: of this rank; opens the other ranks' memory.
        group: all ranks; constructing and closing are collective.
        bytes_to: by rank, how many are copied there from here, my own memory included.
    """

    def __init__(self, device: AsynchronousDevice, group: Group, bytes_to: Sequence[int]) -> None:
        self._device, self._group, self._bytes_to = device, group, bytes_to
        table: list[list[int]] = group.all_gather(list(bytes_to))
        self._bytes_from = [row[group.rank] for row in table]
        slot = max(1, *(nbytes for row in table for nbytes in row))
        size = group.size * slot
        self._source = device.allocate(slot, is_exported=False)
        self._own = device.allocate(size, is_exported=True)
        handles = group.all_gather(device.export(self._own))
        # A rank writes to its own slot everywhere.
        self._opened: list[DeviceMemory] = [
            self._own if rank == group.rank else device.open(handle, size) for rank, handle in enumerate(handles)
        ]
        self._targets = [memory.address + group.rank * slot for memory in self._opened]
        self._streams = [device.new_stream() for _ in range(group.size)]
        self._copy = _copier(device)

    def run(self) -> None:
        """Gives the copies to the device."""
        current = self._device.current_stream()
        start = current.record()
        for stream, target, nbytes in zip(self._streams, self._targets, self._bytes_to, strict=True):
            if nbytes:
                stream.wait(start)
                stream.submit(lambda to=target, n=nbytes: self._copy(to, self._source.address, n))
        for stream in self._streams:
            current.wait(stream.record())

    def check(self) -> int:
        """Copies that have not come here whole: a bound that moves nothing would bound nothing. Collective."""
        view = self._device.bytes_at
        view(self._own.address, self._own.nbytes, self._own).fill_(_POISON)
        view(self._source.address, self._source.nbytes, self._source).fill_(self._group.rank + 1)
        self._device.current_stream().synchronize()
        self._group.all_gather(None)
        self.run()
        self._device.current_stream().synchronize()
        self._group.all_gather(None)
        slots = view(self._own.address, self._own.nbytes, self._own).view(self._group.size, -1)
        return sum(
            not bool((slot[:nbytes] == rank + 1).all())
            for rank, (slot, nbytes) in enumerate(zip(slots, self._bytes_from, strict=True))
        )

    def close(self) -> None:
        """Lets go of the memory: the others' first, and once all have done so my own."""
        for stream in self._streams:
            stream.synchronize()
        self._opened.clear()
        self._group.all_gather(None)
        del self._own, self._source


def _copier(device: AsynchronousDevice) -> Callable[[int, int, int], object]:
    """Copies (target, source, bytes) on the current stream."""
    if device.torch_device.type != "cuda":
        return lambda target, source, nbytes: device.bytes_at(target, nbytes, None).copy_(
            device.bytes_at(source, nbytes, None)
        )
    import torch
    from cupy.cuda import runtime

    def copy(target: int, source: int, nbytes: int) -> None:
        # By address: torch would ask which device a peer's memory is on, and this process may not see that one.
        stream = torch.cuda.current_stream(device.torch_device).cuda_stream
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream)

    return copy

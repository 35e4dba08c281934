"""CUDA devices. Memory that other processes open is allocated through CuPy, since torch has no call for it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from moecomm.devices.base import AsynchronousDevice, DeviceIdentity, DeviceMemory, Event, Stream
from moecomm.devices.device_queue import NUM_SLOTS, DeviceQueue
from moecomm.devices.peer_access import reaches
from moecomm.devices.queue import Queue
from moecomm.devices.wire_queue import WireQueue
from moecomm.errors import TransportUnavailable
from moecomm.kernels.eager import EagerKernels
from moecomm.kernels.registry import chosen_eager_kernels, chosen_kernels, signal_kernels_for, wire_kernels_for
from moecomm.kernels.signals import SignalKernels, WireKernels
from moecomm.kernels.summary import SummarizingKernels
from moecomm.kernels.wire import Wire

__all__ = ["CudaDevice", "CudaStream"]

# Receive memory is allocated at once, so the default leaves most to the model: a third of what is free, for all ranks
# of the device together.
_DEFAULT_SHARE = 3

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_EXPORTED_BLOCK = 2 << 20


class CudaEvent(Event):
    """See `Event`."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def has_passed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream(Stream):
    """See `Stream`; what it is given runs at once and launches.

    Arguments:
        stream: of torch.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> CudaEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def is_same(self, other: Stream) -> bool:
        return isinstance(other, CudaStream) and self._stream == other._stream


class _TorchMemory(DeviceMemory):
    """Memory of torch's allocator."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        try:
            self._tensor = torch.zeros(max(1, nbytes), dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError as error:
            raise OSError(str(error)) from error
        self.address = self._tensor.data_ptr()
        self.nbytes = nbytes


class _RuntimeMemory(DeviceMemory):
    """Memory of the CUDA runtime, or what another process has given of it.

    Arguments:
        address, nbytes: the memory.
        device: index.
        free: the runtime's function that gives it back.
    """

    def __init__(self, address: int, nbytes: int, device: int, free: Callable[[int], object]) -> None:
        self.address = address
        self.nbytes = nbytes
        self._device = device
        self._free = free

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the driver is on its way out, with all memory
            with _on(self._device):
                self._free(self.address)


class _Interface:
    """Memory at an address, as torch takes it from other packages. Keeps its owner alive, as torch keeps this."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        # Version 2 has no stream: order is kept here, and torch shall not add to it.
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }
        self._owner = owner


class CudaDevice(AsynchronousDevice):
    """A GPU.

    Arguments:
        device: with or without an index; without, the current one.

    Raises:
        ValueError: there is no such device.
        TransportUnavailable: Triton is not installed.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ValueError(f"device: {device} was asked for, but torch finds no CUDA device")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"device: {device} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
        try:
            signal_kernels_for("triton")
        except ImportError as error:
            raise TransportUnavailable("device 'cuda'", f"{error}.", "pip install triton.") from error
        self.torch_device = torch.device("cuda", index)
        self._index = index

    def row_kernels(self) -> SummarizingKernels:
        return cast(SummarizingKernels, chosen_kernels("triton"))

    def eager_kernels(self) -> EagerKernels:
        return chosen_eager_kernels("triton")

    def signal_kernels(self) -> SignalKernels:
        return signal_kernels_for("triton")

    def wire_kernels(self) -> WireKernels:
        return wire_kernels_for("triton")

    def identity(self) -> DeviceIdentity:
        return _identity(self._index)

    def default_memory_limit(self, num_sharers: int) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free // _DEFAULT_SHARE // num_sharers

    def board_bytes(self, num_ranks: int) -> int:
        return self.signal_kernels().board_bytes(num_ranks, NUM_SLOTS)

    def make_queue(
        self,
        boards: Sequence[int],
        rank: int,
        timeout: float,
        gone: Callable[[], list[int]],
        wire: Wire | None = None,
    ) -> Queue:
        if wire is not None:
            return WireQueue(self, boards, rank, timeout, gone, wire)
        return DeviceQueue(self, boards, rank, timeout, gone)

    # -- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, is_exported: bool) -> DeviceMemory:
        if not is_exported:
            memory: DeviceMemory = _TorchMemory(nbytes, self.torch_device)
            torch.cuda.synchronize(self.torch_device)
            return memory
        runtime = _runtime()
        with _on(self._index):
            # Not from a pool: a handle names a whole allocation. In whole blocks of the driver, which otherwise puts
            # small allocations into one block, and then exports that with all that is in it.
            room = -(-max(1, nbytes) // _EXPORTED_BLOCK) * _EXPORTED_BLOCK
            address = _called(runtime.malloc, room)
            memory = _RuntimeMemory(address, nbytes, self._index, runtime.free)
            _called(runtime.memset, address, 0, room)
            _called(runtime.deviceSynchronize)
        return memory

    def export(self, memory: DeviceMemory) -> bytes:
        with _on(self._index):
            return bytes(_called(_runtime().ipcGetMemHandle, memory.address))

    def open(self, handle: bytes, nbytes: int) -> DeviceMemory:
        runtime = _runtime()
        with _on(self._index):
            address = _called(runtime.ipcOpenMemHandle, handle, _LAZY_PEER_ACCESS)
        return _RuntimeMemory(address, nbytes, self._index, runtime.ipcCloseMemHandle)

    def bytes_at(self, address: int, nbytes: int, owner: object) -> Tensor:
        return torch.as_tensor(_Interface(address, nbytes, owner), device=self.torch_device)

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    # -- streams -----------------------------------------------------------------------------------------------------

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.torch_device))

    def new_stream(self) -> CudaStream:
        # Ahead of the caller's kernels where both could run: they move what others wait for.
        stream = torch.cuda.Stream(self.torch_device, priority=-1)  # type: ignore[no-untyped-call]
        return CudaStream(stream)


@contextlib.contextmanager
def _on(index: int) -> Iterator[None]:
    """Makes a device the current one, for torch and for CuPy, which may have a runtime library of its own."""
    with torch.cuda.device(index):
        _runtime().setDevice(index)
        yield


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the runtime; what it refuses is an OSError with its words."""
    try:
        return function(*arguments)
    except RuntimeError as error:  # CUDARuntimeError
        raise OSError(f"{getattr(function, '__name__', 'CUDA')}: {error}") from error


def _runtime() -> Any:
    """CuPy's functions of the CUDA runtime."""
    from cupy.cuda import runtime

    return runtime


@functools.cache
def _identity(index: int) -> DeviceIdentity:
    names = [str(torch.cuda.get_device_properties(other).uuid) for other in range(torch.cuda.device_count())]
    reachable = tuple(name for other, name in enumerate(names) if reaches(index, other))
    problem, remedy = "", ""
    try:
        _runtime().getDeviceCount()
    except ImportError as error:
        problem = f"CuPy, which opens memory of other processes, is not there ({error})."
        remedy = f"pip install cupy-cuda{(torch.version.cuda or '13').split('.')[0]}x."
    except RuntimeError as error:
        problem = f"CuPy finds no CUDA: {error}."
        remedy = f"Install the CuPy for CUDA {torch.version.cuda}, with which torch is built."
    return DeviceIdentity(names[index], reachable, problem, remedy)

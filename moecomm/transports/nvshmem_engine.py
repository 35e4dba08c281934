"""NVSHMEM as the transport calls it, through nvshmem4py, which is imported when something is asked of it."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Protocol

import numpy as np
import torch

from moecomm.transports.nvshmem_library import find_library, missing_package

__all__ = ["Engine", "EngineError", "Nvshmem4py", "fill", "problem_here"]

_STATUS = {
    1: "an invalid value",
    2: "out of memory",
    3: "not supported",
    4: "memory that is not symmetric",
    5: "no GPU selected",
    6: "a collective launch failed",
    7: "an internal error",
}
_IS_INITIALIZED = 2


class EngineError(Exception):
    """NVSHMEM refuses or fails.

    Arguments:
        operation: what it was asked to do.
        status: its number, 0 where it has none.
        reason: what is known beside the number.
    """

    def __init__(self, operation: str, status: int = 0, reason: str = "") -> None:
        known = f"status {status} ({_STATUS.get(status, 'unknown')})" if status else ""
        super().__init__(f"NVSHMEM cannot {operation}: {', '.join(filter(None, (known, reason)))}")
        self.operation = operation
        self.status = status


class Engine(Protocol):
    """What the transport asks of NVSHMEM. Addresses are of device memory; streams are the calling thread's current one.

    Whatever fails raises `EngineError`. `start`, `allocate`, `free` and `finish` are collective over all PEs.
    """

    def problem(self) -> str:
        """The sentence why this process cannot use NVSHMEM; empty if it can."""

    def is_started(self) -> bool:
        """Whether it runs in this process, whoever has started it."""

    def unique_id(self) -> bytes:
        """What all ranks must give to one `start`."""

    def start(self, unique_id: bytes, rank: int, num_ranks: int) -> None:
        """Starts it on the current device; my PE is my rank."""

    def finish(self) -> None:
        """Ends it; it must have been started by `start`, and all memory given back."""

    def my_pe(self) -> int:
        """My number."""

    def num_pes(self) -> int:
        """How many there are."""

    def allocate(self, nbytes: int) -> int:
        """Address of my part of symmetric memory, all zero; 0 if there is not enough somewhere."""

    def free(self, address: int) -> None:
        """Gives it back."""

    def pointer(self, address: int, pe: int) -> int:
        """Where the same place at a PE can be addressed from here, or 0."""

    def put(self, target: int, source: int, nbytes: int, pe: int) -> None:
        """Copies from my memory to the same place as `target` at a PE, in the order of the stream."""

    def quiet(self) -> None:
        """The host waits until all that the stream and earlier kernels have put has arrived."""

    def initialise_module(self, module: int) -> None:
        """Fills in NVSHMEM's state in a CUDA module (CUmodule) that is linked with it."""


def problem_here() -> str:
    """The sentence why this process cannot use NVSHMEM, or nothing. Imports neither nvshmem4py nor a library."""
    problem = find_library().problem or missing_package()
    if problem:
        return problem
    if torch.version.cuda is None:
        return "this torch is built without CUDA."
    # Without a GPU some versions say that they have started, and others end the process.
    return "" if torch.cuda.is_available() else "torch finds no CUDA device here."


class Nvshmem4py:
    """See `Engine`."""

    def problem(self) -> str:
        return problem_here()

    def is_started(self) -> bool:
        return int(self._bindings.init_status()) >= _IS_INITIALIZED

    def unique_id(self) -> bytes:
        return bytes(self._call("make a unique id", self._core.get_unique_id)._data.tobytes())

    def start(self, unique_id: bytes, rank: int, num_ranks: int) -> None:
        made = self._core.get_unique_id(empty=True)
        fill(made, unique_id)
        operation = f"start as rank {rank} of {num_ranks}"
        self._call(operation, torch.cuda.synchronize)  # so that the current device has a context
        self._call(
            operation,
            self._core.init,
            uid=made,
            rank=rank,
            nranks=num_ranks,
            initializer_method="uid",
        )
        if not self.is_started():
            raise EngineError(operation, reason="it has not found the GPU")

    def finish(self) -> None:
        self._call("finish", self._core.finalize)

    def my_pe(self) -> int:
        return int(self._bindings.my_pe())

    def num_pes(self) -> int:
        return int(self._bindings.n_pes())

    def allocate(self, nbytes: int) -> int:
        return int(self._call(f"allocate {nbytes} bytes", self._bindings.calloc, nbytes, 1))

    def free(self, address: int) -> None:
        self._call("free memory", self._bindings.free, address)

    def pointer(self, address: int, pe: int) -> int:
        return int(self._call(f"give the address of PE {pe}", self._bindings.ptr, address, pe))

    def put(self, target: int, source: int, nbytes: int, pe: int) -> None:
        self._call(
            f"put {nbytes} bytes to PE {pe}", self._bindings.putmem_on_stream, target, source, nbytes, pe, _stream()
        )

    def quiet(self) -> None:
        self._call("wait for its puts", self._bindings.quiet_on_stream, _stream())
        self._call("wait for its puts", torch.cuda.current_stream().synchronize)

    def initialise_module(self, module: int) -> None:
        self._call("initialise a module", self._bindings.cumodule_init, module)

    @property
    def _core(self) -> Any:
        _load()
        return importlib.import_module("nvshmem.core")

    @property
    def _bindings(self) -> Any:
        _load()
        return importlib.import_module("nvshmem.bindings")

    def _call(self, operation: str, function: Any, *args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:  # whatever kind nvshmem4py, cuda.core or torch raise: all are NVSHMEM's to us
            raise EngineError(operation, int(getattr(error, "status", 0)), str(error)) from error


def fill(made: Any, unique_id: bytes) -> None:
    """Fills in a unique id of nvshmem4py, which holds its bytes in an array of one record."""
    made._data.view(np.uint8).reshape(-1)[:] = np.frombuffer(unique_id, dtype=np.uint8)


def _load() -> None:
    """Loads the library that was found, so that nvshmem4py uses this one and no other."""
    ctypes.CDLL(find_library().path, mode=ctypes.RTLD_GLOBAL)


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)

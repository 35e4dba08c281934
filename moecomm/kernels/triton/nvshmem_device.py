"""Device functions of NVSHMEM, for Triton kernels: put, put with a signal, signal, fence, quiet, refresh.

They work on the symmetric heap: an address in it is mine, and the same place at another rank is meant together with
that rank's PE, its number in NVSHMEM. All are called by all threads of a block, outside of conditions on which threads
differ. What the protocol may rely on, which is less than some networks give:

- A put is under way when the call returns. Its source must not change, and nothing may be said of its bytes, before a
  quiet. Puts arrive in pieces, in any order.
- The signal of a put-with-signal comes behind the bytes of this put, not behind those of earlier ones.
- A fence orders all that this program, and the same program of kernels before this one, has put or signalled to a PE
  before what it puts or signals there afterwards.
- A quiet returns when all of that has arrived.
- Behind an acquire of a counter to which a network has added, `refresh` makes visible what the network wrote before.

The functions' names are those of NVSHMEM 3.4 and later. They are reached through `nvshmem_device.ll`, see there, and
NVSHMEM's bitcode; both are linked when a kernel is compiled. Triton 3.6 has read the bitcode of NVSHMEM 3.4 to 3.7;
that of 3.8 needs Triton 3.7. Where Triton interprets, something must stand in for the network: see `interpret_with`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from moecomm.kernels.triton.runtime import NUM_WARPS, is_interpreted, launch
from moecomm.kernels.wire import DeviceLibrary

__all__ = [
    "MOST_REGISTERS",
    "Network",
    "fence",
    "interpret_with",
    "launch_linked",
    "linked_with",
    "put",
    "put_signal",
    "quiet",
    "refresh",
    "signal",
]

MOST_REGISTERS = 128
"""Of a thread, in every kernel that calls NVSHMEM: without a limit `ptxas` spills some to make room for more blocks."""

_BINDINGS = Path(__file__).with_suffix(".ll")
_INT64, _INT32 = tl.int64, tl.int32


class Network(Protocol):
    """What stands in for NVSHMEM where kernels are interpreted; addresses are mine, `pe` says at whom."""

    def put(self, target: int, source: int, nbytes: int, pe: int) -> None: ...

    def put_signal(self, target: int, source: int, nbytes: int, counter: int, n: int, pe: int) -> None: ...

    def signal(self, counter: int, n: int, pe: int) -> None: ...

    def fence(self) -> None: ...

    def quiet(self) -> None: ...

    def refresh(self, counter: int) -> None: ...


_network: Network | None = None


def interpret_with(network: Network | None) -> None:
    """Says what interpreted kernels of this process call; None = nothing, then they raise `RuntimeError`."""
    global _network
    _network = network


def _interpreted(name: str, *arguments: Any) -> None:
    if _network is None:
        raise RuntimeError(f"an interpreted kernel calls {name} of NVSHMEM, for which nothing stands in here")
    numbers = [int(one.handle.data.item()) if isinstance(one, tl.tensor) else int(one) for one in arguments]
    getattr(_network, name)(*numbers)


def _call(name: str, arguments: list[Any], types: tuple[Any, ...], semantic: Any) -> Any:
    if semantic is None:
        return _interpreted(name, *arguments)
    wanted = [
        semantic.cast(semantic.to_tensor(one), kind)  # a number that is known when compiling has no type of its own
        for one, kind in zip(arguments, types, strict=True)
    ]
    symbol = (f"moecomm_nvshmem_{name}", _INT32)
    return tl.core.extern_elementwise("", "", wanted, {types: symbol}, is_pure=False, _semantic=semantic)


def _put(target: Any, source: Any, nbytes: Any, pe: Any, _semantic: Any = None) -> Any:
    return _call("put", [target, source, nbytes, pe], (_INT64, _INT64, _INT64, _INT32), _semantic)


def _put_signal(target: Any, source: Any, nbytes: Any, counter: Any, n: Any, pe: Any, _semantic: Any = None) -> Any:
    types = (_INT64, _INT64, _INT64, _INT64, _INT64, _INT32)
    return _call("put_signal", [target, source, nbytes, counter, n, pe], types, _semantic)


def _signal(counter: Any, n: Any, pe: Any, _semantic: Any = None) -> Any:
    return _call("signal", [counter, n, pe], (_INT64, _INT64, _INT32), _semantic)


def _fence(_semantic: Any = None) -> Any:
    return _call("fence", [], (), _semantic)


def _quiet(_semantic: Any = None) -> Any:
    return _call("quiet", [], (), _semantic)


def _refresh(counter: Any, _semantic: Any = None) -> Any:
    return _call("refresh", [counter], (_INT64,), _semantic)


for _function in (_put, _put_signal, _signal, _fence, _quiet, _refresh):
    setattr(_function, tl.core.TRITON_BUILTIN, True)


@triton.jit
def put(target: tl.int64, source: tl.int64, nbytes: tl.int64, pe: tl.int32) -> None:
    """Begins to copy `nbytes` from my memory, stored to by earlier kernels or before, to the same place as target."""
    tl.debug_barrier()
    _put(target, source, nbytes, pe)


@triton.jit
def put_signal(
    target: tl.int64, source: tl.int64, nbytes: tl.int64, counter: tl.int64, n: tl.int64, pe: tl.int32
) -> None:
    """As `put` of at least one byte; behind these bytes n is added to the counter at that PE."""
    tl.debug_barrier()
    _put_signal(target, source, nbytes, counter, n, pe)


@triton.jit
def signal(counter: tl.int64, n: tl.int64, pe: tl.int32) -> None:
    """Adds n to the counter at that PE, in no order to puts."""
    tl.debug_barrier()
    _signal(counter, n, pe)


@triton.jit
def fence() -> None:
    """Orders what this program has put and signalled to a PE before what it will."""
    tl.debug_barrier()
    _fence()
    tl.debug_barrier()


@triton.jit
def quiet() -> None:
    """Waits until all that this program has put and signalled has arrived."""
    tl.debug_barrier()
    _quiet()
    tl.debug_barrier()


@triton.jit
def refresh(counter: tl.int64) -> None:
    """Makes visible, to loads behind it, what had arrived when this counter of mine was acquired."""
    tl.debug_barrier()
    _refresh(counter)
    tl.debug_barrier()


def linked_with(bitcode: Path) -> dict[str, str]:
    """What Triton links with a kernel that calls NVSHMEM, by name, in this order."""
    return {"moecomm_nvshmem": str(_BINDINGS), "libnvshmem_device": str(bitcode)}


_ready: set[tuple[Any, ...]] = set()
_ready_lock = threading.Lock()


def launch_linked(
    kernel: Any, num_programs: int, device: torch.device, library: DeviceLibrary | None, *args: Any, **constexprs: Any
) -> None:
    """As `runtime.launch`, for kernels that call NVSHMEM, whose numbers must not be specialised.

    Arguments:
        library: what they are linked with; None only where Triton interprets.

    Raises:
        ValueError: there is no library.
    """
    if is_interpreted():
        launch(kernel, num_programs, device, *args, **constexprs)
        return
    if library is None:
        raise ValueError(f"library is None; {kernel.__name__} must be linked with NVSHMEM")
    options = {
        "num_warps": NUM_WARPS,
        "maxnreg": MOST_REGISTERS,
        "enable_fp_fusion": False,
        "extern_libs": linked_with(library.bitcode),
        **constexprs,
    }
    form = (kernel, device, library, *sorted(constexprs.items()))
    with _ready_lock:
        if form not in _ready:
            # Each module has its own copy of NVSHMEM's state, which must be filled in before anything runs.
            with torch.cuda.device(device):
                made = kernel.warmup(*args, grid=(1,), **options)
                made._init_handles()
                library.initialise(int(made.module))
            _ready.add(form)
    launch(kernel, num_programs, device, *args, **options)

"""What the host side of every Triton kernel needs: the device, tables of addresses, alignment, the launch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy
import torch
import triton
from torch import Tensor

from moecomm.kernels.base import rank_of

__all__ = [
    "NUM_WARPS",
    "Addresses",
    "alignment_of",
    "check_device",
    "is_interpreted",
    "launch",
    "num_blocks",
    "table_of",
]

NUM_WARPS = 4

_WIDEST = 16  # bytes that one thread can load or store at once

Addresses: TypeAlias = Sequence[int] | Tensor
"""By rank; 0 = none. A tensor is `[R]` int64 on the device of the kernel, and its addresses are multiples of 16."""


def is_interpreted() -> bool:
    """Whether kernels run on the CPU: TRITON_INTERPRET=1 was set before Triton was imported."""
    return bool(triton.knobs.runtime.interpret)


def check_device(name: str, tensor: Tensor) -> torch.device:
    """Refuses a tensor on a device whose memory the kernels do not reach; gives the device.

    Raises:
        ValueError: on the CPU without the interpreter, or on the GPU with it.
    """
    if is_interpreted() and not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}; with TRITON_INTERPRET=1 Triton kernels take CPU tensors")
    if not is_interpreted() and not tensor.is_cuda:
        raise ValueError(
            f"{name} is on {tensor.device}; Triton kernels take CUDA tensors, or CPU tensors if TRITON_INTERPRET=1 is "
            "set before Triton is imported"
        )
    return tensor.device


def alignment_of(*numbers: int) -> int:
    """The largest power of two up to 16 that divides them all."""
    return math.gcd(_WIDEST, *numbers)


def table_of(addresses: Addresses, routes: Tensor, row_bytes: int) -> tuple[Tensor, int]:
    """The addresses where kernels can read them, and a power of two up to 16 that divides them.

    Arguments:
        addresses: of row 0 at each rank.
        routes: `[T, P]` int64 that name these ranks.
        row_bytes: of a row; rows without bytes may have no address.

    Raises:
        ValueError: a route names a rank without an address. On a GPU this is not looked for: it would mean to wait.
    """
    if isinstance(addresses, Tensor):
        if addresses.dtype is not torch.int64 or addresses.dim() != 1 or addresses.device != routes.device:
            raise ValueError(
                f"addresses is {addresses.dtype} {list(addresses.shape)} on {addresses.device}; "
                f"wanted torch.int64 [R] on {routes.device}"
            )
        table, known = addresses.contiguous(), _WIDEST
        if table.is_cpu:
            known = alignment_of(*table.tolist())
    else:
        known = alignment_of(*addresses)
        table = _upload(addresses, routes.device)
    if routes.is_cpu and row_bytes:
        _check_ranks(table, routes)
    return table, known


def _upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """`[n]` int64 on the device; the host does not wait, as it would for memory that is not pinned."""
    table = torch.tensor(numbers, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _check_ranks(table: Tensor, routes: Tensor) -> None:
    known = table.tolist()
    for rank in {rank_of(route) for route in routes.flatten().tolist() if route >= 0}:
        if rank >= len(known) or known[rank] == 0:
            raise ValueError(f"routes names rank {rank}, but addresses (of {len(known)} ranks) has none for it")


def num_blocks(count: int, size: int) -> int:
    """Blocks of this size that hold so many."""
    return -(-count // size)


def launch(kernel: Any, num_programs: int, device: torch.device, *args: Any, **constexprs: Any) -> None:
    """Runs a kernel on the current stream of a device; products and sums stay apart, so each is rounded."""
    if num_programs == 0:
        return
    place = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with place, numpy.errstate(all="ignore"):
        kernel[(num_programs,)](*args, **{"num_warps": NUM_WARPS, "enable_fp_fusion": False, **constexprs})

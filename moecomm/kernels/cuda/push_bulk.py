"""Row push through the bulk copy engine of Hopper and later devices (csrc/cuda/push_bulk.cu).

T num_tokens   P num_slots   H hidden   R num_ranks
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecomm.kernels.cuda.loader import load_kernel

__all__ = [
    "BulkLaunch",
    "choose_launch",
    "kernel_arguments",
    "launch_bulk_push",
    "load_bulk_push",
    "push_rows_in_bulk",
]

# As in csrc/cuda/push_bulk.cu.
_NUM_STAGES = 4
_HEADER_BYTES = 128
_THREADS = 32

_MOST_PIECE_BYTES = 16384  # four stages of it, three blocks: what a multiprocessor of these devices has
_BLOCKS_PER_MULTIPROCESSOR = 3
_MIN_CAPABILITY = 90


class BulkLaunch(NamedTuple):
    """How the kernel is launched.

    Attributes:
        num_blocks: of one warp each; they share the tokens.
        piece_bytes: rows are cut into pieces of this many bytes, a multiple of 16.
        shared_bytes: shared memory of a block.
    """

    num_blocks: int
    piece_bytes: int
    shared_bytes: int


def choose_launch(num_tokens: int, row_bytes: int, num_multiprocessors: int) -> BulkLaunch:
    """Equal pieces, as large as fit; every multiprocessor as full as its shared memory allows."""
    num_pieces = max(1, -(-row_bytes // _MOST_PIECE_BYTES))
    piece_bytes = max(16, -(-row_bytes // (16 * num_pieces)) * 16)
    num_blocks = min(num_tokens, _BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors)
    return BulkLaunch(num_blocks, piece_bytes, _HEADER_BYTES + _NUM_STAGES * piece_bytes)


def kernel_arguments(
    rows: Tensor, routes: Tensor, table: Tensor, piece_bytes: int, status: Tensor | None = None
) -> tuple[int, ...]:
    """What the kernel takes, in its order; every one is a 64-bit integer or a pointer."""
    num_bytes = rows.element_size()
    of_rows = (rows.data_ptr(), rows.stride(0) * num_bytes, rows.shape[0], rows.shape[1] * num_bytes)
    failed = 0 if status is None else status.data_ptr()
    return (*of_rows, routes.data_ptr(), routes.shape[1], table.data_ptr(), piece_bytes, failed)


def push_rows_in_bulk(
    rows: Tensor, routes: Tensor, addresses: Sequence[int] | Tensor, *, status: Tensor | None = None
) -> None:
    """As `push_rows` in `moecomm.kernels.base`, without weights; on the current stream, which later work waits for.

    Rows whose bytes, stride or addresses are not multiples of 16 are copied without the engine.

    Arguments:
        rows: `[T, H]` any dtype, on a CUDA device, last dim contiguous, any row stride.
        routes: `[T, P]` int64 contiguous, on the same device.
        addresses: of row 0 at each rank: `[R]` int64 on the same device, or numbers, which are copied there.
        status: int64 on the same device, or None: nothing is written if its first word is not 0, as after a wait that
            has failed; see `moecomm.kernels.triton.signals.make_status`.

    Raises:
        ValueError, TypeError: an argument is not like this; names it.
        TransportUnavailable: CuPy or a device with compute capability 9.0 is missing.
    """
    table = _check(rows, routes, addresses)
    if status is not None and (status.dtype is not torch.int64 or status.device != rows.device):
        raise ValueError(f"status is {status.dtype} on {status.device}; wanted torch.int64 on {rows.device}")
    launch_bulk_push(rows, routes, table, status=status)


def load_bulk_push(device: torch.device) -> Any:
    """The kernel, compiled if it was not before.

    Raises:
        TransportUnavailable: CuPy or a device with compute capability 9.0 is missing.
        RuntimeError: the source does not compile.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return load_kernel("push_bulk", index, min_capability=_MIN_CAPABILITY)


def launch_bulk_push(rows: Tensor, routes: Tensor, table: Tensor, *, status: Tensor | None = None) -> None:
    """As `push_rows_in_bulk`; arguments are checked, `table` is `[R]` int64 on the device."""
    num_tokens, row_bytes = rows.shape[0], rows.shape[1] * rows.element_size()
    if num_tokens == 0 or row_bytes == 0 or routes.shape[1] == 0:
        return
    kernel, num_multiprocessors = _ready(rows.device)
    chosen = choose_launch(num_tokens, row_bytes, num_multiprocessors)
    _launch(kernel, rows.device, chosen, kernel_arguments(rows, routes, table, chosen.piece_bytes, status))


@functools.cache
def _ready(device: torch.device) -> tuple[Any, int]:
    """The kernel, and the multiprocessors of the device: asking for its properties takes longer than a launch."""
    return load_bulk_push(device), torch.cuda.get_device_properties(device).multi_processor_count


def _check(rows: Tensor, routes: Tensor, addresses: Sequence[int] | Tensor) -> Tensor:
    if not rows.is_cuda:
        raise ValueError(f"rows is on {rows.device}; wanted a CUDA device")
    if rows.dim() != 2 or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise ValueError(
            f"rows is {list(rows.shape)} with strides {list(rows.stride())}; wanted [T, H], rows contiguous"
        )
    if routes.dtype is not torch.int64:
        raise TypeError(f"routes is {routes.dtype}; wanted torch.int64")
    if routes.dim() != 2 or routes.shape[0] != rows.shape[0] or not routes.is_contiguous():
        raise ValueError(
            f"routes is {list(routes.shape)} with strides {list(routes.stride())}; wanted contiguous "
            f"[{rows.shape[0]}, P], as rows is {list(rows.shape)}"
        )
    if routes.device != rows.device:
        raise ValueError(f"routes is on {routes.device}, rows on {rows.device}; wanted the same device")
    if not isinstance(addresses, Tensor):
        return torch.tensor(addresses, dtype=torch.int64, device=rows.device)
    if addresses.dtype is not torch.int64 or addresses.dim() != 1 or addresses.device != rows.device:
        raise ValueError(
            f"addresses is {addresses.dtype} {list(addresses.shape)} on {addresses.device}; "
            f"wanted torch.int64 [R] on {rows.device}"
        )
    return addresses.contiguous()


def _launch(kernel: Any, device: torch.device, chosen: BulkLaunch, arguments: tuple[int, ...]) -> None:
    import cupy
    import numpy

    stream = torch.cuda.current_stream(device)
    with cupy.cuda.Device(device.index), cupy.cuda.Stream.from_external(stream):
        kernel.max_dynamic_shared_size_bytes = chosen.shared_bytes
        kernel(
            (chosen.num_blocks,),
            (_THREADS,),
            tuple(numpy.int64(argument) for argument in arguments),
            shared_mem=chosen.shared_bytes,
        )

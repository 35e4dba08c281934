"""Tensors of memory: of host buffers as they are, of blocks on a device through what knows how."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["Placed", "tensor_of"]


@final
class Placed:
    """A block on a device, of which tensors can be made.

    Arguments:
        view: gives a tensor of this dtype, byte offset and shape.
    """

    __slots__ = ("view",)

    def __init__(self, view: Callable[[torch.dtype, int, Sequence[int]], Tensor]) -> None:
        self.view = view


def tensor_of(memory: Any, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> Tensor:
    """A tensor of memory, which it keeps alive.

    Arguments:
        memory: `Placed`, or anything with the buffer protocol.
        dtype, offset, shape: of the tensor; the offset is in bytes.
    """
    if isinstance(memory, Placed):
        return memory.view(dtype, offset, shape)
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).resize_(*shape)

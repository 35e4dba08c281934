"""Codec `none`: rows travel as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from moecomm.codecs.base import Codec, RowFormat
from moecomm.devices.views import Placed, tensor_of
from moecomm.kernels.base import RowKernels
from moecomm.kernels.registry import chosen_kernels

__all__ = ["NoCodec"]


class PlainRows(RowFormat):
    """One plane: the row itself."""

    is_plain = True

    def __init__(self, hidden: int, dtype: torch.dtype, kernels: RowKernels | None = None) -> None:
        super().__init__(hidden, dtype, NoCodec.code)
        self.plane_bytes = (hidden * dtype.itemsize,)
        self._kernels = kernels or chosen_kernels("cpu")

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x,)

    def decode(self, buffer: Any, offsets: Sequence[int], *shape: int) -> torch.Tensor:
        hidden = self.hidden
        count = math.prod(shape) * hidden
        if count == 0 or isinstance(buffer, Placed):
            return tensor_of(buffer, self.dtype, offsets[0], (*shape, hidden))
        return torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=offsets[0]).resize_(*shape, hidden)

    def reduce(
        self,
        num_tokens: int,
        routes: torch.Tensor,
        addresses: Sequence[Sequence[int]],
        weights: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(num_tokens, self.hidden, dtype=self.dtype)
        if self.hidden:  # memory of rows without numbers may have no address
            self._kernels.combine_rows(out, routes, addresses[0], weights=weights)
        return out


class NoCodec(Codec):
    """Rows travel as they are; every dtype, no error."""

    name = "none"
    code = 0
    error_bound = 0.0

    def __init__(self, kernels: RowKernels | None = None) -> None:
        self._kernels: Any = kernels or chosen_kernels("cpu")

    def row_format(self, hidden: int, dtype: torch.dtype) -> RowFormat:
        return _plain_rows(hidden, dtype, self._kernels)


@lru_cache(maxsize=64)
def _plain_rows(hidden: int, dtype: torch.dtype, kernels: Any) -> PlainRows:
    return PlainRows(hidden, dtype, kernels)

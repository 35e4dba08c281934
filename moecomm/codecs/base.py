"""The contract of a codec: numbers to row bytes and back. It knows no peers and no routing.

A row on the wire is a few planes (payload, scales, ...), each with a fixed number of bytes per row.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from moecomm.kernels.base import RowKernels

__all__ = ["Codec", "RowFormat", "dtype_code", "dtype_name"]

# The dtypes that rows may have. A dtype's index is what ranks compare before they exchange, so the order stays.
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.int16,
    torch.int32,
    torch.int64,
)


def dtype_code(dtype: torch.dtype) -> int:
    """The number of a dtype on the wire.

    Raises:
        TypeError: if rows cannot have this dtype.
    """
    try:
        return _DTYPES.index(dtype)
    except ValueError:
        raise TypeError(f"x: rows of dtype {dtype} cannot be sent; supported: {', '.join(map(str, _DTYPES))}") from None


def dtype_name(code: int) -> str:
    """The name of the dtype with this number."""
    return str(_DTYPES[code]).removeprefix("torch.") if 0 <= code < len(_DTYPES) else f"dtype code {code}"


class RowFormat(abc.ABC):
    """Rows of one hidden size and dtype, as a codec writes them.

    Arguments:
        hidden: H, numbers per row.
        dtype: of the rows before encoding and after decoding.
        codec_code: number of the codec.
    """

    plane_bytes: tuple[int, ...]
    """Bytes per row of each plane."""

    is_plain: ClassVar[bool] = False
    """Whether the one plane holds the row's own numbers, so that sums of rows can stand beside rows."""

    def __init__(self, hidden: int, dtype: torch.dtype, codec_code: int) -> None:
        self.hidden = hidden
        self.dtype = dtype
        self.words = (codec_code, dtype_code(dtype), hidden)
        """What ranks compare before they exchange: codec, dtype, hidden."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row over all planes."""
        return sum(self.plane_bytes)

    @abc.abstractmethod
    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Turns `[N, H]` rows into planes, each `[N, ...]` with `plane_bytes` contiguous bytes per row."""

    @abc.abstractmethod
    def decode(self, buffer: Any, offsets: Sequence[int], *shape: int) -> torch.Tensor:
        """Gives the `[*shape, H]` rows whose planes lie at `offsets` of `buffer` (which the result keeps alive).

        `buffer` is what `moecomm.devices.views.tensor_of` takes.
        """

    @abc.abstractmethod
    def reduce(
        self,
        num_tokens: int,
        routes: torch.Tensor,
        addresses: Sequence[Sequence[int]],
        weights: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sums each token's rows in ascending p.

        Arguments:
            num_tokens: T.
            routes: `[T, P]` int64, see kernels/base.py.
            addresses: per plane and rank the address of row 0.
            weights: `[T, P]` float32 or None.
            out: `[T, H]`, where to leave the sums; None: in a new tensor on the CPU.

        Returns:
            `[T, H]`; zero where a token has no route.
        """


class Codec(abc.ABC):
    """A number format of rows on the wire.

    Arguments:
        kernels: of the device on which rows are; None: of the CPU.
    """

    name: ClassVar[str]
    code: ClassVar[int]
    """Number that ranks compare before they exchange."""

    error_bound: ClassVar[float]
    """Largest relative error of a decoded number; 0.0 = exact."""

    @abc.abstractmethod
    def __init__(self, kernels: RowKernels | None = None) -> None: ...

    @abc.abstractmethod
    def row_format(self, hidden: int, dtype: torch.dtype) -> RowFormat:
        """The format of rows of this size and dtype.

        Raises:
            TypeError: if the codec cannot carry the dtype.
        """

"""The contract of a codec: rows become planes of bytes and come back within the error it states.

Checks take the codec. Dtypes that it refuses, with TypeError, are left out; it must carry float32 and bfloat16.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from moecomm.codecs.base import Codec, RowFormat
from moecomm.kernels.base import make_route, weights_dtype
from moecomm.testing.compare import assert_bitwise_equal, expect
from moecomm.testing.contracts.cases import random_rows

__all__ = ["CHECKS"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)
_WIDTHS = (1, 7, 128, 1000)
_ALIGNMENT = 64  # of planes in a buffer


def _formats(codec: Codec) -> list[RowFormat]:
    formats = []
    for dtype in _DTYPES:
        for hidden in _WIDTHS:
            try:
                formats.append(codec.row_format(hidden, dtype))
            except TypeError:
                expect(dtype not in (torch.float32, torch.bfloat16), f"{codec.name} refuses {dtype}")
    return formats


def check_planes_have_the_stated_size(codec: Codec) -> None:
    """encode gives one tensor per plane, a row per row, of the bytes that the format says."""
    for row_format in _formats(codec):
        for num_rows in (0, 1, 5):
            planes = row_format.encode(_rows(row_format, num_rows))
            expect(len(planes) == len(row_format.plane_bytes), f"{_name(row_format)}: {len(planes)} planes")
            for plane, nbytes in zip(planes, row_format.plane_bytes, strict=True):
                expect(plane.shape[0] == num_rows, f"{_name(row_format)}: {plane.shape[0]} rows of {num_rows}")
                size = plane[0].numel() * plane.element_size() if num_rows else nbytes
                expect(size == nbytes, f"{_name(row_format)}: a row of {size} bytes, not {nbytes}")
        expect(row_format.row_bytes == sum(row_format.plane_bytes), f"{_name(row_format)}: row_bytes")


def check_rows_come_back(codec: Codec) -> None:
    """decode of what encode wrote gives the rows, within the relative error that the codec states."""
    for row_format in _formats(codec):
        for num_rows in (0, 1, 5):
            x = _rows(row_format, num_rows)
            _expect_near(codec, row_format, _through_memory(row_format, x), x)


def check_zero_rows_come_back_as_zero(codec: Codec) -> None:
    """Memory of zero bytes is a zero row: that is what padding is."""
    for row_format in _formats(codec):
        buffer, offsets = _memory(row_format, 3)
        got = row_format.decode(buffer, offsets, 3)
        assert_bitwise_equal(
            got.clone(), torch.zeros(3, row_format.hidden).to(row_format.dtype), f"{_name(row_format)}: zero bytes"
        )


def check_words_tell_formats_apart(codec: Codec) -> None:
    """What ranks compare before an exchange differs whenever the bytes would mean something else."""
    formats = _formats(codec)
    expect(len({row_format.words for row_format in formats}) == len(formats), "two formats share their words")


def check_reduce_sums_rows_by_their_routes(codec: Codec) -> None:
    """reduce adds each token's decoded rows in ascending p from zero, with and without weights, and rounds once."""
    for row_format in _formats(codec):
        if row_format.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            continue
        memories = [_encoded(row_format, _rows(row_format, 4, f"host {host}")) for host in range(2)]
        rows = [row_format.decode(buffer, offsets, 4).clone() for buffer, offsets in memories]
        places: list[list[tuple[int, int] | None]] = [
            [(0, 3), (1, 0), (1, 1)],
            [None, (0, 0), None],
            [None, None, None],
            [(1, 2), (1, 2), (0, 1)],
        ]
        routes = torch.tensor([[-1 if place is None else make_route(*place) for place in row] for row in places])
        addresses = [
            [torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() + offsets[plane] for buffer, offsets in memories]
            for plane in range(len(row_format.plane_bytes))
        ]
        factors = torch.tensor([[0.3, 1.7, -2.1], [9.0, 0.7, 9.0], [9.0] * 3, [1.1, 0.9, 0.2]])
        for weights in (None, factors.to(weights_dtype(row_format.dtype))):
            got = row_format.reduce(4, routes, addresses, weights)
            assert_bitwise_equal(got, _sums(rows, places, weights), f"{_name(row_format)}: reduce")


def _sums(rows: list[Tensor], places: list[list[tuple[int, int] | None]], weights: Tensor | None) -> Tensor:
    exact = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
    total = torch.zeros(len(places), rows[0].shape[1], dtype=exact)
    for token, row in enumerate(places):
        for p, place in enumerate(row):
            if place is not None:
                addend = rows[place[0]][place[1]].to(exact)
                total[token] += addend if weights is None else weights[token, p].to(exact) * addend
    return total.to(rows[0].dtype)


def _rows(row_format: RowFormat, num_rows: int, name: str = "rows") -> Tensor:
    return random_rows((num_rows, row_format.hidden), row_format.dtype, f"{name} {row_format.hidden}")


def _memory(row_format: RowFormat, num_rows: int) -> tuple[mmap.mmap, list[int]]:
    offsets, end = [], 0
    for nbytes in row_format.plane_bytes:
        offsets.append(end)
        end += -(-num_rows * nbytes // _ALIGNMENT) * _ALIGNMENT
    return mmap.mmap(-1, max(end, 1)), offsets


def _encoded(row_format: RowFormat, x: Tensor) -> tuple[mmap.mmap, list[int]]:
    buffer, offsets = _memory(row_format, x.shape[0])
    for plane, offset, nbytes in zip(row_format.encode(x), offsets, row_format.plane_bytes, strict=True):
        data = plane.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if plane.numel() else b""
        expect(len(data) == x.shape[0] * nbytes, f"{_name(row_format)}: a plane of {len(data)} bytes")
        buffer[offset : offset + len(data)] = data
    return buffer, offsets


def _through_memory(row_format: RowFormat, x: Tensor) -> Tensor:
    buffer, offsets = _encoded(row_format, x)
    return row_format.decode(buffer, offsets, x.shape[0])


def _expect_near(codec: Codec, row_format: RowFormat, got: Tensor, wanted: Tensor) -> None:
    if codec.error_bound == 0.0:
        assert_bitwise_equal(got, wanted, f"{_name(row_format)}: decoded rows")
        return
    expect(got.shape == wanted.shape and got.dtype == wanted.dtype, f"{_name(row_format)}: {got.shape} {got.dtype}")
    # Relative to the row's largest number: codecs share a scale between neighbours.
    scale = wanted.double().abs().amax(dim=1, keepdim=True) if wanted.numel() else wanted.double()
    error = (got.double() - wanted.double()).abs()
    expect(bool((error <= codec.error_bound * scale).all()), f"{_name(row_format)}: error {error.max():g}")


def _name(row_format: RowFormat) -> str:
    return f"{row_format.dtype} x {row_format.hidden}"


CHECKS: tuple[Callable[[Codec], None], ...] = (
    check_planes_have_the_stated_size,
    check_rows_come_back,
    check_zero_rows_come_back_as_zero,
    check_words_tell_formats_apart,
    check_reduce_sums_rows_by_their_routes,
)

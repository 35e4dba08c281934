"""How rows are cut into tiles: some tokens by some columns for each program, and how wide a column may be moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moecomm.kernels.triton.rounding import TRITON_DTYPES
from moecomm.kernels.triton.runtime import num_blocks

__all__ = [
    "Moves",
    "Tile",
    "extreme_moves",
    "extreme_numbers",
    "moves_constants",
    "moves_of",
    "numbers_of",
    "route_pointers",
    "row_pointers",
    "tile_of",
]

_MANY_TOKENS = 512
_MOST_COLUMNS = 4096  # a thread of 128 keeps its part in registers
_MOST_TOKENS = 512  # and so it does with the addresses of its rows
_INTEGERS: dict[int, Any] = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


class Moves(NamedTuple):
    """How rows pass through a kernel.

    Attributes:
        dtype: of a column, Triton's.
        alignment: bytes of a unit; every row begins and ends at a multiple of it.
        per_unit: columns of a unit.
        num_units: of a row.
    """

    dtype: Any
    alignment: int
    per_unit: int
    num_units: int

    @property
    def num_columns(self) -> int:
        return self.num_units * self.per_unit


def moves_of(row_bytes: int, alignment: int) -> Moves:
    """Bytes moved as the widest integers that fit. `alignment` must divide `row_bytes`."""
    width = min(alignment, 8)
    return Moves(_INTEGERS[width], alignment, alignment // width, row_bytes // alignment)


def numbers_of(name: str, dtype: torch.dtype, row_bytes: int, alignment: int) -> Moves:
    """Numbers of this dtype. `alignment` must divide `row_bytes`.

    Raises:
        ValueError: a number would not begin at a multiple of its size, which a GPU cannot load.
    """
    if alignment % dtype.itemsize:
        raise ValueError(f"{name} begins at a multiple of {alignment} bytes; {dtype} needs {dtype.itemsize}")
    return Moves(TRITON_DTYPES[dtype], alignment, alignment // dtype.itemsize, row_bytes // alignment)


def moves_constants(moves: Moves) -> dict[str, Any]:
    """DTYPE, ALIGNMENT and PER_UNIT of kernels that move rows."""
    return {"DTYPE": moves.dtype, "ALIGNMENT": moves.alignment, "PER_UNIT": moves.per_unit}


class Tile(NamedTuple):
    """Tokens and columns of one program, powers of two, and how many programs it takes."""

    tokens: int
    columns: int
    num_programs: int

    def with_fewer_tokens(self, num_tokens: int, moves: Moves, most: int) -> Tile:
        """The same for at most so many tokens of each program, a power of two."""
        tokens = min(self.tokens, most)
        return Tile(tokens, self.columns, num_blocks(num_tokens, tokens) * num_blocks(moves.num_columns, self.columns))


def tile_of(num_tokens: int, moves: Moves, *, is_weighted: bool = False) -> Tile:
    """Whole rows where they are short, pieces of one row where they are long.

    For many tokens a thread moves 8 times 16 bytes, or 4 times if it computes with them; for few tokens 2 times, so
    that there are programs for all processors. Half of that if weights take registers, too, and once 16 bytes in fp64.
    """
    tile_bytes = 4096 if num_tokens < _MANY_TOKENS else 16384 if moves.dtype.is_int() else 8192
    if is_weighted:
        tile_bytes = min(tile_bytes // 2, 2048 if moves.dtype == tl.float64 else tile_bytes)
    elements = min(_MOST_COLUMNS, tile_bytes * moves.per_unit // moves.alignment)
    columns = min(elements, triton.next_power_of_2(max(1, moves.num_columns)))
    tokens = min(elements // columns, _MOST_TOKENS, triton.next_power_of_2(max(1, num_tokens)))
    return Tile(tokens, columns, num_blocks(num_tokens, tokens) * num_blocks(moves.num_columns, columns))


def extreme_moves(tile: Callable[[Moves], Tile]) -> list[dict[str, Any]]:
    """Constants of kernels that move bytes: long rows and the shortest, at every alignment, in the tile of each."""
    rows = ((14336, 16), (16, 16), (14336, 8), (14336, 4), (14336, 2), (14331, 1), (1, 1))
    return [_constants(moves_of(*one), tile) for one in rows]


def extreme_numbers(dtype: torch.dtype, tile: Callable[[Moves], Tile]) -> list[dict[str, Any]]:
    """The same of kernels that compute with rows of this dtype: long rows, and rows of one number."""
    rows = ((14336, 16), (dtype.itemsize, dtype.itemsize))
    return [_constants(numbers_of("a row", dtype, *one), tile) for one in rows]


def _constants(moves: Moves, tile: Callable[[Moves], Tile]) -> dict[str, Any]:
    tokens, columns, _ = tile(moves)
    return {**moves_constants(moves), "TOKENS": tokens, "COLUMNS": columns}


@triton.jit
def row_pointers(address: tl.tensor, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr) -> tl.tensor:
    """`[n, 1]` pointers to column 0 of rows at these `[n]` addresses, known to be multiples of the alignment."""
    # The hint must have one dimension: tensors of one element become scalars before it is read.
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNMENT)[:, None]


@triton.jit
def route_pointers(
    route: tl.tensor, addresses: tl.tensor, row_bytes: tl.int64, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr
) -> tl.tensor:
    """`[n, 1]` pointers to column 0 of the rows that these `[n]` routes name; of no use where a route is -1."""
    base = tl.load(addresses + (route >> 40), mask=route >= 0, other=0)
    address = base + (route & 0xFFFFFFFFFF) * row_bytes
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNMENT)[:, None]

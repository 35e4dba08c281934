"""Zeros where a fixed block held rows before and holds none now, and between the rows of its experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.runtime import alignment_of, launch
from moecomm.kernels.triton.tiles import Moves, moves_of, row_pointers, tile_of

__all__ = ["Block", "compile_cases", "moves_constants", "zero_rows"]

_ROWS = 1024  # tiles are cut as for so many, and so many programs share what there is
_MOST_PROGRAMS = 256


class Block(NamedTuple):
    """Where rows go.

    Attributes:
        rows: address of `[E_local, capacity, H]` or `[num_rows, H]`.
        values: address of the weights, in the same order; 0 = none.
        row_bytes: of one.
        value_bytes: of a weight; 0 = none.
    """

    rows: int
    values: int
    row_bytes: int
    value_bytes: int


@triton.jit(
    do_not_specialize=["num_spans", "rows", "num_units", "values"],
    do_not_specialize_on_alignment=["status", "spans"],
)
def zero_rows_kernel(
    status: tl.tensor,
    spans: tl.tensor,
    num_spans: tl.int32,
    rows: tl.int64,
    num_units: tl.int32,
    values: tl.int64,
    VALUE_BYTES: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPANS: tl.constexpr,
) -> None:
    """Writes zeros to the rows and weights of `spans` `[2, num_spans]` int64, begins and ends."""
    num_columns = num_units * PER_UNIT
    row_bytes = tl.cast(num_units, tl.int64) * ALIGNMENT
    # Weights become zero where a row has no bytes, too.
    num_pieces = tl.maximum(tl.cdiv(num_columns, COLUMNS), 1)
    place = tl.arange(0, SPANS)
    begin = tl.load(spans + place, mask=place < num_spans, other=0)
    length = tl.maximum(tl.load(spans + num_spans + place, mask=place < num_spans, other=0) - begin, 0)
    ends = tl.cumsum(length, axis=0)
    num_rows = unless_failed(status, tl.sum(length, axis=0))
    num_tiles = tl.cdiv(num_rows, TOKENS) * num_pieces
    nothing = tl.zeros((TOKENS, COLUMNS), dtype=DTYPE)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        i = (tile // num_pieces) * TOKENS + tl.arange(0, TOKENS)
        c = ((tile % num_pieces) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        is_row = i < num_rows
        # Where the span of each row begins, less the rows of the spans before.
        is_span = (ends[None, :] > i[:, None]) & ((ends - length)[None, :] <= i[:, None])
        row = i + tl.sum(tl.where(is_span, (begin - (ends - length))[None, :], 0), axis=1)
        to = tl.cast(rows, tl.int64) + row * row_bytes
        tl.store(row_pointers(to, DTYPE, ALIGNMENT) + c, nothing, mask=is_row[:, None] & (c < num_columns))
        if VALUE_BYTES > 0:
            BITS: tl.constexpr = tl.int32 if VALUE_BYTES == 4 else tl.int64
            target = tl.cast(values, tl.int64).to(tl.pointer_type(BITS)) + row
            tl.store(target, tl.zeros((TOKENS,), dtype=BITS), mask=i < tl.where(tile % num_pieces == 0, num_rows, 0))


def zero_rows(status: Tensor, spans: Tensor, block: Block) -> None:
    """Writes zeros to the rows and weights of `spans` `[2, n]` int64, begins and ends, unless a call has failed."""
    moves = moves_of(block.row_bytes, alignment_of(block.rows, block.row_bytes))
    tile = tile_of(_ROWS, moves)
    launch(
        zero_rows_kernel,
        min(_MOST_PROGRAMS, max(1, tile.num_programs)),
        spans.device,
        *(status, spans, spans.shape[1], block.rows, moves.num_units, block.values),
        VALUE_BYTES=block.value_bytes,
        **moves_constants(moves),
        TOKENS=min(tile.tokens, 32),
        COLUMNS=tile.columns,
        SPANS=triton.next_power_of_2(spans.shape[1]),
    )


def moves_constants(moves: Moves) -> dict[str, Any]:
    """DTYPE, ALIGNMENT and PER_UNIT of kernels that move rows."""
    return {"DTYPE": moves.dtype, "ALIGNMENT": moves.alignment, "PER_UNIT": moves.per_unit}


def compile_cases() -> list[CompileCase]:
    """Weights of both sizes and none; long and short rows, few experts and many."""
    types = {"status": "*i64", "spans": "*i64", "num_spans": "i32", "num_units": "i32"}
    cases = []
    for value_bytes, row_bytes, spans in ((4, 14336, 64), (8, 512, 256), (0, 14336, 64)):
        moves = moves_of(row_bytes, 16)
        tile = tile_of(_ROWS, moves)
        constants = {"VALUE_BYTES": value_bytes, **moves_constants(moves)}
        constants |= {"TOKENS": min(tile.tokens, 32), "COLUMNS": tile.columns, "SPANS": spans}
        types |= dict.fromkeys(constants, "constexpr")
        cases.append(
            CompileCase(
                name=f"zero_rows {tile.columns} columns, weights of {value_bytes} bytes, {spans} spans",
                kernel=zero_rows_kernel,
                signature={name: types.get(name, "i64") for name in zero_rows_kernel.arg_names},
                constexprs=constants,
            )
        )
    return cases

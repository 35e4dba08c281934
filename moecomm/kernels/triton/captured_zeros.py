"""What a fixed block holds where no row goes that held one before, and between the rows of its experts.

Rows and weights are zero there, local ids -1.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.compile_case import CompileCase, varied
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.runtime import alignment_of, launch
from moecomm.kernels.triton.tiles import Moves, Tile, extreme_moves, moves_constants, moves_of, row_pointers, tile_of

__all__ = ["Block", "compile_cases", "zero_rows"]

_ROWS = 1024  # tiles are cut as for so many, and the programs for at most so many share what there is
_MOST_TOKENS = 32
_MOST_COMPARED = 8192  # rows with spans, in the registers of a program
_MOST_PROGRAMS = 256


class Block(NamedTuple):
    """Where rows go.

    Attributes:
        rows: address of `[E_local, capacity, H]` or `[num_rows, H]`.
        values: address of the weights, in the same order; 0 = none.
        row_bytes: of one.
        value_bytes: of a weight; 0 = none.
        num_rows: of the block.
        ids: flat: address of local ids `[num_rows, K]` int32; weights are `[num_rows, K]` then.
        num_topk: flat: K; 0 = the layout is another.
    """

    rows: int
    values: int
    row_bytes: int
    value_bytes: int
    num_rows: int
    ids: int = 0
    num_topk: int = 0


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
    FILL: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPANS: tl.constexpr,
) -> None:
    """Writes FILL, 0 or -1, to the rows of `spans` `[2, num_spans]` int64, begins and ends, and 0 to their weights."""
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
    nothing = tl.full((TOKENS, COLUMNS), FILL, dtype=DTYPE)
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
    """Blanks the rows of `spans` `[2, n]` int64, begins and ends, with weights and ids, unless a call has failed."""
    _, values, row_bytes, value_bytes, num_rows, ids, num_topk = block
    if num_topk == 0:
        _fill_rows(status, spans, block, 0)
        return
    _fill_rows(status, spans, Block(block.rows, 0, row_bytes, 0, num_rows), 0)
    if value_bytes:
        _fill_rows(status, spans, Block(values, 0, value_bytes * num_topk, 0, num_rows), 0)
    _fill_rows(status, spans, Block(ids, 0, 4 * num_topk, 0, num_rows), -1)


def _fill_rows(status: Tensor, spans: Tensor, block: Block, fill: int) -> None:
    """Writes `fill` to rows, and 0 to weights, of which each row has one."""
    moves = moves_of(block.row_bytes, alignment_of(block.rows, block.row_bytes))
    num_spans = spans.shape[1]
    tile = _tile_of(moves, num_spans, block.num_rows)
    launch(
        zero_rows_kernel,
        min(_MOST_PROGRAMS, max(1, tile.num_programs)),
        spans.device,
        *(status, spans, num_spans, block.rows, moves.num_units, block.values),
        FILL=fill,
        VALUE_BYTES=block.value_bytes,
        **moves_constants(moves),
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
        SPANS=triton.next_power_of_2(num_spans),
    )


def _tile_of(moves: Moves, num_spans: int, num_rows: int = _ROWS) -> Tile:
    """Of few rows, for each is compared with all spans; the same tile however many rows there are."""
    most = min(_MOST_TOKENS, max(1, _MOST_COMPARED // int(triton.next_power_of_2(num_spans))))
    return tile_of(_ROWS, moves).with_fewer_tokens(min(num_rows, _ROWS), moves, most)


def compile_cases() -> list[CompileCase]:
    """Weights of both sizes and none; long and short rows, few experts and many; ids."""
    types = {"status": "*i64", "spans": "*i64", "num_spans": "i32", "num_units": "i32"}
    cases = []
    for fill, value_bytes, row_bytes, spans in (
        (0, 4, 14336, 64),
        (0, 8, 512, 256),
        (0, 0, 14336, 64),
        (-1, 0, 32, 2),
    ):
        moves = moves_of(row_bytes, 16)
        tile = _tile_of(moves, spans)
        constants = {"FILL": fill, "VALUE_BYTES": value_bytes, **moves_constants(moves)}
        constants |= {"TOKENS": tile.tokens, "COLUMNS": tile.columns, "SPANS": spans}
        types |= dict.fromkeys(constants, "constexpr")
        cases.append(
            CompileCase(
                name=f"zero_rows {tile.columns} columns{' of -1' if fill else ''}, weights of {value_bytes} bytes, "
                f"{spans} spans",
                kernel=zero_rows_kernel,
                signature={name: types.get(name, "i64") for name in zero_rows_kernel.arg_names},
                constexprs=constants,
            )
        )
    cases += varied(cases[0], extreme_moves(lambda moves: _tile_of(moves, 64)))
    of_short_rows = moves_of(512, 16)
    return cases + varied(
        cases[1], ({"SPANS": spans, "TOKENS": _tile_of(of_short_rows, spans).tokens} for spans in (2, 512))
    )

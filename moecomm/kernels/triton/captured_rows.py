"""Rows of the messages of a captured call into a fixed block: routes, weights and rows.

T tokens of a source   Tmax most of them   K num_topk   E num_experts   R num_ranks   B blocks of each source
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.captured_messages import (
    HEADER_BYTES,
    Found,
    MessageLayout,
    Windows,
    block_tile,
    segment_of,
    window_of,
)
from moecomm.kernels.triton.captured_state import Control
from moecomm.kernels.triton.captured_zeros import Block, moves_constants
from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.runtime import alignment_of, launch
from moecomm.kernels.triton.tiles import moves_of, row_pointers, tile_of

__all__ = ["compile_cases", "place_rows", "route_messages"]

_HEADER = tl.constexpr(HEADER_BYTES)
_MOST_PROGRAMS = 1024  # a few for each processor: how many rows come is not known at the launch


@triton.jit(
    do_not_specialize=[
        *("windows", "message_bytes", "num_windows", "values_offset", "num_ranks", "num_blocks", "max_tokens"),
        *("num_topk", "num_experts", "rank", "values"),
    ],
    do_not_specialize_on_alignment=["ticket", "status", "tokens"],
)
def route_messages_kernel(
    windows: tl.int64,
    message_bytes: tl.int64,
    num_windows: tl.int64,
    values_offset: tl.int64,
    ticket: tl.tensor,
    status: tl.tensor,
    tokens: tl.tensor,
    before: tl.tensor,
    num_ranks: tl.int32,
    num_blocks: tl.int32,
    max_tokens: tl.int32,
    num_topk: tl.int32,
    expert_rank: tl.tensor,
    num_experts: tl.int32,
    starts: tl.tensor,
    routes: tl.tensor,
    rank: tl.int32,
    values: tl.int64,
    VALUE_BYTES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
) -> None:
    """Routes of a block of tokens of one source, and their weights to their places here.

    Arguments:
        before: `[R * B, E + R]` int32: how many routes to each expert are in all blocks before.
        routes: `[R, Tmax, K]` int64.
        values: address of weights of VALUE_BYTES; 0 bytes = none.
    """
    row = tl.program_id(0)
    source = row // num_blocks
    first = (row % num_blocks) * TOKENS
    num_tokens = unless_failed(status, tl.load(tokens + source).to(tl.int32))
    if first < num_tokens:
        window = window_of(windows, message_bytes, num_windows, num_ranks, tl.load(ticket))
        message = window + source.to(tl.int64) * message_bytes
        ids = (message + _HEADER).to(tl.pointer_type(tl.int32))
        flat = tl.arange(0, TOKENS * CHOICES)
        is_id = (flat % CHOICES < num_topk) & (first + flat // CHOICES < num_tokens)
        position = (first + flat // CHOICES) * num_topk + flat % CHOICES
        id = tl.load(ids + position, mask=is_id, other=-1)
        # The same ids once more, along the other dimension, to compare each with those before it.
        other = tl.arange(0, TOKENS * CHOICES)
        is_other = (other % CHOICES < num_topk) & (first + other // CHOICES < num_tokens)
        place = (first + other // CHOICES) * num_topk + other % CHOICES
        earlier = tl.load(ids + place, mask=is_other, other=-1)
        is_earlier = (earlier[None, :] == id[:, None]) & (other[None, :] < flat[:, None])
        is_route = is_id & (id >= 0)
        to = tl.load(starts + id, mask=is_route, other=0)
        to += tl.load(before + row.to(tl.int64) * (num_experts + num_ranks) + id, mask=is_route, other=0)
        to += tl.sum(is_earlier.to(tl.int32), axis=1)
        peer = tl.load(expert_rank + id, mask=is_route, other=-1)
        target = routes + source.to(tl.int64) * max_tokens * num_topk + position
        tl.store(target, tl.where(is_route, (peer.to(tl.int64) << 40) + to, -1), mask=is_id)
        if VALUE_BYTES > 0:
            BITS: tl.constexpr = tl.int32 if VALUE_BYTES == 4 else tl.int64
            is_here = is_route & (peer == rank)
            value = tl.load((message + values_offset).to(tl.pointer_type(BITS)) + position, mask=is_here)
            tl.store(tl.cast(values, tl.int64).to(tl.pointer_type(BITS)) + to, value, mask=is_here)


@triton.jit(
    do_not_specialize=[
        *("windows", "message_bytes", "num_windows", "rows_offset", "num_ranks", "max_tokens", "num_topk", "rank"),
        *("rows", "num_units"),
    ],
    do_not_specialize_on_alignment=["ticket", "status", "tokens"],
)
def place_rows_kernel(
    windows: tl.int64,
    message_bytes: tl.int64,
    num_windows: tl.int64,
    rows_offset: tl.int64,
    ticket: tl.tensor,
    status: tl.tensor,
    tokens: tl.tensor,
    num_ranks: tl.int32,
    max_tokens: tl.int32,
    routes: tl.tensor,
    num_topk: tl.int32,
    rank: tl.int32,
    rows: tl.int64,
    num_units: tl.int32,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Copies tiles of rows, each to all its places here; tokens of all sources are numbered one after the other."""
    num_columns = num_units * PER_UNIT
    row_bytes = tl.cast(num_units, tl.int64) * ALIGNMENT
    num_pieces = tl.cdiv(num_columns, COLUMNS)
    sources = tl.arange(0, RANKS)
    number = tl.load(tokens + sources, mask=sources < num_ranks, other=0)
    ends = tl.cumsum(number, axis=0)
    num_tokens = unless_failed(status, tl.sum(number, axis=0).to(tl.int32))
    window = window_of(windows, message_bytes, num_windows, num_ranks, tl.load(ticket))
    num_tiles = tl.cdiv(num_tokens, TOKENS) * num_pieces
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        i = (tile // num_pieces).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        c = ((tile % num_pieces) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        is_token = i < num_tokens
        is_column = c < num_columns
        source = segment_of(i, ends).to(tl.int64)
        t = i - tl.max(tl.where(ends[None, :] <= i[:, None], ends[None, :], 0), axis=1)
        entry = routes + (source * max_tokens + t) * num_topk
        address = window + source * message_bytes + rows_offset + t * row_bytes
        is_here = tl.zeros((TOKENS,), dtype=tl.int32)
        for k in range(num_topk):
            route = tl.load(entry + k, mask=is_token, other=-1)
            is_here += ((route >= 0) & (route >> 40 == rank)).to(tl.int32)
        is_read = is_token & (is_here > 0)
        piece = tl.load(row_pointers(address, DTYPE, ALIGNMENT) + c, mask=is_read[:, None] & is_column)
        for k in range(num_topk):
            route = tl.load(entry + k, mask=is_token, other=-1)
            is_route = (route >= 0) & (route >> 40 == rank)
            to = tl.cast(rows, tl.int64) + (route & 0xFFFFFFFFFF) * row_bytes
            tl.store(row_pointers(to, DTYPE, ALIGNMENT) + c, piece, mask=is_route[:, None] & is_column)


def route_messages(
    control: Control,
    ticket: Tensor,
    windows: Windows,
    layout: MessageLayout,
    found: Found,
    expert_rank: Tensor,
    starts: Tensor,
    routes: Tensor,
    block: Block,
) -> None:
    """Routes of all sources, `[R, Tmax, K]` int64, and the weights to the block; `found` and `starts` as planned."""
    tile = block_tile(windows.max_tokens, windows.num_topk)
    launch(
        route_messages_kernel,
        control.num_ranks * tile.num_blocks,
        routes.device,
        *(windows.address, windows.message_bytes, control.num_windows, layout.values, ticket, control.status),
        *(found.tokens, found.counts, control.num_ranks, tile.num_blocks, windows.max_tokens, windows.num_topk),
        *(expert_rank, expert_rank.numel(), starts, routes, control.rank, block.values),
        VALUE_BYTES=block.value_bytes,
        TOKENS=tile.tokens,
        CHOICES=tile.choices,
    )


def place_rows(
    control: Control,
    ticket: Tensor,
    windows: Windows,
    layout: MessageLayout,
    tokens: Tensor,
    routes: Tensor,
    block: Block,
) -> None:
    """Copies the rows of all messages to where `routes` say that they go here."""
    alignment = alignment_of(windows.address, windows.message_bytes, layout.rows, block.rows, block.row_bytes)
    moves = moves_of(block.row_bytes, alignment)
    tile = tile_of(control.num_ranks * windows.max_tokens, moves)
    launch(
        place_rows_kernel,
        min(_MOST_PROGRAMS, tile.num_programs),
        routes.device,
        *(windows.address, windows.message_bytes, control.num_windows, layout.rows, ticket, control.status, tokens),
        *(control.num_ranks, windows.max_tokens, routes, windows.num_topk, control.rank, block.rows, moves.num_units),
        DTYPE=moves.dtype,
        ALIGNMENT=moves.alignment,
        PER_UNIT=moves.per_unit,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
        RANKS=triton.next_power_of_2(control.num_ranks),
    )


def compile_cases() -> list[CompileCase]:
    """Weights of both sizes and none; long and short rows, some ranks and many."""
    wide = ("ticket", "status", "tokens", "starts", "routes")
    types = {**dict.fromkeys(wide, "*i64"), **dict.fromkeys(("before", "expert_rank"), "*i32")}
    types |= dict.fromkeys(("num_ranks", "num_blocks", "max_tokens", "num_topk", "num_experts", "rank"), "i32")
    types["num_units"] = "i32"
    blocks = block_tile(128, 8)
    cases = []
    for value_bytes in (0, 4, 8):
        constants = {"VALUE_BYTES": value_bytes, "TOKENS": blocks.tokens, "CHOICES": blocks.choices}
        cases.append(_case(f"weights of {value_bytes} bytes", route_messages_kernel, types, constants))
    for row_bytes, ranks in ((14336, 8), (512, 128)):
        moves = moves_of(row_bytes, 16)
        tile = tile_of(ranks * 128, moves)
        constants = {**moves_constants(moves), "TOKENS": tile.tokens, "COLUMNS": tile.columns, "RANKS": ranks}
        what = f"{tile.columns} columns, {ranks} ranks"
        cases.append(_case(what, place_rows_kernel, types, constants, moves_rows=True))
    return cases


def _case(
    what: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], *, moves_rows: bool = False
) -> CompileCase:
    types = {**types, **dict.fromkeys(constants, "constexpr")}
    return CompileCase(
        name=f"{kernel.__name__.removesuffix('_kernel')} {what}",
        kernel=kernel,
        signature={name: types.get(name, "i64") for name in kernel.arg_names},
        constexprs=constants,
        moves_rows=moves_rows,
    )

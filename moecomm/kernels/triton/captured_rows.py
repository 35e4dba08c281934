"""Rows of the messages of a captured call into a fixed block: routes, weights and rows.

T tokens of a source   Tmax most of them   K num_topk   E num_experts   R num_ranks   B blocks of each source

Where some rank is far, messages are packed, and rows come home from far ranks packed, too: by expert, and inside an
expert in the order of my routes. What was counted in the messages says where each row is.
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
    Packing,
    Windows,
    block_tile,
    segment_of,
    window_of,
)
from moecomm.kernels.triton.captured_state import Control
from moecomm.kernels.triton.captured_zeros import Block
from moecomm.kernels.triton.compile_case import NUMBERS_OF_RANKS, CompileCase, varied
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.runtime import alignment_of, launch
from moecomm.kernels.triton.tiles import Moves, Tile, extreme_moves, moves_constants, moves_of, row_pointers, tile_of

__all__ = ["compile_cases", "place_rows", "route_messages"]

_HEADER = tl.constexpr(HEADER_BYTES)
_EXPERTS = 64
_MOST_TOKENS = 32  # of a tile: each is compared with all ranks
_MOST_PROGRAMS = 1024  # a few for each processor: how many rows come is not known at the launch


@triton.jit(
    do_not_specialize=[
        *("windows", "message_bytes", "num_windows", "values_offset", "num_ranks", "num_blocks", "max_tokens"),
        *("num_topk", "num_experts", "rank", "values"),
    ],
    do_not_specialize_on_alignment=["ticket", "status", "tokens", "boards"],
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
    boards: tl.tensor,
    counts: tl.tensor,
    slots: tl.tensor,
    homeward: tl.tensor,
    VALUE_BYTES: tl.constexpr,
    IS_PACKED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Routes of a block of tokens of one source, and their weights to their places here.

    Arguments:
        before: `[R * B, E + R]` int32: how many routes to each expert are in all blocks before.
        routes: `[R, Tmax, K]` int64.
        values: address of weights of VALUE_BYTES; 0 bytes = none.
        boards: `[R]` int64, if IS_PACKED: 0 = the rank is far.
        counts: `[R, E + R]` int32, if IS_PACKED: of each source.
        slots: `[R, Tmax]` int32, if IS_PACKED: row of each token in its message to me.
        homeward: `[Tmax, K]` int64, if IS_PACKED: my routes, with the rows of far ranks as they are packed here.
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
        num_columns = num_experts + num_ranks
        ahead = tl.load(before + row.to(tl.int64) * num_columns + id, mask=is_route, other=0)
        ahead += tl.sum(is_earlier.to(tl.int32), axis=1)
        to += ahead
        peer = tl.load(expert_rank + id, mask=is_route, other=-1)
        target = routes + source.to(tl.int64) * max_tokens * num_topk + position
        tl.store(target, tl.where(is_route, (peer.to(tl.int64) << 40) + to, -1), mask=is_id)
        if VALUE_BYTES > 0:
            BITS: tl.constexpr = tl.int32 if VALUE_BYTES == 4 else tl.int64
            is_here = is_route & (peer == rank)
            value = tl.load((message + values_offset).to(tl.pointer_type(BITS)) + position, mask=is_here)
            tl.store(tl.cast(values, tl.int64).to(tl.pointer_type(BITS)) + to, value, mask=is_here)
        if IS_PACKED:
            # Counts before this block, of all sources, less those before the first block of its source.
            of_source = before + source.to(tl.int64) * num_blocks * num_columns
            slot = tl.load(before + row.to(tl.int64) * num_columns + num_experts + rank)
            slot -= tl.load(of_source + num_experts + rank)
            is_mine = tl.reshape((is_route & (peer == rank)).to(tl.int32), (TOKENS, CHOICES))
            is_there = tl.max(is_mine, axis=1)
            t = first + tl.arange(0, TOKENS)
            slot += tl.cumsum(is_there, axis=0) - is_there
            tl.store(slots + source.to(tl.int64) * max_tokens + t, slot, mask=t < num_tokens)
            if source == rank:
                is_far = is_route & (tl.load(boards + peer, mask=is_route, other=0) == 0)
                landing = (ahead - tl.load(of_source + id, mask=is_route, other=0)).to(tl.int64)
                for expert in range(0, num_experts, EXPERTS):
                    e = expert + tl.arange(0, EXPERTS)
                    count = tl.load(counts + source.to(tl.int64) * num_columns + e, mask=e < num_experts, other=0)
                    landing += tl.sum(tl.where(e[None, :] < id[:, None], count[None, :], 0), axis=1)
                home = (peer.to(tl.int64) << 40) + tl.where(is_far, landing, to)
                tl.store(homeward + position, tl.where(is_route, home, -1), mask=is_id)


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
    slots: tl.tensor,
    IS_PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Copies tiles of rows, each to all its places here; tokens of all sources are numbered one after the other.

    Arguments:
        slots: `[R, Tmax]` int32, if IS_PACKED: row of each token in its message.
    """
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
        slot = t
        if IS_PACKED:
            slot = tl.load(slots + source * max_tokens + t, mask=is_token, other=0).to(tl.int64)
        address = window + source * message_bytes + rows_offset + slot * row_bytes
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
    counts: Tensor,
    packing: Packing | None,
) -> None:
    """Routes of all sources, `[R, Tmax, K]` int64, and the weights to the block; `found` and `starts` as planned.

    Arguments:
        counts: `[R, E + R]` int32, of each source.
        packing: where messages are packed: is filled for who reads their rows, and for rows that come home.
    """
    tile = block_tile(windows.max_tokens, windows.num_topk)
    packed = (found.counts, routes) if packing is None else (packing.slots, packing.homeward)
    launch(
        route_messages_kernel,
        control.num_ranks * tile.num_blocks,
        routes.device,
        *(windows.address, windows.message_bytes, control.num_windows, layout.values, ticket, control.status),
        *(found.tokens, found.counts, control.num_ranks, tile.num_blocks, windows.max_tokens, windows.num_topk),
        *(expert_rank, expert_rank.numel(), starts, routes, control.rank, block.values),
        *(control.boards, counts, *packed),
        VALUE_BYTES=block.value_bytes,
        IS_PACKED=packing is not None,
        TOKENS=tile.tokens,
        CHOICES=tile.choices,
        EXPERTS=_EXPERTS,
    )


def place_rows(
    control: Control,
    ticket: Tensor,
    windows: Windows,
    layout: MessageLayout,
    tokens: Tensor,
    routes: Tensor,
    block: Block,
    slots: Tensor | None,
) -> None:
    """Copies the rows of all messages to where `routes` say that they go here; `slots` is of a packing, or None."""
    alignment = alignment_of(windows.address, windows.message_bytes, layout.rows, block.rows, block.row_bytes)
    moves = moves_of(block.row_bytes, alignment)
    tile = _tile_of(control.num_ranks * windows.max_tokens, moves)
    launch(
        place_rows_kernel,
        min(_MOST_PROGRAMS, tile.num_programs),
        routes.device,
        *(windows.address, windows.message_bytes, control.num_windows, layout.rows, ticket, control.status, tokens),
        *(control.num_ranks, windows.max_tokens, routes, windows.num_topk, control.rank, block.rows, moves.num_units),
        control.boards if slots is None else slots,
        IS_PACKED=slots is not None,
        DTYPE=moves.dtype,
        ALIGNMENT=moves.alignment,
        PER_UNIT=moves.per_unit,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
        RANKS=triton.next_power_of_2(control.num_ranks),
    )


def _tile_of(num_tokens: int, moves: Moves) -> Tile:
    return tile_of(num_tokens, moves).with_fewer_tokens(num_tokens, moves, _MOST_TOKENS)


def compile_cases() -> list[CompileCase]:
    """Weights of both sizes and none; long and short rows, some ranks and many."""
    wide = ("ticket", "status", "tokens", "starts", "routes", "boards", "homeward")
    narrow = ("before", "expert_rank", "counts", "slots")
    types = {**dict.fromkeys(wide, "*i64"), **dict.fromkeys(narrow, "*i32")}
    types |= dict.fromkeys(("num_ranks", "num_blocks", "max_tokens", "num_topk", "num_experts", "rank"), "i32")
    types["num_units"] = "i32"
    blocks = block_tile(128, 8)
    cases: list[CompileCase] = []
    for value_bytes, is_packed in ((0, False), (4, False), (8, False), (4, True)):
        constants = {"VALUE_BYTES": value_bytes, "IS_PACKED": is_packed, "TOKENS": blocks.tokens}
        constants |= {"CHOICES": blocks.choices, "EXPERTS": _EXPERTS}
        what = f"weights of {value_bytes} bytes{', packed' * is_packed}"
        cases.append(_case(what, route_messages_kernel, types, constants))
    packed, tiles = cases[-1], [block_tile(128, num_topk) for num_topk in (1, 16)]
    cases += varied(packed, ({"VALUE_BYTES": value_bytes} for value_bytes in (0, 8)))
    cases += varied(packed, ({"TOKENS": tile.tokens, "CHOICES": tile.choices} for tile in tiles))
    for row_bytes, ranks, is_packed in ((14336, 8, False), (512, 128, False), (14336, 128, True)):
        moves = moves_of(row_bytes, 16)
        tile = _tile_of(ranks * 128, moves)
        constants = {"IS_PACKED": is_packed, **moves_constants(moves), "TOKENS": tile.tokens}
        constants |= {"COLUMNS": tile.columns, "RANKS": ranks}
        what = f"{tile.columns} columns, {ranks} ranks{', packed' * is_packed}"
        # Where messages are not packed, any pointer will do for `slots`.
        types["slots"] = "*i32" if is_packed else "*i64"
        cases.append(_case(what, place_rows_kernel, types, constants, moves_rows=True))
    packed = cases[-1]
    cases += varied(packed, ({"RANKS": ranks} for ranks in NUMBERS_OF_RANKS))
    cases += varied(packed, extreme_moves(lambda moves: _tile_of(4096, moves)))
    return cases + varied(packed, extreme_moves(lambda moves: _tile_of(1, moves))[-1:])


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

"""A captured low-latency combine: rows to where peers read them, one signal, a wait, and the sums.

    T tokens   P num_slots   H columns   E_local experts here   R num_ranks

In call n a rank writes its rows to its outputs n % num_windows. They may be written again by call n + num_windows: by
then everybody has read them (docs/gpu-low-latency.md).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.base import weights_dtype
from moecomm.kernels.triton.captured_messages import window_of
from moecomm.kernels.triton.captured_send import end_send
from moecomm.kernels.triton.captured_state import Control, Operation
from moecomm.kernels.triton.combine import summed_rows
from moecomm.kernels.triton.compile_case import NUMBERS_OF_RANKS, CompileCase, varied
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.rounding import TRITON_DTYPES, rounded
from moecomm.kernels.triton.runtime import alignment_of, launch
from moecomm.kernels.triton.signals import wait_kernel
from moecomm.kernels.triton.tiles import (
    Moves,
    Tile,
    extreme_moves,
    extreme_numbers,
    moves_constants,
    moves_of,
    numbers_of,
    row_pointers,
    tile_of,
)

__all__ = ["Outputs", "compile_cases", "copy_outputs", "pull_sums", "send_outputs", "wait_for_ticket"]

_MOST_PROGRAMS = 512
_MOST_TOKENS = 32
_MOST_COMPARED = 8192  # rows with experts, in the registers of a program


class Outputs(NamedTuple):
    """Where ranks leave rows for each other.

    Attributes:
        addresses: `[num_windows, R]` int64, of each rank's rows here, by the window of the call.
        nbytes: of one window; 0 = there is one, which is used by every call.
        alignment: what divides them all.
        mine: address of my own.
    """

    addresses: Tensor
    nbytes: int
    alignment: int
    mine: int


@triton.jit(
    do_not_specialize=[
        "rows",
        "outputs",
        "output_bytes",
        "num_windows",
        "num_local",
        "num_units",
        "rank",
        "num_ranks",
        "slot",
    ],
    do_not_specialize_on_alignment=["first_rows", "totals", "begun", "ticket", "arrivals", "boards", "status"],
)
def send_outputs_kernel(
    rows: tl.int64,
    outputs: tl.int64,
    output_bytes: tl.int64,
    num_windows: tl.int64,
    first_rows: tl.tensor,
    totals: tl.tensor,
    num_local: tl.int32,
    num_units: tl.int32,
    rank: tl.int32,
    num_ranks: tl.int32,
    begun: tl.tensor,
    ticket: tl.tensor,
    arrivals: tl.tensor,
    boards: tl.tensor,
    slot: tl.int64,
    status: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Copies the rows that routes name from `rows` to my outputs, in tiles, unless they are there; signals.

    Arguments:
        first_rows, totals: `[E_local]` int64 and int32: of each expert's rows.
        num_ranks: to signal; 0 = a copy alone, which is no call.
    """
    num_boards = unless_failed(status, num_ranks)
    number = tl.load(begun) + 1
    target = window_of(outputs, output_bytes, num_windows, 1, number)
    num_columns = num_units * PER_UNIT
    row_bytes = tl.cast(num_units, tl.int64) * ALIGNMENT
    num_pieces = tl.cdiv(num_columns, COLUMNS)
    e = tl.arange(0, EXPERTS)
    length = tl.load(totals + e, mask=e < num_local, other=0).to(tl.int64)
    begin = tl.load(first_rows + e, mask=e < num_local, other=0)
    ends = tl.cumsum(length, axis=0)
    num_rows = unless_failed(status, tl.sum(length, axis=0))
    num_tiles = tl.where(target == rows, 0, tl.cdiv(num_rows, TOKENS) * num_pieces)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        i = (tile // num_pieces) * TOKENS + tl.arange(0, TOKENS)
        c = ((tile % num_pieces) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        mask = (i < num_rows)[:, None] & (c < num_columns)
        at = ((ends - length)[None, :] <= i[:, None]) & (i[:, None] < ends[None, :])
        offset = (i + tl.sum(tl.where(at, (begin - ends + length)[None, :], 0), axis=1)) * row_bytes
        piece = tl.load(row_pointers(tl.cast(rows, tl.int64) + offset, DTYPE, ALIGNMENT) + c, mask=mask)
        tl.store(row_pointers(target + offset, DTYPE, ALIGNMENT) + c, piece, mask=mask)
    end_send(arrivals, boards, num_boards, slot * num_ranks + rank, begun, ticket, number, RANKS)


@triton.jit(
    do_not_specialize=["out", "num_tokens", "num_units", "num_slots", "num_ranks", "num_windows"],
    do_not_specialize_on_alignment=["routes", "weights", "ticket", "status"],
)
def pull_sums_kernel(
    out: tl.int64,
    num_tokens: tl.int64,
    num_units: tl.int32,
    routes: tl.tensor,
    num_slots: tl.int32,
    addresses: tl.tensor,
    num_ranks: tl.int64,
    num_windows: tl.int64,
    ticket: tl.tensor,
    status: tl.tensor,
    weights: tl.tensor,
    HAS_WEIGHTS: tl.constexpr,
    WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """As `combine_rows_kernel`, with addresses by window of the call; writes nothing once a call has failed."""
    num_columns = num_units * PER_UNIT
    row_bytes = tl.cast(num_units, tl.int64) * ALIGNMENT
    num_pieces = tl.cdiv(num_columns, COLUMNS)
    program = tl.program_id(0)
    t = (program // num_pieces).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = ((program % num_pieces) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_token = t < unless_failed(status, tl.cast(num_tokens, tl.int64))
    is_column = c < num_columns
    window = (tl.load(ticket) - 1) & (num_windows - 1)
    total = summed_rows(
        routes + t * num_slots,
        weights + t * num_slots,
        num_slots,
        is_token,
        c,
        is_column,
        addresses + window * num_ranks,
        row_bytes,
        HAS_WEIGHTS,
        WIDE,
        DTYPE,
        ALIGNMENT,
        TOKENS,
        COLUMNS,
    )
    target = tl.cast(out, tl.int64) + t * row_bytes
    tl.store(row_pointers(target, DTYPE, ALIGNMENT) + c, rounded(total, DTYPE), mask=is_token[:, None] & is_column)


def send_outputs(
    control: Control,
    operation: Operation,
    ticket: Tensor,
    rows: tuple[int, int],
    first_rows: Tensor,
    totals: Tensor,
    outputs: Outputs,
) -> None:
    """Begins a call. `rows` are the address of my block of rows and the bytes of a row."""
    address, row_bytes = rows
    moves = moves_of(row_bytes, alignment_of(address, row_bytes, outputs.alignment, outputs.nbytes))
    tile, experts = _tile_of(moves, totals.numel())
    launch(
        send_outputs_kernel,
        1 if address == outputs.mine and outputs.nbytes == 0 else min(_MOST_PROGRAMS, max(1, tile.num_programs)),
        totals.device,
        *(address, outputs.mine, outputs.nbytes, control.num_windows, first_rows, totals, totals.numel()),
        *(moves.num_units, control.rank, control.num_ranks, operation.begun, ticket, operation.arrivals),
        *(control.boards, operation.slot, control.status),
        **moves_constants(moves),
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
        EXPERTS=experts,
        RANKS=triton.next_power_of_2(control.num_ranks),
    )


def copy_outputs(
    control: Control, operation: Operation, rows: tuple[int, int], first_rows: Tensor, totals: Tensor, target: int
) -> None:
    """Copies the rows that routes name to memory of the same form at `target`; tells nobody, and counts nothing."""
    address, row_bytes = rows
    moves = moves_of(row_bytes, alignment_of(address, row_bytes, target))
    tile, experts = _tile_of(moves, totals.numel())
    launch(
        send_outputs_kernel,
        min(_MOST_PROGRAMS, max(1, tile.num_programs)),
        totals.device,
        *(address, target, 0, 1, first_rows, totals, totals.numel(), moves.num_units, control.rank),
        *(0, operation.begun, operation.begun, operation.arrivals, control.boards, operation.slot, control.status),
        **moves_constants(moves),
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
        EXPERTS=experts,
        RANKS=1,
    )


def _tile_of(moves: Moves, num_local: int) -> tuple[Tile, int]:
    """The tile of rows that are copied, and EXPERTS, with all of which each row is compared."""
    experts = int(triton.next_power_of_2(max(1, num_local)))
    most = min(_MOST_TOKENS, max(1, _MOST_COMPARED // experts))
    return tile_of(_MOST_PROGRAMS - 1, moves).with_fewer_tokens(_MOST_PROGRAMS - 1, moves, most), experts


def wait_for_ticket(control: Control, slot: int, ticket: Tensor) -> None:
    """Lets the stream wait until every rank has begun the call of this ticket."""
    launch(
        wait_kernel,
        1,
        ticket.device,
        *(control.board, slot, 0, ticket, control.num_ranks, control.status, control.timeout_ns),
        FROM_MEMORY=True,
        RANKS=triton.next_power_of_2(control.num_ranks),
        num_warps=1,
    )


def pull_sums(
    control: Control, ticket: Tensor, out: Tensor, routes: Tensor, outputs: Outputs, weights: Tensor | None
) -> None:
    """Sums each token's rows in ascending k, as `combine_rows` does. `routes` `[T, K]` int64.

    Raises:
        ValueError: rows do not begin at multiples of their numbers' size.
    """
    num_tokens, num_slots = routes.shape
    row_bytes = out.shape[1] * out.element_size()
    known = alignment_of(row_bytes, out.data_ptr(), outputs.alignment, outputs.nbytes)
    moves = numbers_of("a row", out.dtype, row_bytes, known)
    tile = tile_of(num_tokens, moves, is_weighted=True)  # the smaller ones, also without: they leave registers free
    wide = TRITON_DTYPES[weights_dtype(out.dtype)]
    launch(
        pull_sums_kernel,
        tile.num_programs,
        out.device,
        *(out.data_ptr(), num_tokens, moves.num_units, routes, num_slots, outputs.addresses, control.num_ranks),
        *(control.num_windows, ticket, control.status, routes if weights is None else weights),
        HAS_WEIGHTS=weights is not None,
        WIDE=wide,
        **moves_constants(moves),
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
    )


def compile_cases() -> list[CompileCase]:
    """Long and short rows copied, some ranks and many; sums of every dtype, plain and weighted."""
    wide = ("first_rows", "begun", "ticket", "boards", "status", "routes", "addresses")
    types = {**dict.fromkeys(wide, "*i64"), **dict.fromkeys(("totals", "arrivals"), "*i32")}
    types |= dict.fromkeys(("num_local", "num_units", "rank", "num_ranks", "num_slots"), "i32")
    cases: list[CompileCase] = []
    for row_bytes, ranks in ((14336, 8), (512, 128)):
        moves = moves_of(row_bytes, 16)
        tile, experts = _tile_of(moves, 32)
        constants = {**moves_constants(moves), "TOKENS": tile.tokens, "COLUMNS": tile.columns}
        constants |= {"EXPERTS": experts, "RANKS": ranks}
        cases.append(_case(f"{tile.columns} columns, {ranks} ranks", send_outputs_kernel, types, constants))
    cases += varied(cases[0], ({"RANKS": ranks} for ranks in NUMBERS_OF_RANKS if ranks != 128))
    cases += varied(cases[0], extreme_moves(lambda moves: _tile_of(moves, 32)[0]))
    many = ((moves_of(512, 16), num_local) for num_local in (1, 512))
    cases += varied(cases[1], ({"EXPERTS": e, "TOKENS": _tile_of(moves, e)[0].tokens} for moves, e in many))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for is_weighted in (False, True):
            moves = numbers_of("a row", dtype, 14336, 16)
            tile = tile_of(128, moves, is_weighted=True)
            total = TRITON_DTYPES[weights_dtype(dtype)]
            constants = {"HAS_WEIGHTS": is_weighted, "WIDE": total, **moves_constants(moves)}
            constants |= {"TOKENS": tile.tokens, "COLUMNS": tile.columns}
            types |= {"weights": f"*{total}" if is_weighted else "*i64", "num_ranks": "i64"}
            cases.append(_case(f"{moves.dtype}{' weighted' * is_weighted}", pull_sums_kernel, types, constants))
            extreme = [extreme_numbers(dtype, partial(tile_of, n, is_weighted=True)) for n in (4096, 1)]
            cases += varied(cases[-1], [*extreme[0], extreme[1][-1]] if is_weighted else extreme[0][:1])
    return cases


def _case(what: str, kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> CompileCase:
    types = {**types, **dict.fromkeys(constants, "constexpr")}
    return CompileCase(
        name=f"{kernel.__name__.removesuffix('_kernel')} {what}",
        kernel=kernel,
        signature={name: types.get(name, "i64") for name in kernel.arg_names},
        constexprs=constants,
        moves_rows=True,
    )

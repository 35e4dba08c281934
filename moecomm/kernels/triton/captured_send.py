"""The first half of a captured low-latency dispatch: one kernel writes and signals a message to every rank.

    T tokens   K num_topk   E num_experts   R num_ranks   H hidden

Where some rank is far, the rows of each message are packed: those that go there, one behind the other. A message to a
far rank is made in memory of one's own, from where it is put (`captured_far`).

It takes the number of the call, and with it the window, from device memory and leaves the next one there, so that the
same launch can be replayed.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.captured_messages import HEADER_BYTES, MessageLayout, Windows, window_of
from moecomm.kernels.triton.captured_state import Control, Operation
from moecomm.kernels.triton.compile_case import NUMBERS_OF_RANKS, CompileCase, varied
from moecomm.kernels.triton.counts import ranks_of_tokens
from moecomm.kernels.triton.lanes import is_last_program, release_lane, unless_failed
from moecomm.kernels.triton.runtime import alignment_of, launch
from moecomm.kernels.triton.tiles import Moves, Tile, extreme_moves, moves_of, row_pointers, tile_of

__all__ = ["Batch", "compile_cases", "end_send", "send_messages"]

_HEADER = tl.constexpr(HEADER_BYTES)
_LEAST = tl.constexpr(-(1 << 31))
_MOST = tl.constexpr((1 << 31) - 1)
_IDS = 128
_MOST_CHOICES = 4096  # of the tokens of a tile, in the registers of a program


@triton.jit
def end_send(
    arrivals: tl.tensor,
    boards: tl.tensor,
    num_boards: tl.int32,
    lane: tl.int64,
    begun: tl.tensor,
    ticket: tl.tensor,
    number: tl.int64,
    RANKS: tl.constexpr,
) -> tl.tensor:
    """Ends every program of a grid that begins a call: the last one signals and counts it, unless num_boards is 0.

    Returns:
        Whether this is the last one; it may still write what peers do not read.
    """
    is_last = is_last_program(arrivals)
    if is_last:
        release_lane(boards, num_boards, lane, 1, RANKS)
        if num_boards > 0:
            tl.store(ticket, number)
            tl.store(begun, number)
    return is_last


@triton.jit(
    do_not_specialize=[
        *("rows", "row_stride", "num_tokens", "num_units", "num_topk", "num_experts", "message_bytes", "num_windows"),
        *("values_offset", "rows_offset", "signature", "rank", "num_ranks", "slot"),
    ],
    do_not_specialize_on_alignment=[
        *("ids", "weights", "planned", "windows", "begun", "ticket", "arrivals", "boards", "status"),
    ],
)
def send_messages_kernel(
    rows: tl.int64,
    row_stride: tl.int64,
    num_tokens: tl.int32,
    num_units: tl.int32,
    ids: tl.tensor,
    weights: tl.tensor,
    num_topk: tl.int32,
    expert_rank: tl.tensor,
    num_experts: tl.int32,
    planned: tl.tensor,
    windows: tl.tensor,
    message_bytes: tl.int64,
    num_windows: tl.int64,
    values_offset: tl.int64,
    rows_offset: tl.int64,
    signature: tl.int64,
    rank: tl.int32,
    num_ranks: tl.int32,
    begun: tl.tensor,
    ticket: tl.tensor,
    arrivals: tl.tensor,
    boards: tl.tensor,
    slot: tl.int64,
    status: tl.tensor,
    HAS_VALUES: tl.constexpr,
    IS_PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    IDS: tl.constexpr,
) -> None:
    """Program r < R: header, ids and weights for rank r. The others: a tile of rows each, to whom it concerns.

    Arguments:
        rows, row_stride: address of row 0 and bytes between rows.
        num_units: ALIGNMENT bytes each, of a row.
        ids: `[T, K]` int32 or int64; what does not fit into 32 bits is no expert and stays none.
        weights: `[T, K]` integers of their size, if HAS_VALUES.
        planned: `[T, K]` int64, if IS_PACKED: of each token the ranks it goes to, with its row in the message there.
        windows: `[R]` int64, address of each rank's windows here; of a far one's, of where messages to it are made.
        begun, ticket, arrivals: see `captured_state.Operation` and `captured_messages`.
        DTYPE: an integer; PER_UNIT of them take ALIGNMENT bytes.
    """
    num_boards = unless_failed(status, num_ranks)
    number = tl.load(begun) + 1
    mine = window_of(rank * message_bytes, message_bytes, num_windows, num_ranks, number)
    program = tl.program_id(0)
    if program < num_ranks:
        if num_boards > 0:
            message = tl.load(windows + program) + mine
            header = message.to(tl.pointer_type(tl.int64))
            tl.store(header, tl.cast(num_tokens, tl.int64))
            tl.store(header + 1, tl.cast(signature, tl.int64))
            num_ids = num_tokens * num_topk
            for first in range(0, num_ids, IDS):
                position = first + tl.arange(0, IDS)
                is_id = position < num_ids
                id = tl.load(ids + position, mask=is_id, other=-1).to(tl.int64)
                id = tl.minimum(tl.maximum(id, _LEAST), _MOST).to(tl.int32)
                tl.store((message + _HEADER).to(tl.pointer_type(tl.int32)) + position, id, mask=is_id)
                if HAS_VALUES:
                    value = tl.load(weights + position, mask=is_id)
                    values = (message + values_offset).to(tl.pointer_type(weights.dtype.element_ty))
                    tl.store(values + position, value, mask=is_id)
    else:
        num_columns = num_units * PER_UNIT
        row_bytes = tl.cast(num_units, tl.int64) * ALIGNMENT
        num_pieces = tl.cdiv(num_columns, COLUMNS)
        tile = program - num_ranks
        t = tile // num_pieces * TOKENS + tl.arange(0, TOKENS)
        c = ((tile % num_pieces) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        is_token = t < unless_failed(status, num_tokens)
        is_column = c < num_columns
        source = tl.cast(rows, tl.int64) + t.to(tl.int64) * row_stride
        piece = tl.load(row_pointers(source, DTYPE, ALIGNMENT) + c, mask=is_token[:, None] & is_column)
        if IS_PACKED:
            for choice in range(num_topk):
                route = tl.load(planned + t.to(tl.int64) * num_topk + choice, mask=is_token, other=-1)
                base = tl.load(windows + (route >> 40), mask=route >= 0, other=0)
                target = base + mine + rows_offset + (route & 0xFFFFFFFFFF) * row_bytes
                place = row_pointers(target, DTYPE, ALIGNMENT)
                tl.store(place + c, piece, mask=(route >= 0)[:, None] & is_column)
        else:
            chosen = ranks_of_tokens(ids, t, num_tokens, num_topk, expert_rank, num_experts, CHOICES)
            k = tl.arange(0, CHOICES)[None, :]
            target = mine + rows_offset + t.to(tl.int64) * row_bytes
            for choice in range(num_topk):
                peer = tl.max(tl.where(k == choice, chosen, -1), axis=1)
                is_known = tl.max(((chosen == peer[:, None]) & (k < choice)).to(tl.int32), axis=1) > 0
                is_sent = is_token & (peer >= 0) & (~is_known)
                base = tl.load(windows + peer, mask=is_sent, other=0)
                place = row_pointers(base + target, DTYPE, ALIGNMENT)
                tl.store(place + c, piece, mask=is_sent[:, None] & is_column)
    end_send(arrivals, boards, num_boards, slot * num_ranks + rank, begun, ticket, number, RANKS)


class Batch(NamedTuple):
    """What one rank sends.

    Attributes:
        rows: `[T, H]`, last dimension contiguous.
        ids: `[T, K]` int32 or int64 contiguous.
        weights: `[T, K]` float32 or float64 contiguous, or None.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor | None


def send_messages(
    control: Control,
    operation: Operation,
    ticket: Tensor,
    batch: Batch,
    expert_rank: Tensor,
    windows: Windows,
    peers: tuple[Tensor, int],
    layout: MessageLayout,
    signature: int,
    planned: Tensor | None = None,
) -> None:
    """Begins a call.

    Arguments:
        peers: the addresses of each rank's windows, `[R]` int64, and what divides them all.
        planned: where the rows of packed messages go, see the kernel; None: row t of a message is token t.
    """
    rows, ids, weights = batch
    num_tokens, num_topk = ids.shape
    num_ranks = control.num_ranks
    row_bytes = rows.shape[1] * rows.element_size()
    stride = rows.stride(0) * rows.element_size()
    table, known = peers
    alignment = alignment_of(row_bytes, stride, rows.data_ptr(), known, windows.message_bytes)
    moves = moves_of(row_bytes, alignment)
    tile = _tile_of(num_tokens, num_topk, moves)
    places = operation.begun if planned is None else planned
    bits = ids
    if weights is not None:
        bits = weights.view(torch.int32 if weights.element_size() == 4 else torch.int64)
    launch(
        send_messages_kernel,
        num_ranks + tile.num_programs,
        ids.device,
        *(rows.data_ptr(), stride, num_tokens, moves.num_units, ids, bits, num_topk),
        *(expert_rank, expert_rank.numel(), places, table, windows.message_bytes, control.num_windows),
        *(layout.values, layout.rows, signature, control.rank, num_ranks),
        *(operation.begun, ticket, operation.arrivals, control.boards, operation.slot, control.status),
        HAS_VALUES=weights is not None,
        IS_PACKED=planned is not None,
        DTYPE=moves.dtype,
        ALIGNMENT=moves.alignment,
        PER_UNIT=moves.per_unit,
        TOKENS=tile.tokens,
        CHOICES=_choices_of(num_topk),
        COLUMNS=tile.columns,
        RANKS=triton.next_power_of_2(num_ranks),
        IDS=_IDS,
    )


def _choices_of(num_topk: int) -> int:
    """CHOICES, all of which are looked at for each token of a tile."""
    return int(triton.next_power_of_2(max(1, num_topk)))


def _tile_of(num_tokens: int, num_topk: int, moves: Moves) -> Tile:
    """The tile of rows that are sent."""
    most = max(1, _MOST_CHOICES // _choices_of(num_topk))
    return tile_of(num_tokens, moves).with_fewer_tokens(num_tokens, moves, most)


def compile_cases() -> list[CompileCase]:
    """Ids and weights of both widths, long and short rows, some ranks and many."""
    pointers = {"expert_rank": "*i32", "arrivals": "*i32"}
    pointers |= dict.fromkeys(("planned", "windows", "begun", "ticket", "boards", "status"), "*i64")
    ints = ("num_tokens", "num_units", "num_topk", "num_experts", "rank", "num_ranks")
    listed: list[tuple[str, str, int, int, bool]] = [
        ("*i64", "*i32", 14336, 8, False),
        ("*i32", "*i64", 512, 128, False),
        ("*i64", "", 14336, 8, False),
        ("*i64", "*i32", 14336, 128, True),
    ]
    known = [(ids, weights, is_packed) for ids, weights, _, _, is_packed in listed]
    forms = [(i, w, packed) for i in ("*i32", "*i64") for w in ("", "*i32", "*i64") for packed in (False, True)]
    others = [(ids, weights, 14336, 8, packed) for ids, weights, packed in forms if (ids, weights, packed) not in known]
    cases: list[CompileCase] = []
    for ids, weights, row_bytes, ranks, is_packed in (*listed, *others):
        moves = moves_of(row_bytes, 16)
        tile = _tile_of(128, 8, moves)
        constants = {
            "HAS_VALUES": bool(weights),
            "IS_PACKED": is_packed,
            "DTYPE": moves.dtype,
            "ALIGNMENT": moves.alignment,
            "PER_UNIT": moves.per_unit,
            "TOKENS": tile.tokens,
            "CHOICES": _choices_of(8),
            "COLUMNS": tile.columns,
            "RANKS": ranks,
            "IDS": _IDS,
        }
        types = {**pointers, **dict.fromkeys(ints, "i32"), **dict.fromkeys(constants, "constexpr")}
        types |= {"ids": ids, "weights": weights or ids}
        what = f"weights of {weights[2:]} bits" if weights else "no weights"
        cases.append(
            CompileCase(
                name=f"send_messages {ids}, {what}, {tile.columns} columns, {ranks} ranks{', packed' * is_packed}",
                kernel=send_messages_kernel,
                signature={name: types.get(name, "i64") for name in send_messages_kernel.arg_names},
                constexprs=constants,
                moves_rows=True,
                is_listed=len(cases) < len(listed),
            )
        )
    cases += varied(cases[0], ({"RANKS": ranks} for ranks in NUMBERS_OF_RANKS if ranks != 128))
    cases += varied(cases[0], extreme_moves(partial(_tile_of, 4096, 8)))
    cases += varied(cases[0], extreme_moves(partial(_tile_of, 1, 8))[-1:])
    for num_topk in (1, 16):
        *_, short = extreme_moves(partial(_tile_of, 4096, num_topk))
        cases += varied(cases[0], [{**short, "CHOICES": num_topk}])
    return cases

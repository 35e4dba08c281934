"""The messages of captured low-latency calls: where they lie, and what a receiver counts in them.

    T tokens of a source   Tmax most of them   K num_topk   E num_experts   R num_ranks   H hidden
    B blocks of tokens that the receiver looks at, of each source   N = R * B

    number of tokens, signature: int64; then at multiples of 64 bytes
    ids [Tmax, K] int32 | weights [Tmax, K] | rows [Tmax, H]

Unlike the messages of csrc/cpu/eager.h, these have every part and row at a place that no count moves: row t is token t,
and is left out where no expert wants it. So rows are on their way before anybody has counted anything. Where some rank
is far (`captured_far`), rows are packed instead, by all for all: those that go to the receiver, in the order of tokens.

A call has a ticket, one int64 in device memory: how many calls of its operation have begun with it. Call number
ticket - 1 uses window (ticket - 1) % num_windows, and a lane of a source that has sent it is at least ticket.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.captured_state import Control
from moecomm.kernels.triton.compile_case import LISTED_RANKS, NUMBERS_OF_RANKS, CompileCase, varied
from moecomm.kernels.triton.counts import ranks_of_tokens
from moecomm.kernels.triton.lanes import acquire_lanes
from moecomm.kernels.triton.runtime import launch, num_blocks

__all__ = [
    "HEADER_BYTES",
    "BlockTile",
    "Found",
    "MessageLayout",
    "Packing",
    "Windows",
    "block_tile",
    "compile_cases",
    "count_messages",
    "message_layout",
    "segment_of",
    "window_of",
]

HEADER_BYTES = 64

_HEADER = tl.constexpr(HEADER_BYTES)
_NOWHERE = tl.constexpr((1 << 31) - 1)
_IDS = 128
_EXPERTS = 64
_RANKS = 16
# All of them wait at the same time, also where several ranks share a GPU, which must leave room for those waited for.
_MOST_PROGRAMS = 32


class MessageLayout(NamedTuple):
    """Offsets of a message's parts, and what it takes, in bytes; ids are behind the header."""

    values: int
    rows: int
    nbytes: int


def message_layout(max_tokens: int, num_topk: int, row_bytes: int, value_bytes: int) -> MessageLayout:
    """Where the parts are; `value_bytes` is 0 where no weights travel."""
    values = HEADER_BYTES + -(-max_tokens * num_topk * 4 // HEADER_BYTES) * HEADER_BYTES
    rows = values + -(-max_tokens * num_topk * value_bytes // HEADER_BYTES) * HEADER_BYTES
    return MessageLayout(values, rows, rows + -(-max_tokens * row_bytes // HEADER_BYTES) * HEADER_BYTES)


class BlockTile(NamedTuple):
    """Tokens and choices of a block that one program looks at, powers of two; how many blocks a source has."""

    tokens: int
    choices: int
    num_blocks: int


def block_tile(max_tokens: int, num_topk: int) -> BlockTile:
    """About 128 ids in each block."""
    choices = triton.next_power_of_2(max(1, num_topk))
    tokens = max(1, _IDS // choices)
    return BlockTile(tokens, choices, num_blocks(max(1, max_tokens), tokens))


@triton.jit
def window_of(
    windows: tl.int64, message_bytes: tl.int64, num_windows: tl.int64, num_messages: tl.int64, ticket: tl.int64
) -> tl.tensor:
    """The address of a call's window: `num_messages` messages of `message_bytes`, one after the other.

    `num_windows` is a power of two: a division of 64 bits would cost more registers than most kernels here take.
    """
    return windows + ((ticket - 1) & (num_windows - 1)) * num_messages * message_bytes


@triton.jit
def segment_of(i: tl.tensor, ends: tl.tensor) -> tl.tensor:
    """Which of the segments, which follow each other and end at `ends`, each of `i` `[n]` is in; `[n]` int32."""
    return tl.sum((ends[None, :] <= i[:, None]).to(tl.int32), axis=1)


@triton.jit(
    do_not_specialize=[
        *("board", "slot", "num_ranks", "timeout_ns", "windows", "message_bytes", "num_windows", "max_tokens"),
        *("num_topk", "num_experts", "signature"),
    ],
    do_not_specialize_on_alignment=["ticket", "status"],
)
def count_windows_kernel(
    board: tl.int64,
    slot: tl.int64,
    ticket: tl.tensor,
    num_ranks: tl.int32,
    status: tl.tensor,
    timeout_ns: tl.int64,
    windows: tl.int64,
    message_bytes: tl.int64,
    num_windows: tl.int64,
    max_tokens: tl.int32,
    num_topk: tl.int32,
    expert_rank: tl.tensor,
    num_experts: tl.int32,
    signature: tl.int64,
    tokens: tl.tensor,
    counts: tl.tensor,
    bad: tl.tensor,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    ALL_RANKS: tl.constexpr,
) -> None:
    """Waits for all messages of a call, then counts each block of them; writes nothing if one does not come.

    Arguments:
        windows: address of mine, `[num_windows, R, message_bytes]`.
        signature: what the messages must show.
        tokens: `[R]` int64, overwritten: T of each source, or -1 if its message shows another signature.
        counts: `[N, E + R]` int32, overwritten: routes to each expert, tokens with a choice at each rank.
        bad: `[N, 2]` int32, overwritten: t * K + k of the block's first id that is none, or 2^31 - 1; and the id.
        RANKS: so many are compared at once; ALL_RANKS: at least R.
    """
    number = tl.load(ticket)
    num_behind = acquire_lanes(board, slot, number, num_ranks, status, timeout_ns, ALL_RANKS)
    # Only what all threads agree on may end the loop early, and the status may change while another program waits.
    num_blocks = tl.cdiv(max_tokens, TOKENS)
    num_rows = tl.where(num_behind == 0, num_ranks * num_blocks, 0)
    window = window_of(windows, message_bytes, num_windows, num_ranks, number)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        source = row // num_blocks
        message = window + tl.cast(source, tl.int64) * message_bytes
        header = message.to(tl.pointer_type(tl.int64))
        is_alike = tl.load(header + 1) == signature
        num_tokens = tl.minimum(tl.where(is_alike, tl.load(header), 0), max_tokens)
        first = (row % num_blocks) * TOKENS
        if first == 0:
            tl.store(tokens + source, tl.where(is_alike, num_tokens, -1))
        ids = (message + _HEADER).to(tl.pointer_type(tl.int32))
        flat = tl.arange(0, TOKENS * CHOICES)
        k = flat % CHOICES
        position = (first + flat // CHOICES) * num_topk + k
        is_id = (k < num_topk) & (first + flat // CHOICES < num_tokens)
        id = tl.load(ids + position, mask=is_id, other=-1)
        place = counts + tl.cast(row, tl.int64) * (num_experts + num_ranks)
        for expert in range(0, num_experts, EXPERTS):
            e = expert + tl.arange(0, EXPERTS)
            number_of = tl.sum((id[:, None] == e[None, :]).to(tl.int32), axis=0)
            tl.store(place + e, number_of, mask=e < num_experts)
        where = tl.min(tl.where(is_id & ((id < -1) | (id >= num_experts)), position, _NOWHERE), axis=0)
        tl.store(bad + row * 2, where)
        tl.store(bad + row * 2 + 1, tl.sum(tl.where(is_id & (position == where), id, 0), axis=0))
        t = first + tl.arange(0, TOKENS)
        chosen = ranks_of_tokens(ids, t, num_tokens, num_topk, expert_rank, num_experts, CHOICES)
        for rank in range(0, num_ranks, RANKS):
            r = rank + tl.arange(0, RANKS)
            is_there = tl.max((chosen[:, :, None] == r[None, None, :]).to(tl.int32), axis=1)
            tl.store(place + num_experts + r, tl.sum(is_there, axis=0), mask=r < num_ranks)


class Windows(NamedTuple):
    """Where messages lie here, and how large they are; the same for calls of one K.

    Attributes:
        address: of my windows, `[num_windows, R, message_bytes]`.
        message_bytes: of one message, whatever is in it.
        max_tokens, num_topk: Tmax, K.
    """

    address: int
    message_bytes: int
    max_tokens: int
    num_topk: int


class Packing(NamedTuple):
    """Where the rows of packed messages lie, of one block's call; see `captured_send` and `captured_rows`.

    Attributes:
        bases: `[R]` int64, zeros.
        planned: `[Tmax, K]` int64, for the sender.
        totals: `[R]` int32: rows of each message that I send.
        slots: `[R, Tmax]` int32, for the receiver.
        homeward: `[Tmax, K]` int64: my routes, where rows of far ranks are numbered as they come home.
        runs: `[R, E_local, 3]` int64, for who puts rows home.
    """

    bases: Tensor
    planned: Tensor
    totals: Tensor
    slots: Tensor
    homeward: Tensor
    runs: Tensor


class Found(NamedTuple):
    """What is counted in the messages of a call; see `count_windows_kernel`."""

    tokens: Tensor
    counts: Tensor
    bad: Tensor


def count_messages(
    control: Control, slot: int, ticket: Tensor, windows: Windows, expert_rank: Tensor, signature: int, found: Found
) -> None:
    """Waits for the messages of a call and counts."""
    num_ranks = control.num_ranks
    tile = block_tile(windows.max_tokens, windows.num_topk)
    launch(
        count_windows_kernel,
        min(_MOST_PROGRAMS, num_ranks * tile.num_blocks),
        expert_rank.device,
        *(control.board, slot, ticket, num_ranks, control.status, control.timeout_ns),
        *(windows.address, windows.message_bytes, control.num_windows, windows.max_tokens, windows.num_topk),
        *(expert_rank, expert_rank.numel(), signature, *found),
        TOKENS=tile.tokens,
        CHOICES=tile.choices,
        EXPERTS=_EXPERTS,
        RANKS=min(_RANKS, triton.next_power_of_2(num_ranks)),
        ALL_RANKS=triton.next_power_of_2(num_ranks),
    )


def compile_cases() -> list[CompileCase]:
    """One."""
    tile = block_tile(128, 8)
    pointers = {"ticket": "*i64", "status": "*i64", "tokens": "*i64"}
    pointers |= dict.fromkeys(("expert_rank", "counts", "bad"), "*i32")
    ints = dict.fromkeys(("num_ranks", "max_tokens", "num_topk", "num_experts"), "i32")
    constants = {"TOKENS": tile.tokens, "CHOICES": tile.choices, "EXPERTS": _EXPERTS}
    types = {**pointers, **ints, **dict.fromkeys((*constants, "RANKS", "ALL_RANKS"), "constexpr")}
    cases = [
        CompileCase(
            name=f"count_windows {ranks} ranks",
            kernel=count_windows_kernel,
            signature={name: types.get(name, "i64") for name in count_windows_kernel.arg_names},
            constexprs={**constants, "RANKS": min(_RANKS, ranks), "ALL_RANKS": ranks},
            is_listed=ranks in LISTED_RANKS,
        )
        for ranks in NUMBERS_OF_RANKS
    ]
    tiles = [block_tile(128, num_topk) for num_topk in (1, 16)]
    return cases + varied(cases[-1], ({"TOKENS": tile.tokens, "CHOICES": tile.choices} for tile in tiles))

"""What captured low-latency calls put over a network: messages and rows for ranks whose memory has no address here.

    T tokens of a source   E num_experts   E_local experts here   R num_ranks

    dispatch   pack (`captured_send`) | put one message for each far rank, its signal behind it
    combine    copy rows (`captured_combine`) | put those of each far rank home by expert, its signal behind them

A program makes all that goes to one rank, so one fence orders it: the signal is the last put's own, or a bare one, and
stands behind a fence. That orders it behind the puts, and behind the signal of the call before, too, so a lane that has
come to a number says that the bytes of all calls up to it are there. Nobody waits here. What is put may change when
another call writes to the same window: its rank has then seen signals that every peer has given behind having received
this one (docs/gpu-low-latency.md).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.captured import FarMemory
from moecomm.kernels.triton.captured_combine import Outputs
from moecomm.kernels.triton.captured_groups import Arrived
from moecomm.kernels.triton.captured_messages import MessageLayout, Windows, window_of
from moecomm.kernels.triton.captured_state import Control, Operation
from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.lanes import FAILED
from moecomm.kernels.triton.nvshmem_device import MOST_REGISTERS, fence, launch_linked, put, put_signal, signal

__all__ = ["linked_cases", "put_messages", "put_messages_kernel", "put_outputs", "put_outputs_kernel"]

_ELEMENTS = 2048


@triton.jit
def _is_due(boards: tl.tensor, to: tl.int32, status: tl.tensor) -> tl.tensor:
    """Whether a rank is far and no call has failed; the same for all threads."""
    failed = tl.atomic_add(status + FAILED, 0, sem="relaxed", scope="gpu")
    return (failed == 0) & (tl.load(boards + to) == 0)


@triton.jit(
    do_not_specialize=[
        *("packed", "windows", "message_bytes", "num_windows", "rows_offset", "row_bytes", "rank", "num_ranks"),
        *("board", "lane"),
    ],
    do_not_specialize_on_alignment=["totals", "ticket", "boards", "pes", "status"],
)
def put_messages_kernel(
    packed: tl.int64,
    windows: tl.int64,
    message_bytes: tl.int64,
    num_windows: tl.int64,
    rows_offset: tl.int64,
    row_bytes: tl.int64,
    totals: tl.tensor,
    ticket: tl.tensor,
    rank: tl.int32,
    num_ranks: tl.int32,
    boards: tl.tensor,
    pes: tl.tensor,
    board: tl.int64,
    lane: tl.int64,
    status: tl.tensor,
) -> None:
    """A program for each rank, those behind me first: puts the message for it, as far as it holds something.

    Arguments:
        packed, windows: addresses of `[num_windows, R, message_bytes]` of mine: messages by destination, by source.
        totals: `[R]` int32: rows of the message for each rank.
        boards: `[R]` int64: 0 = the rank is far.
        pes: `[R]` int32: PE of each rank.
        board: address of my board.
    """
    to = (rank + 1 + tl.program_id(0)) % num_ranks
    if _is_due(boards, to, status):
        number = tl.load(ticket)
        source = window_of(packed + to * message_bytes, message_bytes, num_windows, num_ranks, number)
        target = window_of(windows + rank * message_bytes, message_bytes, num_windows, num_ranks, number)
        nbytes = rows_offset + tl.load(totals + to).to(tl.int64) * row_bytes
        fence()
        put_signal(target, source, nbytes, board + lane * 8, 1, tl.load(pes + to))


@triton.jit(
    do_not_specialize=[
        *("outputs", "output_bytes", "landings", "landing_bytes", "num_windows", "row_bytes"),
        *("num_experts", "num_local", "rank", "num_ranks", "board", "lane"),
    ],
    do_not_specialize_on_alignment=[
        *("counts", "first_rows", "expert_rank", "expert_local", "runs", "ticket", "boards", "pes", "status"),
    ],
)
def put_outputs_kernel(
    outputs: tl.int64,
    output_bytes: tl.int64,
    landings: tl.int64,
    landing_bytes: tl.int64,
    num_windows: tl.int64,
    row_bytes: tl.int64,
    counts: tl.tensor,
    first_rows: tl.tensor,
    expert_rank: tl.tensor,
    expert_local: tl.tensor,
    num_experts: tl.int32,
    num_local: tl.int32,
    runs: tl.tensor,
    ticket: tl.tensor,
    rank: tl.int32,
    num_ranks: tl.int32,
    boards: tl.tensor,
    pes: tl.tensor,
    board: tl.int64,
    lane: tl.int64,
    status: tl.tensor,
    EXPERTS: tl.constexpr,
    SOURCES: tl.constexpr,
) -> None:
    """A program for each rank, those behind me first: puts the rows of its tokens, a run from each expert of mine.

    Arguments:
        outputs, landings: addresses of mine, of `num_windows` times so many bytes.
        counts: `[R, E + R]` int32, of each source.
        first_rows: `[E_local]` int64: of each expert's rows.
        runs: `[R, E_local, 3]` int64, overwritten: for each rank the rows where runs begin there and here, and rows.
        EXPERTS: a power of two, at least E; SOURCES of them are looked at together.
    """
    to = (rank + 1 + tl.program_id(0)) % num_ranks
    if _is_due(boards, to, status):
        number = tl.load(ticket)
        source = window_of(outputs, output_bytes, num_windows, 1, number)
        target = window_of(landings, landing_bytes, num_windows, 1, number)
        num_columns = num_experts + num_ranks
        e = tl.arange(0, EXPERTS)
        count = tl.load(counts + to.to(tl.int64) * num_columns + e, mask=e < num_experts, other=0)
        landing = tl.cumsum(count, axis=0) - count
        is_mine = tl.load(expert_rank + e, mask=e < num_experts, other=-1) == rank
        row = tl.load(first_rows + tl.load(expert_local + e, mask=is_mine, other=0), mask=is_mine, other=0)
        for first in range(0, to, SOURCES):
            s = first + tl.arange(0, SOURCES)
            place = counts + s.to(tl.int64)[:, None] * num_columns + e[None, :]
            row += tl.sum(tl.load(place, mask=(s < to)[:, None] & is_mine[None, :], other=0), axis=0)
        is_run = is_mine & (count > 0)
        position = tl.cumsum(is_run.to(tl.int32), axis=0) - 1
        mine = runs + to.to(tl.int64) * num_local * 3
        tl.store(mine + position * 3, landing.to(tl.int64), mask=is_run)
        tl.store(mine + position * 3 + 1, row, mask=is_run)
        tl.store(mine + position * 3 + 2, count.to(tl.int64), mask=is_run)
        last = tl.sum(is_run.to(tl.int32), axis=0) - 1
        tl.debug_barrier()
        pe = tl.load(pes + to)
        for i in range(0, last):
            put(
                target + tl.load(mine + i * 3) * row_bytes,
                source + tl.load(mine + i * 3 + 1) * row_bytes,
                tl.load(mine + i * 3 + 2) * row_bytes,
                pe,
            )
        fence()
        if last >= 0:
            put_signal(
                target + tl.load(mine + last * 3) * row_bytes,
                source + tl.load(mine + last * 3 + 1) * row_bytes,
                tl.load(mine + last * 3 + 2) * row_bytes,
                board + lane * 8,
                1,
                pe,
            )
        else:
            signal(board + lane * 8, 1, pe)


def put_messages(
    control: Control,
    operation: Operation,
    ticket: Tensor,
    far: FarMemory,
    windows: Windows,
    layout: MessageLayout,
    row_bytes: int,
    totals: Tensor,
) -> None:
    """Goes on with a call that `send_messages` has begun: puts what that has packed for far ranks, and signals them."""
    wire = far.wire
    launch_linked(
        put_messages_kernel,
        control.num_ranks,
        ticket.device,
        wire.library,
        *(far.packed, windows.address, windows.message_bytes, control.num_windows, layout.rows, row_bytes),
        *(totals, ticket, control.rank, control.num_ranks, control.boards, wire.pes),
        *(wire.board, wire.lane(operation.slot), control.status),
    )


def put_outputs(
    control: Control,
    operation: Operation,
    ticket: Tensor,
    far: FarMemory,
    outputs: Outputs,
    row_bytes: int,
    arrived: Arrived,
    experts: tuple[Tensor, Tensor],
    runs: Tensor,
) -> None:
    """Goes on with a call that `send_outputs` has begun: puts rows home to far ranks, and signals them.

    Arguments:
        outputs: where that has left the rows.
        experts: the rank of each, its index there.
        runs: see the kernel.
    """
    wire, num_experts = far.wire, experts[0].numel()
    launch_linked(
        put_outputs_kernel,
        control.num_ranks,
        ticket.device,
        wire.library,
        *(outputs.mine, outputs.nbytes, far.landings, far.landing_bytes, control.num_windows, row_bytes),
        *(arrived.counts, arrived.first_rows, *experts, num_experts, arrived.first_rows.numel(), runs, ticket),
        *(control.rank, control.num_ranks, control.boards, wire.pes, wire.board, wire.lane(operation.slot)),
        control.status,
        **_tile(num_experts),
    )


def _tile(num_experts: int) -> dict[str, int]:
    experts = int(triton.next_power_of_2(num_experts))
    return {"EXPERTS": experts, "SOURCES": max(1, _ELEMENTS // experts)}


def linked_cases() -> list[CompileCase]:
    """Some experts and many."""
    wide = ("first_rows", "runs", "ticket", "boards", "status")
    narrow = ("totals", "counts", "expert_rank", "expert_local", "pes")
    types = {**dict.fromkeys(wide, "*i64"), **dict.fromkeys(narrow, "*i32")}
    types |= dict.fromkeys(("num_experts", "num_local", "rank", "num_ranks"), "i32")
    cases = [_case("put_messages", put_messages_kernel, types, {})]
    return cases + [_case(f"put_outputs {e} experts", put_outputs_kernel, types, _tile(e)) for e in (2, 256, 512)]


def _case(name: str, kernel: Any, types: dict[str, str], constants: dict[str, int]) -> CompileCase:
    types = {**types, **dict.fromkeys(constants, "constexpr")}
    signature = {argument: types.get(argument, "i64") for argument in kernel.arg_names}
    return CompileCase(
        name=name, kernel=kernel, signature=signature, constexprs=constants, max_registers=MOST_REGISTERS
    )

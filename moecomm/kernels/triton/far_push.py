"""Runs of bytes to ranks whose memory has no address here, and one signal to each rank behind all of its bytes.

    R ranks   N runs: bytes that lie next to each other in both places   lane: see `lanes`

Pointer or put is decided by tables: a kernel that stores rows is given the address of a near rank's memory, and for
a far rank that of packed memory of one's own. What was packed is put from there, run by run. The signal to a near rank
is a release of its lane, as it has been stored to by earlier kernels of the stream; the signal to a far rank follows
its puts: behind a fence and on the last of them if one program makes them all, else behind every program's quiet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.far_runs import Memory, Runs
from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.lanes import FAILED, SEEN, release_lane
from moecomm.kernels.triton.nvshmem_device import (
    MOST_REGISTERS,
    fence,
    launch_linked,
    put,
    put_signal,
    quiet,
    signal,
)
from moecomm.kernels.triton.runtime import check_device
from moecomm.kernels.wire import Wire

__all__ = ["check_status", "far_push", "far_push_kernel", "linked_cases"]


@triton.jit
def is_last_part(arrivals: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Whether the other programs of this rank have come here; as `lanes.is_last_program` for a part of a grid."""
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    is_last = before == PARTS - 1
    if is_last:
        tl.store(arrivals, 0)
    return is_last


@triton.jit(
    do_not_specialize=["source", "region", "rank", "num_ranks", "board", "lane", "n"],
    do_not_specialize_on_alignment=["runs", "starts", "boards", "pes", "arrivals", "status"],
)
def far_push_kernel(
    runs: tl.tensor,
    starts: tl.tensor,
    source: tl.int64,
    region: tl.int64,
    rank: tl.int32,
    num_ranks: tl.int32,
    boards: tl.tensor,
    pes: tl.tensor,
    board: tl.int64,
    lane: tl.int64,
    n: tl.int64,
    arrivals: tl.tensor,
    status: tl.tensor,
    HAS_STATUS: tl.constexpr,
    QUIET: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """PARTS programs for each rank, those behind `rank` first: put its runs if it is far, signal it in any case.

    Arguments:
        runs: `[N, 3]` int64, by rank: offset in the region, offset from the source, bytes (at least 1).
        starts: `[R + 1]` int64: where the runs of each rank begin.
        source: address of what is put; in the symmetric heap.
        region: address of my part of the region.
        boards: `[R]` int64: address of each rank's board here, 0 = the rank is far.
        pes: `[R]` int32: PE of each rank.
        board: address of my board.
        arrivals: `[R]` int32, as in `is_last_part`; unused if PARTS is 1.
        HAS_STATUS: nothing is put or signalled once a wait has failed.
        QUIET: what was put may change once the kernel has ended.
    """
    to = (rank + 1 + tl.program_id(0) // PARTS) % num_ranks
    part = tl.program_id(0) % PARTS
    failed = tl.cast(0, tl.int64)
    if HAS_STATUS:
        failed = tl.atomic_add(status + FAILED, 0, sem="relaxed", scope="gpu")  # the same for all threads
    if failed == 0:
        if tl.load(boards + to) != 0:
            if part == 0:
                release_lane(boards + to, 1, lane, n, 1)
        else:
            pe = tl.load(pes + to)
            counter = board + lane * 8
            run = tl.load(starts + to)
            end = tl.load(starts + to + 1)
            if PARTS == 1:
                last = end - 1
                for i in range(run, last):
                    put(
                        region + tl.load(runs + 3 * i),
                        source + tl.load(runs + 3 * i + 1),
                        tl.load(runs + 3 * i + 2),
                        pe,
                    )
                if run < last:
                    fence()
                if run < end:
                    put_signal(
                        region + tl.load(runs + 3 * last),
                        source + tl.load(runs + 3 * last + 1),
                        tl.load(runs + 3 * last + 2),
                        counter,
                        n,
                        pe,
                    )
                else:
                    signal(counter, n, pe)
                if QUIET:
                    quiet()
            else:
                for i in range(run + part, end, PARTS):
                    put(
                        region + tl.load(runs + 3 * i),
                        source + tl.load(runs + 3 * i + 1),
                        tl.load(runs + 3 * i + 2),
                        pe,
                    )
                quiet()
                if is_last_part(arrivals + to, PARTS):
                    signal(counter, n, pe)


def check_status(status: Tensor, wire: Wire) -> None:
    """Refuses what `signals.make_status` has not made for so many ranks.

    Raises:
        ValueError: it is of another kind, size or device.
    """
    words, device = SEEN.value + wire.num_ranks, wire.boards.device
    if status.dtype is not torch.int64 or status.shape != (words,) or status.device != device:
        raise ValueError(
            f"status is {status.dtype} {list(status.shape)} on {status.device}; wanted torch.int64 [{words}] on "
            f"{device}"
        )


def far_push(
    wire: Wire,
    runs: Runs,
    *,
    source: Memory,
    region: Memory,
    slot: int,
    n: int = 1,
    parts: int = 1,
    quiet: bool = True,
    arrivals: Tensor | None = None,
    status: Tensor | None = None,
    to: int | None = None,
) -> None:
    """Puts runs to far ranks and signals all ranks, after all work that the current stream has been given before.

    Arguments:
        wire: who is reached how.
        runs: from `make_runs`; none for near ranks.
        source: what is put.
        region: my part of the region that is put to.
        slot: of every rank's board; n is added to my lane of it.
        parts: programs per rank. 1: least latency; more where one program does not keep the network busy.
        quiet: what lies at the source may change when the kernel has ended. Without it only after every far rank has
            answered; with parts above 1 it holds in any case.
        arrivals: `[R]` int32 zeros, if parts is above 1: for one launch at a time.
        status: from `signals.make_status`; once a wait has failed, nothing is put or signalled.
        to: the only rank that something is put to, and that is signalled; None: all.

    Raises:
        ValueError: an argument is not as said.
    """
    device = check_device("boards", wire.boards)
    num_ranks, lane = wire.num_ranks, wire.lane(slot)
    if runs.starts.shape != (num_ranks + 1,) or runs.starts.device != device or runs.table.device != device:
        raise ValueError(
            f"runs is for {runs.starts.numel() - 1} ranks on {runs.starts.device}; wanted {num_ranks} on {device}"
        )
    for name, memory, nbytes in (("source", source, runs.source_bytes), ("region", region, runs.region_bytes)):
        if nbytes > memory.nbytes:
            raise ValueError(f"{name} has {memory.nbytes} bytes, but runs reach to byte {nbytes}")
    if n < 0 or parts < 1:
        raise ValueError(f"n is {n} and parts is {parts}; at least 0 and 1 are needed")
    if parts > 1 and (
        arrivals is None
        or arrivals.dtype is not torch.int32
        or arrivals.shape != (num_ranks,)
        or arrivals.device != device
    ):
        found = "None" if arrivals is None else f"{arrivals.dtype} {list(arrivals.shape)} on {arrivals.device}"
        raise ValueError(f"arrivals is {found}; with {parts} parts wanted torch.int32 [{num_ranks}] on {device}")
    if status is not None:
        check_status(status, wire)
    if to is not None and not 0 <= to < num_ranks:
        raise ValueError(f"to is {to}; there are {num_ranks} ranks")
    launch_linked(
        far_push_kernel,
        parts * (num_ranks if to is None else 1),
        device,
        wire.library,
        *(
            runs.table,
            runs.starts,
            source.address,
            region.address,
            wire.rank if to is None else (to - 1) % num_ranks,
            num_ranks,
            wire.boards,
            wire.pes,
            wire.board,
            lane,
            n,
        ),
        *(wire.pes if arrivals is None else arrivals, wire.boards if status is None else status),
        HAS_STATUS=status is not None,
        QUIET=quiet,
        PARTS=parts,
    )


def linked_cases() -> list[CompileCase]:
    """One program per rank, without and with a status, and four; as queues and others launch them."""
    return [
        CompileCase(
            name=f"far_push with {parts} per rank{', unless a wait has failed' if status else ''}",
            kernel=far_push_kernel,
            max_registers=MOST_REGISTERS,
            signature={
                **dict.fromkeys(["runs", "starts", "boards", "status"], "*i64"),
                **dict.fromkeys(["source", "region", "board", "lane", "n"], "i64"),
                **dict.fromkeys(["rank", "num_ranks"], "i32"),
                **dict.fromkeys(["pes", "arrivals"], "*i32"),
                **dict.fromkeys(["HAS_STATUS", "QUIET", "PARTS"], "constexpr"),
            },
            constexprs={"HAS_STATUS": status, "QUIET": True, "PARTS": parts},
        )
        for parts, status in ((1, False), (1, True), (4, True))
    ]

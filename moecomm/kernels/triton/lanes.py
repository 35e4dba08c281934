"""Counters by which GPUs tell each other how far they are, in device code: release, acquire, a wait that ends.

    R ranks   slot: a purpose that counters serve   lane: one counter, of one slot and one source

Every rank has a board `[num_slots, R]` int64 in memory that all ranks address, zero at first. Lane (slot, source) is
added to by that source only and read by the board's owner; it only grows, and a waiter asks for "at least". Lanes lie
side by side, unlike those of csrc/sync/board.h with a cache line each: a waiting program looks at all R of them at
once, and atomics of several GPUs on one line do not slow each other, being carried out where the line lives.

What the code relies on, and what the PTX shows (Triton 3.6 and 3.9, sm_80, sm_90 and sm_100 alike):

- A program's stores come from many threads, its release from one. `release_lane` therefore has a block barrier,
  `bar.sync`, and behind it `red.release.sys.add` (`atom.release.sys.add` from Triton 3.6). The barrier orders the
  stores of all threads before the release; causality is transitive, so whoever acquires sees them all. Triton 3.6 puts
  no barrier there by itself, 3.9 does.
- The acquire is `atom.acquire.sys.add` of zero, which all versions have. A block barrier stands behind it, so that
  loads of the program's other threads come after it.
- In one grid `atom.acq_rel.gpu.add` on a counter carries the stores of the programs that came before to the one that
  comes last, which releases them to the system with its own. A block barrier stands on both sides.
- Kernels of one stream are in order: a signal that is a kernel of its own releases what the kernels before it stored.
- All threads of a program must leave a polling loop together, for there are barriers in it. So whatever ends the loop
  is read by one thread and handed to the others, as the result of an atomic is; what each thread loads or reads off
  the clock for itself may differ.
"""

from __future__ import annotations

import time
from typing import Any

import triton
import triton.language as tl

__all__ = [
    "CLOCK",
    "EXPECTED",
    "FAILED",
    "SEEN",
    "WAITED",
    "acquire_lanes",
    "acquire_some_lanes",
    "is_last_program",
    "nanoseconds",
    "release_from_last_program",
    "release_lane",
    "unless_failed",
]

# Words of a status, int64; behind them stands what was seen in each lane.
FAILED = tl.constexpr(0)  # 0 = no wait has failed, else 1 + the slot of the first that has
CLOCK = tl.constexpr(1)  # when a waiting program last looked at the clock
EXPECTED = tl.constexpr(2)
WAITED = tl.constexpr(3)  # nanoseconds
SEEN = tl.constexpr(4)

_POLLS_PER_LOOK = tl.constexpr(8)  # a look at the clock costs as much as a poll


def nanoseconds(_semantic: Any = None) -> Any:
    """The GPU's clock, in device code; differs between threads. Interpreted: the host's, and others get a turn."""
    if _semantic is None:
        time.sleep(0)
        return time.monotonic_ns()
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1, _semantic=_semantic
    )


setattr(nanoseconds, tl.core.TRITON_BUILTIN, True)


@triton.jit
def release_lane(boards: tl.tensor, num_boards: tl.int32, lane: tl.int64, n: tl.int64, BOARDS: tl.constexpr) -> None:
    """Adds n to one lane of every board, after all stores that this program has made.

    Arguments:
        boards: `[num_boards]` int64 addresses; 0 = none, skipped.
        lane: slot * R + my rank.
        BOARDS: a power of two, at least num_boards.
    """
    peers = tl.arange(0, BOARDS)
    board = tl.load(boards + peers, mask=peers < num_boards, other=0)
    counters = (board + lane * 8).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()
    tl.atomic_add(counters, n, mask=board != 0, sem="release", scope="sys")


@triton.jit
def is_last_program(arrivals: tl.tensor) -> tl.tensor:
    """Whether all other programs of the grid have come here; the last one sees their stores and may release them.

    Arguments:
        arrivals: one int32, 0 before the first launch and again after each; one for each launch that may run at a time.
    """
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    is_last = before == tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) - 1
    if is_last:
        tl.store(arrivals, 0)
    return is_last


@triton.jit
def release_from_last_program(
    arrivals: tl.tensor,
    boards: tl.tensor,
    num_boards: tl.int32,
    lane: tl.int64,
    n: tl.int64,
    BOARDS: tl.constexpr,
) -> None:
    """Ends every program of a grid: the last one signals, once for all. As `is_last_program` and `release_lane`."""
    if is_last_program(arrivals):
        release_lane(boards, num_boards, lane, n, BOARDS)


@triton.jit
def acquire_lanes(
    board: tl.int64,
    slot: tl.int64,
    at_least: tl.int64,
    num_ranks: tl.int32,
    status: tl.tensor,
    timeout_ns: tl.int64,
    RANKS: tl.constexpr,
) -> tl.tensor:
    """Waits until every lane of a slot is at_least; the program's later loads see what the sources stored before.

    Any number of programs may wait with one status. Where an earlier wait has failed, this one gives up soon.

    Arguments:
        board: the address of mine.
        status: as in `make_status`; where the wait fails, and is the first, it is written.
        timeout_ns: of waiting before it fails.
        RANKS: a power of two, at least num_ranks.

    Returns:
        How many lanes are behind; 0 = reached, else what the sources have stored must not be used.
    """
    is_rank = tl.arange(0, RANKS) < num_ranks
    return acquire_some_lanes(board, slot, at_least, num_ranks, is_rank, status, timeout_ns, True, RANKS)


@triton.jit
def acquire_some_lanes(
    board: tl.int64,
    slot: tl.int64,
    at_least: tl.int64,
    num_ranks: tl.int32,
    is_awaited: tl.tensor,
    status: tl.tensor,
    timeout_ns: tl.int64,
    IS_ALL: tl.constexpr,
    RANKS: tl.constexpr,
) -> tl.tensor:
    """As `acquire_lanes`, for lanes of some sources: of those for which `is_awaited`, `[RANKS]`, is true.

    Arguments:
        IS_ALL: it is for all, so that none is left out of what the status says.
    """
    sources = tl.arange(0, RANKS)
    counters = (board + (slot * num_ranks + sources) * 8).to(tl.pointer_type(tl.int64))
    seen = tl.atomic_add(counters, 0, mask=is_awaited, sem="acquire", scope="sys")
    num_behind = tl.sum((is_awaited & (seen < at_least)).to(tl.int32))
    if num_behind > 0:
        tl.atomic_max(status + CLOCK, nanoseconds(), sem="relaxed", scope="gpu")
    polls = 0
    began = tl.cast(0, tl.int64)
    waited = tl.cast(0, tl.int64)
    gives_up = False
    while (num_behind > 0) & (not gives_up):
        seen = tl.atomic_add(counters, 0, mask=is_awaited, sem="acquire", scope="sys")
        num_behind = tl.sum((is_awaited & (seen < at_least)).to(tl.int32))
        polls += 1
        if polls % _POLLS_PER_LOOK == 0:
            # Not this program's clock but the latest look of any, before this one: the same for all threads.
            now = tl.atomic_max(status + CLOCK, nanoseconds(), sem="relaxed", scope="gpu")
            began = tl.where(polls == _POLLS_PER_LOOK, now, began)
            waited = now - began
            has_failed = tl.atomic_add(status + FAILED, 0, sem="relaxed", scope="gpu") != 0
            gives_up = has_failed | (waited >= timeout_ns)
    tl.debug_barrier()
    if num_behind > 0:
        before = tl.atomic_cas(
            status + FAILED, tl.cast(0, tl.int64), tl.cast(slot + 1, tl.int64), sem="relaxed", scope="gpu"
        )
        if before == 0:
            tl.store(status + EXPECTED, at_least)
            tl.store(status + WAITED, waited)
            if not IS_ALL:  # of the others nothing is missing
                seen = tl.where(is_awaited, seen, at_least)
            tl.store(status + SEEN + sources, seen, mask=sources < num_ranks)
    return num_behind


@triton.jit
def unless_failed(status: tl.tensor, number: tl.tensor) -> tl.tensor:
    """The number, or 0 if a wait of an earlier kernel has failed: of boards to signal or rows to push, say.

    Threads may disagree if a wait fails meanwhile: good for masks and bounds, not for what encloses a barrier.
    """
    return tl.where(tl.load(status + FAILED) == 0, number, 0)

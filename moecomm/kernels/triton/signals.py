"""Counters by which GPUs tell each other how far they are: release, acquire, and a wait that ends and reports.

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
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.errors import PeerTimeout
from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.runtime import check_device, launch

__all__ = [
    "acquire_lanes",
    "board_bytes",
    "compile_cases",
    "is_last_program",
    "make_status",
    "nanoseconds",
    "raise_if_behind",
    "release_from_last_program",
    "release_lane",
    "signal",
    "signal_all",
    "signal_kernel",
    "wait",
    "wait_kernel",
]

# Words of a status, int64; behind them stands what was seen in each lane.
_FAILED = tl.constexpr(0)  # 0 = no wait has failed, else 1 + the slot of the first that has
_CLOCK = tl.constexpr(1)  # when a waiting program last looked at the clock
_EXPECTED = tl.constexpr(2)
_WAITED = tl.constexpr(3)  # nanoseconds
_SEEN = tl.constexpr(4)

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
    sources = tl.arange(0, RANKS)
    is_rank = sources < num_ranks
    counters = (board + (slot * num_ranks + sources) * 8).to(tl.pointer_type(tl.int64))
    seen = tl.atomic_add(counters, 0, mask=is_rank, sem="acquire", scope="sys")
    num_behind = tl.sum((is_rank & (seen < at_least)).to(tl.int32))
    if num_behind > 0:
        tl.atomic_max(status + _CLOCK, nanoseconds(), sem="relaxed", scope="gpu")
    polls = 0
    began = tl.cast(0, tl.int64)
    waited = tl.cast(0, tl.int64)
    gives_up = False
    while (num_behind > 0) & (not gives_up):
        seen = tl.atomic_add(counters, 0, mask=is_rank, sem="acquire", scope="sys")
        num_behind = tl.sum((is_rank & (seen < at_least)).to(tl.int32))
        polls += 1
        if polls % _POLLS_PER_LOOK == 0:
            # Not this program's clock but the latest look of any, before this one: the same for all threads.
            now = tl.atomic_max(status + _CLOCK, nanoseconds(), sem="relaxed", scope="gpu")
            began = tl.where(polls == _POLLS_PER_LOOK, now, began)
            waited = now - began
            has_failed = tl.atomic_add(status + _FAILED, 0, sem="relaxed", scope="gpu") != 0
            gives_up = has_failed | (waited >= timeout_ns)
    tl.debug_barrier()
    if num_behind > 0:
        before = tl.atomic_cas(
            status + _FAILED, tl.cast(0, tl.int64), tl.cast(slot + 1, tl.int64), sem="relaxed", scope="gpu"
        )
        if before == 0:
            tl.store(status + _EXPECTED, at_least)
            tl.store(status + _WAITED, waited)
            tl.store(status + _SEEN + sources, seen, mask=is_rank)
    return num_behind


@triton.jit(do_not_specialize=["num_boards", "lane", "n"], do_not_specialize_on_alignment=["boards"])
def signal_kernel(boards: tl.tensor, num_boards: tl.int32, lane: tl.int64, n: tl.int64, BOARDS: tl.constexpr) -> None:
    """One program. As `release_lane`."""
    release_lane(boards, num_boards, lane, n, BOARDS)


@triton.jit(
    do_not_specialize=["board", "slot", "at_least", "num_ranks", "timeout_ns"],
    do_not_specialize_on_alignment=["expected"],
)
def wait_kernel(
    board: tl.int64,
    slot: tl.int64,
    at_least: tl.int64,
    expected: tl.tensor,
    num_ranks: tl.int32,
    status: tl.tensor,
    timeout_ns: tl.int64,
    FROM_MEMORY: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """One program. As `acquire_lanes`; FROM_MEMORY: at_least stands at `expected`, one int64."""
    if FROM_MEMORY:
        acquire_lanes(board, slot, tl.load(expected), num_ranks, status, timeout_ns, RANKS)
    else:
        acquire_lanes(board, slot, at_least, num_ranks, status, timeout_ns, RANKS)


def board_bytes(num_ranks: int, num_slots: int) -> int:
    """What a board takes; its memory must be zero at first and begin at a multiple of 8."""
    return num_ranks * num_slots * 8


def make_status(num_ranks: int, device: torch.device | str) -> Tensor:
    """A place where waits say that they have failed: `[4 + R]` int64, zero as long as none has."""
    return torch.zeros(_SEEN.value + num_ranks, dtype=torch.int64, device=device)


def signal_all(boards: Tensor, rank: int, slot: int, *, n: int = 1) -> None:
    """Adds n to lane (slot, rank) of every board, after all work that the current stream has been given before.

    Arguments:
        boards: `[R]` int64, the address of each rank's board here; 0 = none, skipped.
        rank: mine.
        slot: of the board.
        n: 0 or more.

    Raises:
        ValueError: boards is not such a table, or a number is out of range.
    """
    _signal(boards, boards, rank, slot, n)


def signal(boards: Tensor, rank: int, slot: int, *, peer: int, n: int = 1) -> None:
    """Adds n to lane (slot, rank) of one peer's board; the rest as in `signal_all`."""
    if not 0 <= peer < boards.numel():
        raise ValueError(f"peer is {peer}, but boards has {boards.numel()} addresses")
    _signal(boards, boards[peer : peer + 1], rank, slot, n)


def _signal(boards: Tensor, targets: Tensor, rank: int, slot: int, n: int) -> None:
    if boards.dtype is not torch.int64 or boards.dim() != 1 or not boards.is_contiguous():
        raise ValueError(f"boards is {boards.dtype} {list(boards.shape)}; wanted contiguous torch.int64 [R]")
    num_ranks = boards.numel()
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}, but boards has {num_ranks} addresses")
    if slot < 0 or n < 0:
        raise ValueError(f"slot is {slot} and n is {n}; neither may be negative")
    launch(
        signal_kernel,
        1,
        check_device("boards", boards),
        *(targets, targets.numel(), slot * num_ranks + rank, n),
        BOARDS=triton.next_power_of_2(targets.numel()),
        num_warps=1,
    )


def wait(board: int, slot: int, at_least: int | Tensor, *, status: Tensor, timeout_ns: int) -> None:
    """Lets the current stream wait until every lane of a slot of my board is at_least.

    Work that the stream is given afterwards sees what the sources stored before they signalled, unless `status` says
    that the wait has failed; look with `raise_if_behind` before results are used.

    Arguments:
        board: the address of mine.
        slot: of the board.
        at_least: a number, or one int64 on the device, which is read when the wait begins: so a captured graph can be
            replayed.
        status: from `make_status`; a wait that fails writes it. While it says that one has failed, waits that do not
            find their lanes ready give up at once.
        timeout_ns: after so many nanoseconds the wait fails.

    Raises:
        ValueError: status or at_least is not as said, or a number is negative.
    """
    num_ranks = status.numel() - _SEEN.value
    if status.dtype is not torch.int64 or status.dim() != 1 or not status.is_contiguous() or num_ranks < 1:
        raise ValueError(f"status is {status.dtype} {list(status.shape)}; wanted what make_status gives")
    device = check_device("status", status)
    if isinstance(at_least, Tensor):
        if at_least.dtype is not torch.int64 or at_least.numel() != 1 or at_least.device != device:
            raise ValueError(
                f"at_least is {at_least.dtype} {list(at_least.shape)} on {at_least.device}; "
                f"wanted one torch.int64 on {device}"
            )
        value, expected = 0, at_least
    else:
        value, expected = at_least, status
    if slot < 0 or value < 0 or timeout_ns < 0:
        raise ValueError(f"slot is {slot}, at_least {value}, timeout_ns {timeout_ns}; none may be negative")
    launch(
        wait_kernel,
        1,
        device,
        *(board, slot, value, expected, num_ranks, status, timeout_ns),
        FROM_MEMORY=isinstance(at_least, Tensor),
        RANKS=triton.next_power_of_2(num_ranks),
        num_warps=1,
    )


def raise_if_behind(
    status: Tensor, operation: str, *, describe: Callable[[int], str] = lambda rank: f"rank {rank}"
) -> None:
    """Says what a wait on the device has failed for; on a GPU it waits for the work given so far.

    Arguments:
        status: as given to `wait`. It keeps what it says until it is zeroed.
        operation: the call, for the message, such as `dispatch #17`.
        describe: names a rank.

    Raises:
        PeerTimeout: a wait has failed; `peers` are the ranks that were behind.
    """
    words = status.tolist()
    if words[_FAILED.value] == 0:
        return
    expected, seconds = words[_EXPECTED.value], words[_WAITED.value] * 1e-9
    behind = {rank: seen for rank, seen in enumerate(words[_SEEN.value :]) if seen < expected}
    details = "; ".join(f"{describe(rank)}: counter at {seen}, expected {expected}" for rank, seen in behind.items())
    raise PeerTimeout(
        f"{operation}: slot {words[_FAILED.value] - 1}: the device waited {seconds:.3g} s for {details}. Every rank "
        "must make the same calls, also with zero tokens; if a rank is merely slow, give a larger timeout",
        operation=operation,
        peers=tuple(behind),
    )


def compile_cases() -> list[CompileCase]:
    """Signals, and waits for both kinds of value, for up to 8 and up to 128 ranks."""
    cases = []
    for ranks in (8, 128):
        cases.append(
            CompileCase(
                name=f"signal {ranks} ranks",
                kernel=signal_kernel,
                signature={"boards": "*i64", "num_boards": "i32", "lane": "i64", "n": "i64", "BOARDS": "constexpr"},
                constexprs={"BOARDS": ranks},
                num_warps=1,
            )
        )
        for from_memory in (False, True):
            cases.append(
                CompileCase(
                    name=f"wait {ranks} ranks{', value in memory' if from_memory else ''}",
                    kernel=wait_kernel,
                    signature={
                        "board": "i64",
                        "slot": "i64",
                        "at_least": "i64",
                        "expected": "*i64",
                        "num_ranks": "i32",
                        "status": "*i64",
                        "timeout_ns": "i64",
                        "FROM_MEMORY": "constexpr",
                        "RANKS": "constexpr",
                    },
                    constexprs={"FROM_MEMORY": from_memory, "RANKS": ranks},
                    num_warps=1,
                )
            )
    return cases

"""Signals between GPUs and waits for them, as kernels in the order of a stream; what they do is in `lanes`.

    R ranks   slot: a purpose that counters serve   lane: one counter, of one slot and one source

A wait never hangs: it ends after its time and leaves a report in a status, which the host turns into an error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.errors import PeerTimeout
from moecomm.kernels.triton.compile_case import LISTED_RANKS, NUMBERS_OF_RANKS, CompileCase
from moecomm.kernels.triton.lanes import EXPECTED, FAILED, SEEN, WAITED, acquire_lanes, release_lane, unless_failed
from moecomm.kernels.triton.runtime import check_device, launch

__all__ = [
    "board_bytes",
    "check_status",
    "compile_cases",
    "expected_of",
    "make_status",
    "raise_if_behind",
    "signal",
    "signal_all",
    "signal_kernel",
    "wait",
    "wait_kernel",
]


@triton.jit(do_not_specialize=["num_boards", "lane", "n"], do_not_specialize_on_alignment=["boards"])
def signal_kernel(
    boards: tl.tensor,
    num_boards: tl.int32,
    lane: tl.int64,
    n: tl.int64,
    status: tl.tensor,
    HAS_STATUS: tl.constexpr,
    BOARDS: tl.constexpr,
) -> None:
    """One program. As `release_lane`; HAS_STATUS: only if no wait has failed."""
    if HAS_STATUS:
        num_boards = unless_failed(status, num_boards)
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
    return torch.zeros(SEEN.value + num_ranks, dtype=torch.int64, device=device)


def check_status(status: Tensor | None, device: torch.device) -> None:
    """Refuses what is no status on this device; None is fine.

    Raises:
        ValueError: of another dtype, shape or device.
    """
    if status is None:
        return
    is_like_one = status.dtype is torch.int64 and status.dim() == 1 and status.numel() > SEEN.value
    if not is_like_one or not status.is_contiguous() or status.device != device:
        raise ValueError(
            f"status is {status.dtype} {list(status.shape)} on {status.device}; wanted contiguous torch.int64 "
            f"[{SEEN.value} + R] on {device}, as from make_status"
        )


def signal_all(boards: Tensor, rank: int, slot: int, *, n: int = 1, status: Tensor | None = None) -> None:
    """Adds n to lane (slot, rank) of every board, after all work that the current stream has been given before.

    Arguments:
        boards: `[R]` int64, the address of each rank's board here; 0 = none, skipped.
        rank: mine.
        slot: of the board.
        n: 0 or more.
        status: as given to `wait`: once a wait has failed, nothing is added, so that no peer goes on with what this
            rank could not do. None: adds in any case.

    Raises:
        ValueError: boards or status is not such a table, or a number is out of range.
    """
    _signal(boards, boards, rank, slot, n, status)


def signal(boards: Tensor, rank: int, slot: int, *, peer: int, n: int = 1, status: Tensor | None = None) -> None:
    """Adds n to lane (slot, rank) of one peer's board; the rest as in `signal_all`."""
    if not 0 <= peer < boards.numel():
        raise ValueError(f"peer is {peer}, but boards has {boards.numel()} addresses")
    _signal(boards, boards[peer : peer + 1], rank, slot, n, status)


def _signal(boards: Tensor, targets: Tensor, rank: int, slot: int, n: int, status: Tensor | None) -> None:
    if boards.dtype is not torch.int64 or boards.dim() != 1 or not boards.is_contiguous():
        raise ValueError(f"boards is {boards.dtype} {list(boards.shape)}; wanted contiguous torch.int64 [R]")
    num_ranks = boards.numel()
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}, but boards has {num_ranks} addresses")
    if slot < 0 or n < 0:
        raise ValueError(f"slot is {slot} and n is {n}; neither may be negative")
    if status is not None:
        _check_status(status, num_ranks)
    launch(
        signal_kernel,
        1,
        check_device("boards", boards),
        *(targets, targets.numel(), slot * num_ranks + rank, n, boards if status is None else status),
        HAS_STATUS=status is not None,
        BOARDS=triton.next_power_of_2(targets.numel()),
        num_warps=1,
    )


def _check_status(status: Tensor, num_ranks: int) -> int:
    words = SEEN.value + num_ranks
    if status.dtype is not torch.int64 or status.shape != (words,) or not status.is_contiguous():
        raise ValueError(f"status is {status.dtype} {list(status.shape)}; wanted contiguous torch.int64 [{words}]")
    return num_ranks


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
    num_ranks = _check_status(status, max(1, status.numel() - SEEN.value))
    device = check_device("status", status)
    value, expected = expected_of(at_least, status, timeout_ns)
    if slot < 0:
        raise ValueError(f"slot is {slot}; it may not be negative")
    launch(
        wait_kernel,
        1,
        device,
        *(board, slot, value, expected, num_ranks, status, timeout_ns),
        FROM_MEMORY=isinstance(at_least, Tensor),
        RANKS=triton.next_power_of_2(num_ranks),
        num_warps=1,
    )


def expected_of(at_least: int | Tensor, status: Tensor, timeout_ns: int) -> tuple[int, Tensor]:
    """What a wait is for, as kernels take it: a number, and where it stands if it is not that one.

    Raises:
        ValueError: it is not what `wait` takes, or a number is negative.
    """
    value, expected = (0, at_least) if isinstance(at_least, Tensor) else (at_least, status)
    if expected is at_least and (
        expected.dtype is not torch.int64 or expected.numel() != 1 or expected.device != status.device
    ):
        raise ValueError(
            f"at_least is {expected.dtype} {list(expected.shape)} on {expected.device}; "
            f"wanted one torch.int64 on {status.device}"
        )
    if value < 0 or timeout_ns < 0:
        raise ValueError(f"at_least is {value} and timeout_ns is {timeout_ns}; neither may be negative")
    return value, expected


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
    if words[FAILED.value] == 0:
        return
    expected, seconds = words[EXPECTED.value], words[WAITED.value] * 1e-9
    behind = {rank: seen for rank, seen in enumerate(words[SEEN.value :]) if seen < expected}
    details = "; ".join(f"{describe(rank)}: counter at {seen}, expected {expected}" for rank, seen in behind.items())
    raise PeerTimeout(
        f"{operation}: slot {words[FAILED.value] - 1}: the device waited {seconds:.3g} s for {details}. Every rank "
        "must make the same calls, also with zero tokens; if a rank is merely slow, give a larger timeout",
        operation=operation,
        peers=tuple(behind),
    )


def compile_cases() -> list[CompileCase]:
    """Signals, and waits for both kinds of value."""
    cases = []
    for ranks in NUMBERS_OF_RANKS:
        for has_status in (False, True):
            cases.append(
                CompileCase(
                    name=f"signal {ranks} ranks{', unless a wait has failed' if has_status else ''}",
                    kernel=signal_kernel,
                    signature={
                        "boards": "*i64",
                        "num_boards": "i32",
                        "lane": "i64",
                        "n": "i64",
                        "status": "*i64",
                        "HAS_STATUS": "constexpr",
                        "BOARDS": "constexpr",
                    },
                    constexprs={"HAS_STATUS": has_status, "BOARDS": ranks},
                    num_warps=1,
                    is_listed=ranks in LISTED_RANKS,
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
                    is_listed=ranks in LISTED_RANKS,
                )
            )
    return cases

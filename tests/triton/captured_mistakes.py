"""Device code of `lanes` with a mistake each, to be put in its place."""

import triton
import triton.language as tl

from moecomm.kernels.triton import lanes


@triton.jit
def release_nothing(boards, num_boards, lane, n, BOARDS: tl.constexpr):
    tl.debug_barrier()


@triton.jit
def last_without_barrier(arrivals):
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    is_last = before == tl.num_programs(0) - 1
    if is_last:
        tl.store(arrivals, 0)
    return is_last


@triton.jit
def last_by_relaxed_arrival(arrivals):
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    is_last = before == tl.num_programs(0) - 1
    if is_last:
        tl.store(arrivals, 0)
    return is_last


@triton.jit
def acquire_one_too_few(board, slot, at_least, num_ranks, status, timeout_ns, RANKS: tl.constexpr):
    return lanes.acquire_lanes(board, slot, at_least - 1, num_ranks, status, timeout_ns, RANKS)


@triton.jit
def acquire_without_barrier(board, slot, at_least, num_ranks, status, timeout_ns, RANKS: tl.constexpr):
    is_rank = tl.arange(0, RANKS) < num_ranks
    counters = (board + (slot * num_ranks + tl.arange(0, RANKS)) * 8).to(tl.pointer_type(tl.int64))
    num_behind = 1
    while num_behind > 0:
        seen = tl.atomic_add(counters, 0, mask=is_rank, sem="acquire", scope="sys")
        num_behind = tl.sum((is_rank & (seen < at_least)).to(tl.int32))
    return num_behind

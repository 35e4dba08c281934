"""Captured calls when memory and schedule are as unkind as a GPU's may be; mistakes in the protocol must come out."""

import pytest
import torch
import triton
import triton.language as tl
from captured_ranks import GUARD, CapturedRank, Case
from interpreter_chaos import Chaos

from moecomm.errors import CallMismatch
from moecomm.kernels.triton import captured, captured_messages, captured_plan, captured_send, lanes, signals

SEEDS = range(2)
MISTAKE_SEEDS = range(6)


def exchange(case, seed, num_calls, *, in_pairs=True):
    sizes = case.memory()[:3]
    memory = [torch.zeros(case.num_ranks, size // 8 + 8, dtype=torch.int64) for size in sizes]
    places = [[-(-row.data_ptr() // GUARD) * GUARD for row in one] for one in memory]
    ranks = [CapturedRank(case, rank, *places) for rank in range(case.num_ranks)]

    def body(rank):
        def calls():
            for call in range(num_calls):
                rank.pair(call) if in_pairs else rank.dispatch(call, case.inputs(call))

        return calls

    Chaos(seed, shared=memory, max_steps=400_000).run(*[body(rank) for rank in ranks])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, "slab", num_experts=3, hidden=5),
        Case(2, "expert_major", num_experts=3, hidden=8, values=None),
        Case(3, "slab", num_experts=3, hidden=2, weighted=False),
    ],
    ids=str,
)
def test_right_kernels_bear_it(case, seed):
    exchange(case, seed, 4 if case.num_ranks == 2 else 2)


# -- mistakes ----------------------------------------------------------------------------------------------------------


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


def signal_first(patch):
    plain = captured_send.launch

    def launch(kernel, num_programs, device, *args, **constants):
        begun, ticket, _, boards, slot, status = args[-6:]
        rank = int(args[-8])
        signals.signal_all(boards, rank, slot, status=status)
        plain(kernel, num_programs, device, *args, **constants)

    patch.setattr(captured_send, "release_lane", release_nothing)
    patch.setattr(captured_send, "launch", launch)


def plan_too_early(patch):
    patch.setattr(captured_plan, "_COLUMNS", 2)  # so that there are programs that the last one must wait for
    patch.setattr(captured_plan, "is_last_program", last_by_relaxed_arrival)


MISTAKES = {
    "signal before data": signal_first,
    "no barrier before the arrival": lambda patch: patch.setattr(
        captured_send, "is_last_program", last_without_barrier
    ),
    "relaxed arrival": lambda patch: patch.setattr(captured_send, "is_last_program", last_by_relaxed_arrival),
    "planning behind a relaxed arrival": plan_too_early,
    "dispatch waits for one too few": lambda patch: patch.setattr(
        captured_messages, "acquire_lanes", acquire_one_too_few
    ),
    "no barrier behind the acquire": lambda patch: patch.setattr(
        captured_messages, "acquire_lanes", acquire_without_barrier
    ),
    "combine waits for one too few": lambda patch: patch.setattr(signals, "acquire_lanes", acquire_one_too_few),
    "nothing becomes zero": lambda patch: patch.setattr(captured, "zero_rows", lambda *args: None),
}
WRONG = (AssertionError, CallMismatch, ValueError)


def is_caught(case, mistake=None, *, in_pairs=True):
    """Whether some seed gives other bits than the reference, or something that ranks refuse."""
    for seed in MISTAKE_SEEDS:
        with pytest.MonkeyPatch.context() as patch:
            if mistake is not None:
                MISTAKES[mistake](patch)
            try:
                exchange(case, seed, 5, in_pairs=in_pairs)
            except WRONG:
                return True
    return False


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_comes_out_with_one_of_six_seeds(mistake):
    assert is_caught(Case(2, "slab", num_experts=3, hidden=5), mistake), "wrong kernels have given right rows"


def test_one_window_too_few_comes_out():
    """With dispatches only: a combine between them keeps ranks closer together than they must be."""
    assert is_caught(Case(2, "expert_major", num_experts=3, hidden=5, too_few_windows=1), in_pairs=False)


def test_several_programs_that_plan_bear_it(monkeypatch):
    monkeypatch.setattr(captured_plan, "_COLUMNS", 2)
    exchange(Case(2, "slab", num_experts=3, hidden=5), 0, 2)

"""Captured calls when memory and schedule are as unkind as a GPU's may be; mistakes in the protocol must come out."""

import pytest
from captured_mistakes import (
    acquire_one_too_few,
    acquire_without_barrier,
    last_by_relaxed_arrival,
    last_without_barrier,
    release_nothing,
)
from captured_ranks import CapturedRank, Case
from captured_worlds import places_in
from interpreter_chaos import Chaos

from moecomm.errors import CallMismatch
from moecomm.kernels.triton import captured, captured_messages, captured_plan, captured_send, signals

SEEDS = range(2)
MISTAKE_SEEDS = range(6)


def exchange(case, seed, num_calls, *, in_pairs=True):
    memory, places = places_in(case.num_ranks, case.memory()[:3])
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

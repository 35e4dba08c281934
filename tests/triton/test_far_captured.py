"""Captured calls between domains: the reference's bits over a network that is late, replayed, and with mistakes."""

import pytest
import torch
from captured_ranks import Case
from far_captured import BETWEEN_CALLS, MISTAKES, call_after_call, is_right, replayed

from moecomm.testing import launch

CALLS = {"put", "put_signal", "signal", "fence", "refresh"}


def run(fn, num_ranks, *args, timeout=120):
    return launch(fn, num_ranks, *args, backend="processes", timeout=timeout)


@pytest.mark.parametrize(
    ("case", "per_domain"),
    [
        (Case(2, "slab", topk=3, hidden=13, weighted=False), 1),
        (Case(3, "expert_major", dtype=torch.float32, hidden=8, values=None, depth=2), 2),
        (Case(4, "expert_major", most=20, topk=5, num_experts=9, hidden=3, values=torch.float64), 3),
    ],
    ids=str,
)
def test_dozens_of_calls_give_what_the_reference_says(case, per_domain):
    for calls in run(call_after_call, case.num_ranks, case, per_domain, (0, 0, 9, 7, 3)[case.num_ranks], 1):
        # Nobody waits for the network but for what it brings.
        assert {"put_signal", "signal", "fence", "refresh"} <= set(calls) <= CALLS


@pytest.mark.parametrize(("num_ranks", "per_domain"), [(2, 1), (3, 2)])
def test_launches_of_one_call_can_be_replayed_with_new_contents(num_ranks, per_domain):
    run(replayed, num_ranks, Case(num_ranks, "slab", hidden=16), per_domain, 7, 2)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows_with_one_of_a_few_seeds(mistake):
    for seed in range(10):
        if False in run(is_right, 2, 1, mistake, mistake not in BETWEEN_CALLS, seed):
            return
    pytest.fail("with every seed the rows were right all the same")


@pytest.mark.parametrize("in_pairs", [True, False])
def test_without_a_mistake_nothing_shows(in_pairs):
    assert run(is_right, 2, 1, "", in_pairs, 0) == [True, True]

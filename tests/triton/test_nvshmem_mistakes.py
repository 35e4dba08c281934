"""A late network shows mistakes in the order of puts, signals and waits of whole communicators."""

import pytest
from nvshmem_mistakes import FEW, MANY, is_right
from nvshmem_ranks import run
from rails_mistakes import MISTAKES, are_right


@pytest.mark.parametrize(
    ("mistake", "has_weights"), [*((mistake, False) for mistake in FEW), *((mistake, True) for mistake in MANY)]
)
def test_what_is_in_order_is_right_and_mistakes_show_with_one_of_a_few_seeds(mistake, has_weights):
    if not mistake:
        assert run(is_right, 2, 1, mistake, has_weights, seed=1) == [True, True]
        return
    for seed in range(16):
        # A machine that is busy itself is late where a network should be: then it must be later still.
        if False in run(is_right, 2, 1, mistake, has_weights, seed=seed, slowness=(1, 10)[seed % 2]):
            return
    pytest.fail(f"with every seed the rows were right all the same: {mistake}")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rails_pass_on_and_sum_what_has_been_put_and_mistakes_show_with_one_of_a_few_seeds(mistake):
    are_wrong = [False] * 3
    for seed in range(8 if mistake else 1):
        for answers in run(are_right, 2, 1, mistake, seed=seed, slowness=10):
            are_wrong = [was or not is_right for was, is_right in zip(are_wrong, answers, strict=True)]
        if are_wrong == MISTAKES[mistake]:
            return
    pytest.fail(f"what is wrong of dispatches and combines: {are_wrong}")

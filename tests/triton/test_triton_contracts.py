"""The contracts of exchanges, held by interpreted kernels: between processes of one host, without a native kernel.

The oracle is the one that the native kernels are held to in tests/test_contracts.py, bit for bit: both give the same.
"""

import os
from dataclasses import dataclass, replace

import pytest
from watched_kernels import unwatch, watch

from moecomm.testing.contracts import World, algorithm, capacity, domains, low_latency
from moecomm.testing.contracts.cases import Case, cases_for

# Each case at one number of ranks, and few at four, for a launch takes milliseconds. The order is that in which
# domains.check_every_grid goes through the grids: a domain, pairs, the last rank apart, single ranks.
CASES = {
    1: (
        "odd number of experts",
        "top-64",
        "top-64, flat",
        "masked, flat, int32",
        "float8, flat",
        "no routes, flat",
        "no tokens anywhere",
    ),
    2: (
        "more choices than experts, flat",
        "one token each",
        "bytes",
        "fewer experts than ranks, duplicates, aligned",
        "many tokens to one rank",
    ),
    3: (
        "no tokens anywhere, flat",
        "strided inputs",
        "a hot expert, top-1",
        "columns of one, duplicates, flat",
        "only the last rank has tokens",
    ),
    4: (
        "no routes",
        "masked, double, aligned",
        "odd number of experts",
        "strided inputs, flat",
    ),
}
# In the place of check_rows_of_many_pages: its megabytes take minutes here, and are for kernels that go other ways with
# them; Triton's do so with wide rows alone.
WIDE = Case("wide rows", (2, 1), hidden=1537, num_experts=6, num_topk=4, expert_alignment=4)
MOST_ROUTES = 64


def few_cases(num_ranks):
    """Those of CASES, with fewer tokens."""
    cases = {case.name: _small(case) for case in cases_for(num_ranks)}
    return [*(cases[name] for name in CASES[num_ranks]), *([WIDE] if num_ranks == WIDE.num_ranks else [])]


def _small(case):
    most = max(1, MOST_ROUTES // (case.num_ranks * case.num_topk))
    return replace(case, tokens=tuple(min(num_tokens, most) for num_tokens in case.tokens))


def test_every_case_is_held_somewhere():
    taken = {name for names in CASES.values() for name in names}
    assert [taken] * 4 == [{case.name for case in cases_for(num_ranks)} for num_ranks in CASES]


class ByTriton:
    """A function of a rank, called where Triton's kernels are the CPU's, and where native ones may not be called."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, group, *arguments):
        called = {"triton": set(), "cpu": set()}
        os.environ["MOECOMM_KERNELS"] = "triton"
        for name in called:
            watch(name, called[name])
        try:
            result = self.fn(group, *arguments)
        finally:
            for name in called:
                unwatch(name)
            del os.environ["MOECOMM_KERNELS"]
            assert not called["cpu"], f"native kernels were called: {called['cpu']}"
        assert called["triton"]
        return result


@dataclass(frozen=True)
class TritonWorld(World):
    """Processes whose rows are moved and summed by interpreted kernels."""

    def run(self, fn, num_ranks, *args, return_exceptions=False):
        return super().run(ByTriton(fn), num_ranks, *args, return_exceptions=return_exceptions)


def world_of(*rank_counts):
    return TritonWorld("processes", "shm", rank_counts, timeout=200, cases=few_cases)


def with_rank_counts():
    """Every check at 1, 2, 3 and 4 ranks."""
    for contract in (algorithm, capacity, low_latency, domains):
        name_of_contract = contract.__name__.rpartition(".")[2]
        for check in contract.CHECKS:
            if check in (
                algorithm.check_rows_of_many_pages,
                algorithm.check_the_result_does_not_depend_on_the_number_of_ranks,  # below: it compares the numbers
            ):
                continue
            for num_ranks in CASES:
                if check is algorithm.check_gradients and num_ranks == 4:
                    continue  # it is for up to three ranks; capacity.check_gradients takes more
                name = check.__name__.removeprefix("check_")
                yield pytest.param(check, num_ranks, id=f"{name_of_contract}-{name}-{num_ranks}")


@pytest.mark.parametrize(("check", "num_ranks"), [*with_rank_counts()])
def test_contract(check, num_ranks):
    check(world_of(num_ranks))


def test_the_result_does_not_depend_on_the_number_of_ranks():
    algorithm.check_the_result_does_not_depend_on_the_number_of_ranks(world_of(*CASES))

"""The contracts of exchanges between processes, held by Triton's kernels, interpreted, in place of the native ones.

Small shapes alone: a program takes milliseconds.
"""

import os
from dataclasses import dataclass

import pytest

from moecomm.testing.contracts import World, algorithm, capacity, domains, low_latency


class ByTriton:
    """A function of a rank, called where Triton's kernels are the CPU's."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, group, *arguments):
        os.environ["MOECOMM_KERNELS"] = "triton"
        try:
            return self.fn(group, *arguments)
        finally:
            del os.environ["MOECOMM_KERNELS"]


@dataclass(frozen=True)
class TritonWorld(World):
    """Processes whose rows are moved and summed by interpreted kernels."""

    def run(self, fn, num_ranks, *args, return_exceptions=False):
        return super().run(ByTriton(fn), num_ranks, *args, return_exceptions=return_exceptions)


CONTRACTS = (algorithm, capacity, low_latency, domains)
CHECKS = [(it, check) for it in CONTRACTS for check in it.CHECKS if check is not algorithm.check_rows_of_many_pages]
MOST_ROUTES = 64


@pytest.mark.parametrize(
    ("contract", "check"), CHECKS, ids=lambda it: it.__name__.removeprefix("check_").rpartition(".")[2]
)
def test_contract(contract, check, monkeypatch):
    if hasattr(contract, "cases_for"):
        every = contract.cases_for
        monkeypatch.setattr(contract, "cases_for", lambda num_ranks: list(filter(is_small, every(num_ranks))))
    check(TritonWorld("processes", "shm", rank_counts=(1, 2, 3, 4), timeout=200))


def is_small(case):
    return max(case.tokens) * case.num_topk <= MOST_ROUTES

"""Exchanges of CUDA tensors between domains, without a GPU: the native kernels' bits over a network that is late."""

import pytest
import torch
from late_ranks import CAPACITY, THROUGHPUT
from nvshmem_ranks import NvshmemWorld, compare, run

from moecomm.testing.contracts import algorithm
from moecomm.testing.contracts.cases import cases_for

# Ranks, ranks per domain, the domains that are found; PEs count backwards.
DOMAINS = {"2x1": (2, 1, (0, 1)), "2+1": (3, 2, (0, 1, 1)), "2x2": (4, 2, (0, 0, 1, 1))}
HARD_CASES = (
    "fewer experts than ranks, duplicates, aligned",
    "columns of one, duplicates, flat",
    "only the last rank has tokens",
    "no tokens anywhere",
)


@pytest.mark.parametrize(
    ("domains", "kind"),
    [
        *(("2x1", kind) for kind in ("plain", "flat")),
        *(("2+1", kind) for kind in ("expert_major", "flat", "fixed")),
        *(("2x2", kind) for kind in ("expert_major", "plain")),
    ],
)
def test_ranks_of_several_domains_give_the_native_bits(domains, kind):
    num_ranks, per_domain, domain_of = DOMAINS[domains]
    dtype = (torch.bfloat16, torch.float32)[num_ranks % 2]
    kinds = {kind: (THROUGHPUT | CAPACITY)[kind]}
    for found, explained, stats, log in run(compare, num_ranks, per_domain, dtype, kinds, "auto", timeout=200):
        assert found == domain_of
        assert stats["bytes_between_hosts"] > 0
        assert "algorithm='auto': over rails where that moves fewer bytes" in explained
        assert "low latency  captured" in explained
        # Nothing is under way any more when memory goes back, all of it, and NVSHMEM with it.
        assert log[-9:] == ["quiet", *["free"] * 7, "finish"]
        assert log.count("allocate") == 7


def hard_cases(num_ranks):
    cases = {case.name: case for case in cases_for(num_ranks)}
    return [cases[name] for name in HARD_CASES]


def test_hard_cases_of_the_contract():
    algorithm.check_against_the_oracle(NvshmemWorld("processes", "nvshmem", (3,), timeout=200, cases=hard_cases))

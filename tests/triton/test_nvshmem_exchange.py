"""Exchanges of CUDA tensors between domains, without a GPU: the native kernels' bits over a network that is late."""

import pytest
import torch
from late_ranks import THROUGHPUT
from nvshmem_ranks import compare, run

# Ranks, ranks per domain, the domains that are found; PEs count backwards.
DOMAINS = {"2x1": (2, 1, (0, 1)), "2+1": (3, 2, (0, 1, 1)), "2x2": (4, 2, (0, 0, 1, 1))}


@pytest.mark.parametrize("domains", DOMAINS)
def test_ranks_of_several_domains_give_the_native_bits(domains):
    num_ranks, per_domain, domain_of = DOMAINS[domains]
    dtype = (torch.bfloat16, torch.float32)[num_ranks % 2]
    for found, explained, stats, calls in run(compare, num_ranks, per_domain, dtype, THROUGHPUT):
        print(explained, stats, calls)
        assert found == domain_of

"""Low-latency calls between domains: by kernels alone, with the native kernels' bits, over a network that is late."""

import pytest
import torch
from far_low_latency import compare
from nvshmem_ranks import run

# Ranks, ranks per domain, the domains that are found; PEs count backwards.
DOMAINS = {
    "1+1": (2, 1, torch.bfloat16, (0, 1)),
    "2+1": (3, 2, torch.float32, (0, 1, 1)),
    "3+1": (4, 3, torch.bfloat16, (0, 1, 1, 1)),
}


@pytest.mark.parametrize("domains", DOMAINS)
def test_ranks_of_several_domains_give_the_native_bits(domains):
    num_ranks, per_domain, dtype, domain_of = DOMAINS[domains]
    for found, explained in run(compare, num_ranks, per_domain, dtype, 6):
        assert found == domain_of
        assert "low latency  captured" in explained

"""Low-latency calls between domains: by kernels alone, with the native kernels' bits, over a network that is late."""

import pytest
import torch
from far_low_latency import compare, die_while_sending, lack_room, refuse_and_go_on
from nvshmem_ranks import run

from moecomm.testing.failures import RankDied

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


def test_refused_calls_and_faults_leave_the_devices_in_step():
    run(refuse_and_go_on, 2, 1)


def test_where_windows_have_no_room_only_low_latency_is_refused():
    run(lack_room, 2, 1)


def test_a_rank_that_dies_is_named():
    found = run(die_while_sending, 3, 2, return_exceptions=True)
    assert isinstance(found[1], RankDied)
    assert found[0] == found[2] == (1,)

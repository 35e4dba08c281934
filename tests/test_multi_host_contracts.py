"""The shipped contracts of exchanges, between hosts over real links (test_contracts.py has hosts that are made up)."""

import pytest
from multi_host import RanksOnHosts

from moecomm.testing.contracts import algorithm, capacity, domains, low_latency
from moecomm.testing.hosts import Hosts, why_not
from moecomm.transports.ucx_library import find_library

GRIDS = {"2x1": (1, 1), "3+1": (3, 1), "3x2": (2, 2, 2)}
CHECKS = [check for contract in (algorithm, capacity, low_latency, domains) for check in contract.CHECKS]


@pytest.fixture(scope="module", params=GRIDS.values(), ids=GRIDS)
def world(request):
    reason = find_library().problem or why_not()
    if reason:
        pytest.skip(reason)
    with Hosts(request.param) as hosts, RanksOnHosts(hosts, "auto") as ranks:
        yield ranks


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_exchange(world, check):
    check(world)

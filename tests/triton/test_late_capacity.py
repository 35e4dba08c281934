"""Throughput calls of fixed shape on a device that does its work late: the contract, and what a graph cannot hold.

What is their own where kernels alone make them stands in test_static_calls.py.
"""

import contextlib
from datetime import timedelta

import pytest
import torch
from late_device import LateDevice
from late_ranks import SIZES, Looking

from moecomm import Communicator
from moecomm.testing import uniform
from moecomm.testing.contracts import World, capacity
from moecomm.testing.contracts.cases import cases_for


@pytest.fixture(autouse=True)
def _poisoned():
    """What torch makes uninitialised is NaN, so what is read too early is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def few_cases(num_ranks):
    """Kernels are interpreted."""
    return [case for case in cases_for(num_ranks) if max(case.tokens) <= 5][:4]


@pytest.mark.parametrize("check", capacity.CHECKS, ids=lambda check: check.__name__)
def test_the_contract_of_capacity(check, monkeypatch):
    def opened(group, transport, case, memory_limit=None):
        sizes = {"num_experts": case.num_experts, "hidden": case.hidden, "num_topk": case.num_topk}
        sizes["max_tokens_per_rank"] = max(1, *case.tokens)
        limits = {"memory_limit": memory_limit or 1 << 24, "timeout": timedelta(seconds=60)}
        return Communicator(group, **sizes, **limits, transport=transport, device=LateDevice(5e-4 * group.rank))

    monkeypatch.setattr(capacity, "_communicator", opened)
    check(World("threads", "local", rank_counts=(1, 2, 3, 4), timeout=200, cases=few_cases))


@pytest.mark.parametrize(
    ("options", "num_sums", "recording", "mode"),
    [
        ({"layout": "flat"}, 1, False, contextlib.nullcontext),
        ({"mode": "low_latency", "layout": "expert_major"}, 3, True, contextlib.nullcontext),
        ({"capacity": 16}, 3, False, Looking),
        ({"capacity": 16, "layout": "flat"}, 1, True, Looking),
    ],
    ids=["as many rows as arrive", "low latency, recorded", "operators", "flat, recorded operators"],
)
def test_what_no_graph_can_hold(options, num_sums, recording, mode):
    device = LateDevice()
    x, ids = torch.ones(4, 24, requires_grad=recording), uniform(4, 6, 3, seed=0)
    with Communicator(None, **SIZES, device=device) as comm, mode():
        for _ in range(2):  # nothing is left of what was refused
            received = comm.dispatch(x, ids, **options)
            assert received.x.requires_grad == recording
            assert received.handle.routing.on_device is None
            with device.capturing(), pytest.raises(ValueError, match="hosts take part in this call"):
                comm.dispatch(x, ids, **options)
            assert torch.equal(comm.combine(received.x, received.handle), num_sums * x)
    device.end()

"""Communicators on a device that does its work late, and pairs of throughput calls of fixed shape."""

import torch
from late_ranks import SIZES

from moecomm import Communicator
from moecomm.testing import uniform

FIXED = {"capacity": 40}
LOW = {"mode": "low_latency"}


def opened(group, device, **options):
    return Communicator(group, **(SIZES | {"memory_limit": 1 << 21} | options), transport="local", device=device)


def inputs_of(rank, seed=0, num_tokens=4):
    x = torch.full((num_tokens, 24), float(rank + 1 + 10 * seed))
    return x, uniform(num_tokens, 6, 3, seed=rank + 7 * seed)


def check_pair(comm, seed=0, num_tokens=4, **options):
    """A dispatch and a combine that bring back three times what was sent, without the host."""
    x, ids = inputs_of(comm.rank, seed, num_tokens)
    received = comm.dispatch(x, ids, **(FIXED | options))
    assert received.handle.routing.on_device is not None, "the hosts took part"
    num_rows = int(received.num_tokens_per_expert.sum())
    assert bool(received.x[:num_rows].any(dim=1).all())
    assert not received.x[num_rows:].any()
    assert torch.equal(comm.combine(received.x, received.handle), 3 * x)
    return received

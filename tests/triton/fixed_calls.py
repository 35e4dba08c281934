"""Communicators on a device that does its work late, and pairs of throughput calls of fixed shape."""

import torch
from late_ranks import SIZES

from moecomm import Communicator
from moecomm.testing import uniform

FIXED = {"capacity": 40}
FLAT = {"capacity": 40, "layout": "flat"}
LOW = {"mode": "low_latency"}


def opened(group, device, **options):
    return Communicator(group, **(SIZES | {"memory_limit": 1 << 21} | options), transport="local", device=device)


def inputs_of(rank, seed=0, num_tokens=4):
    x = torch.full((num_tokens, 24), float(rank + 1 + 10 * seed))
    return x, uniform(num_tokens, 6, 3, seed=rank + 7 * seed)


def home_of(comm, x, ids, layout="expert_major"):
    """What comes home of rows that experts leave as they are: x for each of three experts, or (flat) for each rank."""
    if layout != "flat":
        return 3 * x
    each, more = divmod(6, comm.num_ranks)
    rank_of_expert = torch.arange(comm.num_ranks).repeat_interleave(
        torch.tensor([each + (rank < more) for rank in range(comm.num_ranks)])
    )
    ranks = torch.nn.functional.one_hot(rank_of_expert[ids], comm.num_ranks).amax(dim=1).sum(dim=1, keepdim=True)
    return ranks * x


def check_pair(comm, seed=0, num_tokens=4, **options):
    """A dispatch and a combine that bring back `home_of` what was sent, without the host."""
    x, ids = inputs_of(comm.rank, seed, num_tokens)
    options = FIXED | options
    received = comm.dispatch(x, ids, **options)
    assert received.handle.routing.on_device is not None, "the hosts took part"
    num_rows = int(received.num_tokens_per_expert.sum())
    if received.topk_idx is not None:
        is_row = (received.topk_idx >= 0).any(dim=1)
        assert int((received.topk_idx >= 0).sum()) == num_rows
        num_rows = int(is_row.sum())
        assert bool(is_row[:num_rows].all())
    assert bool(received.x[:num_rows].any(dim=1).all())
    assert not received.x[num_rows:].any()
    assert torch.equal(comm.combine(received.x, received.handle), home_of(comm, x, ids, received.handle.layout))
    return received

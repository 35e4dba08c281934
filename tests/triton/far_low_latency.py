"""Low-latency calls between ranks that cannot address each other's memory, on stand-in devices over a late network."""

import torch
from late_ranks import SIZES
from nvshmem_ranks import OwnDevice, opened

from moecomm import Communicator
from moecomm.testing import masked, with_duplicates
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts.cases import random_rows

# By call and rank: none, one, all, and between.
TOKENS = ((5, 3, 0, 8), (0, 8, 1, 4), (8, 0, 5, 0), (2, 6, 3, 1))
LAYOUTS = ({"layout": "slab"}, {"layout": "expert_major", "expert_alignment": 2})


def batch(rank, call, dtype, layout):
    """Rows, ids and weights of a rank in a call; in every fourth call nobody has chosen anything."""
    num_tokens = TOKENS[call % 4][rank]
    choose = masked if call % 2 or layout == "slab" else with_duplicates
    ids = choose(num_tokens, 6, 3, seed=10 * call + rank) if call % 4 < 3 else torch.full((num_tokens, 3), -1)
    weights = torch.rand(num_tokens, 3, generator=torch.Generator().manual_seed(call)).masked_fill(ids < 0, 0)
    return random_rows((num_tokens, 24), dtype, f"x {call} {rank}"), ids, weights


def call_pairs(comm, dtype, num_calls):
    """Dispatches and combines of every form in turn; all that they give, by name."""
    found = {}
    for call in range(num_calls):
        options = {"mode": "low_latency", **LAYOUTS[call // 2 % 2]}
        x, ids, weights = batch(comm.rank, call, dtype, options["layout"])
        received = comm.dispatch(x, ids, weights if call % 3 else None, **options)
        names = ("x", "topk_weights", "num_tokens_per_expert", "offsets")
        found |= {f"{call}: {name}": getattr(received, name) for name in names}
        again = comm.dispatch_async(x + 1, None, weights, handle=received.handle).wait()
        found |= {f"{call}: again": again.x, f"{call}: routes": received.handle.routes}
        y = random_rows(tuple(received.x.shape), dtype, f"y {call} {comm.rank}")
        found[f"{call}: home"] = comm.combine(y, received.handle)
        found[f"{call}: weighted"] = comm.combine(y, received.handle, weights)
        found = {what: None if one is None else one.clone() for what, one in found.items()}
    return found | {"tokens": comm.tokens_per_expert.clone()}


def compare(group, dtype, num_calls, transport="nvshmem"):
    """The same calls on the stand-in device and on the native kernels give the same bits."""
    device = OwnDevice(group, 5e-4 * group.rank)
    with opened(group, device, transport=transport) as comm:
        got = call_pairs(comm, dtype, num_calls)
        comm.check()
        told = comm.topology.domain_of, comm.explain()
    device.end()
    with Communicator(group, **SIZES) as comm:
        wanted = call_pairs(comm, dtype, num_calls)
    assert got.keys() == wanted.keys()
    for what, want in wanted.items():
        if want is None:
            assert got[what] is None, what
        else:
            assert_bitwise_equal(got[what], want, f"rank {group.rank}: {what}")
    return told

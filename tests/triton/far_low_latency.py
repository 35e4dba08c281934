"""Low-latency calls between ranks that cannot address each other's memory, on stand-in devices over a late network."""

import os
from datetime import timedelta

import pytest
import torch
from late_ranks import GIVE_UP, SIZES, Looking
from nvshmem_ranks import OwnDevice, opened

from moecomm import CallMismatch, CapacityExceeded, Communicator, PeerLost, PeerTimeout
from moecomm.kernels.triton import captured
from moecomm.testing import masked, uniform, with_duplicates
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


def check_pair(comm, mode="low_latency"):
    """A dispatch and a combine that bring back three times what was sent."""
    x, ids = torch.full((4, 24), float(comm.rank + 1)), uniform(4, 6, 3, seed=comm.rank)
    received = comm.dispatch(x, ids, mode=mode)
    assert torch.equal(comm.combine(received.x, received.handle), 3 * x)
    return received


def refuse_and_go_on(group):
    """Calls that are refused here, and calls in which devices find something wrong; others before and behind."""
    device, low = OwnDevice(group), {"mode": "low_latency"}
    with opened(group, device, timeout=timedelta(seconds=20)) as comm:
        received = check_pair(comm)
        x, ids = torch.ones(8, 24), uniform(8, 6, 3, seed=comm.rank)
        with pytest.raises(ValueError, match="max_tokens_per_rank=8"):
            comm.dispatch(torch.ones(9, 24), uniform(9, 6, 3, seed=0), **low)
        with pytest.raises(ValueError, match=r"recorded by autograd.*torch\.no_grad"):
            comm.dispatch(x.clone().requires_grad_(), ids, **low)
        with pytest.raises(ValueError, match=r"recorded by autograd.*mode='throughput'"):
            comm.combine(received.x.clone().requires_grad_(), received.handle)
        with pytest.raises(ValueError, match=r"reduce: 'per_host' sums over rails.*use 'exact'"):
            comm.combine(received.x, received.handle, reduce="per_host")
        with Looking(), pytest.raises(ValueError, match=r"or traced; make it"):
            comm.combine(received.x, received.handle)
        with Looking(), pytest.raises(ValueError, match=r"or traced; make it"):
            comm.dispatch(torch.ones(4, 24), None, handle=received.handle)
        check_pair(comm, "throughput")
        check_pair(comm)
        wrong = ids.clone()
        wrong[2, 1] = 6 if comm.rank == 1 else 0
        same = torch.full_like(ids, 4)
        form = {"layout": "expert_major"} if comm.rank == 1 else {}
        for kind, words, given, options in (
            (ValueError, r"topk_idx\[2, 1\] = 6 of the device of rank 1 \(pid", wrong, {}),
            (CapacityExceeded, r"48 rows for expert .* 4, but there is room for 16", same, {}),
            (CallMismatch, "is of another form than what rank", ids, form),
        ):
            comm.dispatch(x, given, **low, **options)
            with pytest.raises(kind, match=words):
                comm.check()
            check_pair(comm)
            comm.check()
    device.end()


def lack_room(group):
    """There is no memory for what low-latency calls take; throughput calls need none of it."""
    device = OwnDevice(group)
    with opened(group, device, memory_limit=1 << 14) as comm:
        with pytest.raises(ValueError, match="mode 'low_latency' would take .* bytes of cuda memory"):
            check_pair(comm)
        check_pair(comm, "throughput")
    device.end()


def dispatch_and_check(comm):
    comm.dispatch(torch.ones(4, 24), uniform(4, 6, 3, seed=0), mode="low_latency")
    comm.check()


def die_while_sending(group):
    """Rank 1 dies in its third dispatch, before it has sent anything; who the others say has not come."""
    device, send, calls = OwnDevice(group), captured.send_messages, []

    def send_or_die(*arguments):
        calls.append(None)
        if group.rank == 1 and len(calls) == 3:
            os._exit(3)
        send(*arguments)

    captured.send_messages = send_or_die
    with opened(group, device, timeout=GIVE_UP) as comm:
        for _ in range(2):
            check_pair(comm)
        # The host may notice while it waits for its device; else the device gives up.
        words = r"dispatch #2: .*the device of rank 1 \(pid|waited for work of ranks 1, which have ended"
        with pytest.raises((PeerTimeout, PeerLost), match=words) as caught:
            dispatch_and_check(comm)
        with pytest.raises((PeerTimeout, PeerLost)):
            check_pair(comm)
    device.end()
    return caught.value.peers

"""Whole communicators on interpreted Triton kernels, between processes: the bits of the native ones."""

import os
from datetime import timedelta

import pytest
import torch
from watched_kernels import methods_of, unwatch, watch

from moecomm import Communicator
from moecomm.kernels.base import RowKernels
from moecomm.kernels.eager import EagerKernels
from moecomm.testing import launch, masked, with_duplicates
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts.cases import random_rows

TOKENS = {1: (5,), 2: (5, 3), 3: (4, 0, 5), 4: (0, 5, 1, 3)}
EXPERTS, HIDDEN, TOPK = 6, 24, 3


def exchange(group, dtype):
    """One of each kind of call; what they gave, by name."""
    found = {}
    rank, num_tokens = group.rank, TOKENS[group.size][group.rank]
    x = random_rows((num_tokens, HIDDEN), dtype, f"x {rank}")
    ids = (masked if rank % 2 else with_duplicates)(num_tokens, EXPERTS, TOPK, seed=rank)
    if num_tokens:
        ids[0] = -1
    weights = torch.rand(num_tokens, TOPK, generator=torch.Generator().manual_seed(rank)).masked_fill(ids < 0, 0)
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOPK, "max_tokens_per_rank": 8}
    with Communicator(group, **sizes, transport="shm", timeout=timedelta(seconds=60)) as comm:

        def keep(what, **tensors):
            # What is received is given back when nobody holds it, so it is copied.
            found.update({f"{what}: {name}": None if t is None else t.detach().clone() for name, t in tensors.items()})

        for what, options in {
            "expert_major": {"expert_alignment": 4},
            "flat": {"layout": "flat"},
            "slab": {"mode": "low_latency"},
            "grouped": {"mode": "low_latency", "layout": "expert_major", "expert_alignment": 2},
        }.items():
            sent = masked(num_tokens, EXPERTS, TOPK, seed=rank) if what == "slab" else ids  # a slab has no duplicates
            received = comm.dispatch(x, sent, weights, **options)
            names = ("x", "topk_weights", "topk_idx", "num_tokens_per_expert", "offsets")
            keep(what, **{name: getattr(received, name) for name in names}, routes=received.handle.routes)
            y = random_rows(tuple(received.x.shape), dtype, f"y {rank} {what}")
            keep(what, home=comm.combine(y, received.handle))
            if what != "flat":
                keep(what, weighted=comm.combine(y, received.handle, weights))

        # Gradients: rows and weights go back the same ways, and experts' outputs meet the sums' gradients.
        for what, options in {"expert_major": {}, "flat": {"layout": "flat"}}.items():
            leaf, scale = x.clone().requires_grad_(), weights.clone().requires_grad_()
            received = comm.dispatch(leaf, ids, scale, **options)
            rows = received.x * 2
            home = comm.combine(rows, received.handle, None if what == "flat" else scale)
            (home.float().sum() + received.topk_weights.sum()).backward()
            keep(f"{what} backward", x=leaf.grad, weights=scale.grad)
    return found


def on_both(group, dtype):
    answers, called = {}, {"triton": set(), "cpu": set()}
    for name in called:
        watch(name, called[name])
    try:
        for name in called:
            os.environ["MOECOMM_KERNELS"] = name
            before = {other: set(names) for other, names in called.items() if other != name}
            answers[name] = exchange(group, dtype)
            assert before == {other: called[other] for other in before}, f"{name} did not do all by itself"
    finally:
        for name in called:
            unwatch(name)
    for what, want in answers["cpu"].items():
        got = answers["triton"][what]
        assert (got is None) == (want is None), what
        if want is not None:
            assert_bitwise_equal(got, want, f"rank {group.rank}: {what}")
    return called["triton"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_bits_of_the_native_kernels(num_ranks):
    dtype = (torch.bfloat16, torch.float32)[num_ranks % 2]
    called = set().union(*launch(on_both, num_ranks, dtype, backend="processes", timeout=150))
    assert called == methods_of(RowKernels) | methods_of(EagerKernels)

"""Calls of communicators that are captured and replayed with new contents, beside the native kernels.

What a graph does is done here by keeping the launches and making them again. On a GPU see test_cuda_graph.py.
"""

import contextlib
import gc
from datetime import timedelta

import pytest
import torch
from captured_replay import recorded, replay
from late_device import LateDevice
from late_ranks import SIZES

from moecomm import Communicator
from moecomm.devices.base import DeviceIdentity
from moecomm.kernels.base import weights_dtype
from moecomm.testing import launch, masked
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts.cases import random_rows

NAMES = ("0", "1", "2", "3")
TOKENS = (4, 0, 7, 3)
OPTIONS = {
    "slab": {"mode": "low_latency", "layout": "slab"},
    "expert_major": {"mode": "low_latency", "layout": "expert_major", "expert_alignment": 2},
    "fixed": {"expert_alignment": 2, "capacity": 45},
    "fixed flat": {"layout": "flat", "capacity": 16},
}


class Tensors:
    """What a graph reads: the same memory each time."""

    def __init__(self, num_tokens, dtype):
        self.x = torch.zeros(num_tokens, 24, dtype=dtype)
        self.ids = torch.full((num_tokens, 3), -1)
        self.weights = torch.zeros(num_tokens, 3, dtype=weights_dtype(dtype))  # converted ones are not replayed here

    def fill(self, rank, step):
        num_tokens = len(self.x)
        self.x.copy_(random_rows((num_tokens, 24), self.x.dtype, f"{step} {rank}"))
        self.ids.copy_(masked(num_tokens, 6, 3, seed=10 * step + rank))
        weights = torch.rand(num_tokens, 3, generator=torch.Generator().manual_seed(step))
        self.weights.copy_(weights.masked_fill(self.ids < 0, 0))


def pair(comm, given, options, capture=None):
    """A dispatch, the experts, a combine; with `capture` what makes it all again is appended to that."""
    launches = capture or (lambda: _Nothing())
    with launches() as first:
        received = comm.dispatch(given.x, given.ids, given.weights, **options)
    y = torch.empty_like(received.x)
    torch.mul(received.x, 2, out=y)
    with launches() as second:
        home = comm.combine(y, received.handle, topk_weights=None if options.get("layout") == "flat" else given.weights)
    return received, home, (first, lambda: torch.mul(received.x, 2, out=y), second)


class _Nothing:
    def __enter__(self):
        return []

    def __exit__(self, *_):
        """Nothing is kept."""


@contextlib.contextmanager
def captured(device):
    """Launches are kept, on the caller's stream and on the communicator's."""
    with recorded() as launches, device.capturing():
        yield launches


def replay_all(group, layout, dtype):
    device = LateDevice(identity=DeviceIdentity(str(group.rank), NAMES), looks=False)
    options = OPTIONS[layout]
    given = Tensors(TOKENS[group.rank], dtype)

    limits = {"timeout": timedelta(seconds=60), "memory_limit": 1 << 22}
    with (
        Communicator(group, **(SIZES | limits), transport="nvlink", device=device) as comm,
        Communicator(group, **(SIZES | limits), transport="shm") as native,
    ):
        given.fill(group.rank, 0)
        pair(comm, given, options)  # so that there is a block
        gc.collect()
        received, home, (dispatch, experts, combine) = pair(comm, given, options, lambda: captured(device))
        assert len(dispatch) > 5
        assert len(combine) > 2
        for step in range(1, 6):
            given.fill(group.rank, step)
            group.all_gather(None)
            replay(dispatch)
            experts()
            replay(combine)
            if step == 3:  # between replays, calls of all kinds
                comm.check()
                apart, sums, _ = pair(comm, given, options)
                assert_bitwise_equal(sums, home, "beside the graph")
                assert apart.x.data_ptr() != received.x.data_ptr()
                there = comm.dispatch(given.x, given.ids)
                comm.combine(there.x, there.handle)
            comm.check()
            wanted, expected, _ = pair(native, given, options)
            for name in ("x", "topk_weights", "topk_idx", "num_tokens_per_expert", "offsets"):
                want = getattr(wanted, name)
                if want is not None:
                    assert_bitwise_equal(getattr(received, name), want, f"replay {step}: {name}")
            assert_bitwise_equal(home, expected, f"replay {step}: sums")
            assert torch.equal(received.handle.routes, wanted.handle.routes)
            del wanted, expected
        if group.rank == 0:
            given.ids[0, 0] = 6
        group.all_gather(None)
        replay(dispatch)
        replay(combine)
        with pytest.raises(ValueError, match=r"topk_idx\[0, 0\] = 6 of the device of .*rank 0"):
            comm.check()
        group.all_gather(None)
        given.fill(group.rank, 9)
        replay(dispatch)
        experts()
        replay(combine)
        comm.check()
        wanted, expected, _ = pair(native, given, options)
        assert_bitwise_equal(home, expected, "behind the error")
    device.end()


@pytest.mark.parametrize(
    ("num_ranks", "layout", "dtype"),
    [
        (1, "slab", torch.float64),
        (3, "slab", torch.bfloat16),
        (2, "expert_major", torch.float32),
        (1, "fixed", torch.float32),
        (3, "fixed", torch.bfloat16),
        (3, "fixed flat", torch.bfloat16),
    ],
)
def test_replays_give_the_native_bits(num_ranks, layout, dtype):
    launch(replay_all, num_ranks, layout, dtype, backend="processes", timeout=300)


# -- forward and backward ----------------------------------------------------------------------------------------------


class Leaves(Tensors):
    """What a graph of a forward and its backward reads; weights travel, and others are applied at home."""

    def __init__(self, num_tokens, dtype, options):
        super().__init__(num_tokens, dtype)
        self.at_home = None if options.get("layout") == "flat" else torch.zeros_like(self.weights).requires_grad_()
        self.x.requires_grad_()
        self.weights.requires_grad_()
        num_rows, num_topk = options["capacity"], self.ids.shape[1]
        self.grad = torch.zeros(num_tokens, 24, dtype=dtype)
        shape = (num_rows,) if self.at_home is not None else (num_rows, num_topk)
        self.grad_weights = torch.zeros(shape, dtype=self.weights.dtype)
        self.kept = []

    @torch.no_grad()
    def fill(self, rank, step):
        super().fill(rank, step)
        if self.at_home is not None:
            self.at_home.copy_(self.weights).mul_(0.75)
        self.grad.copy_(random_rows(tuple(self.grad.shape), self.grad.dtype, f"grad {step} {rank}"))
        self.grad_weights.copy_(random_rows(tuple(self.grad_weights.shape), self.weights.dtype, f"w {step} {rank}"))

    def learn(self, comm, options):
        """A handle, the sums, and gradients of all that has some."""
        received = comm.dispatch(self.x, self.ids, self.weights, **options)
        received.x.register_hook(self.kept.append)  # a graph keeps it by itself
        home = comm.combine(received.x, received.handle, topk_weights=self.at_home)
        leaves = [leaf for leaf in (self.x, self.weights, self.at_home) if leaf is not None]
        grads = torch.autograd.grad((home, received.topk_weights), leaves, (self.grad, self.grad_weights))
        return received.handle, (home.detach(), *grads)


def replay_training(group, layout, dtype):
    device = LateDevice(identity=DeviceIdentity(str(group.rank), NAMES), looks=False)
    options = OPTIONS[layout]
    given = Leaves(TOKENS[group.rank], dtype, options)
    limits = {"timeout": timedelta(seconds=60), "memory_limit": 1 << 22}
    with (
        Communicator(group, **(SIZES | limits), transport="nvlink", device=device) as comm,
        Communicator(group, **(SIZES | limits), transport="shm") as native,
    ):
        given.fill(group.rank, 0)
        given.learn(comm, options)  # so that there are blocks
        given.kept.clear()
        gc.collect()
        with captured(device) as launches:
            handle, found = given.learn(comm, options)
        assert handle.routing.on_device is not None
        for step in range(1, 5):
            given.fill(group.rank, step)
            handle.topk_idx.copy_(given.ids)  # which no kernel of ours does
            group.all_gather(None)
            replay(launches)
            if step == 2:  # between replays, the same without a graph
                _, apart = given.learn(comm, options)
                for one, other in zip(found, apart, strict=True):
                    assert_bitwise_equal(other, one, "beside the graph")
            comm.check()
            _, wanted = given.learn(native, options)
            for number, (one, want) in enumerate(zip(found, wanted, strict=True)):
                assert_bitwise_equal(one, want, f"replay {step}: {number}")
    device.end()


@pytest.mark.parametrize(
    ("num_ranks", "layout", "dtype"),
    [
        (1, "fixed", torch.float64),
        (3, "fixed", torch.bfloat16),
        (3, "fixed flat", torch.float32),
    ],
)
def test_replays_of_a_forward_and_its_backward_give_the_native_bits(num_ranks, layout, dtype):
    launch(replay_training, num_ranks, layout, dtype, backend="processes", timeout=300)

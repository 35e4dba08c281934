"""Throughput calls of fixed shape that autograd records, and their backward: by kernels alone, with the native bits."""

import contextlib
import gc
import math

import pytest
import torch
from fixed_calls import FIXED, FLAT, check_pair, home_of, inputs_of, opened
from late_device import LateDevice
from late_ranks import SIZES, TOKENS
from torch.utils.checkpoint import checkpoint

from moecomm import CapacityExceeded, Communicator, RoutingChanged
from moecomm.exchanger import Exchanger
from moecomm.testing import launch, masked, with_duplicates
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts.cases import random_rows


@pytest.fixture(autouse=True)
def _poisoned():
    """What torch makes uninitialised is NaN, so what is read too early is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def calls_of_hosts(comm):
    return comm._exchanger.session.sequencer.num_calls


# -- the native bits -----------------------------------------------------------------------------------------------


def leaves_of(comm, dtype):
    rank, num_tokens = comm.rank, TOKENS[comm.num_ranks][comm.rank]
    x = random_rows((num_tokens, 24), dtype, f"x {rank}")
    ids = (masked if rank % 2 else with_duplicates)(num_tokens, 6, 3, seed=rank)
    weights = torch.rand(num_tokens, 3, generator=torch.Generator().manual_seed(rank)).masked_fill(ids < 0, 0)
    return x.requires_grad_(), ids, weights.requires_grad_(), torch.linspace(0.5, 2, 24).to(dtype).requires_grad_()


def at_home(comm, x, ids, weights, scale, fixed):
    """Weights applied where the tokens are; flat: the rows alone."""
    received = comm.dispatch(x, ids, **fixed)
    return comm.combine(received.x * scale, received.handle, None if "layout" in fixed else weights)


def travelling(comm, x, ids, weights, scale, fixed):
    """Weights go with the rows; the outputs lie where peers read them, and are read twice."""
    received = comm.dispatch_async(x, ids, weights, **fixed).wait()
    gate = received.topk_weights if received.topk_idx is None else received.topk_weights.sum(dim=1)
    again = comm.dispatch(x * scale, handle=received.handle, capacity=fixed["capacity"])
    y = (received.x + again.x) * gate[:, None].to(x.dtype)
    return comm.combine(y, received.handle) + comm.combine_async(2 * y, received.handle).wait()


def weights_alone(comm, x, ids, weights, scale, fixed):
    """Rows of bytes, which have no gradients, beside weights, which have."""
    received = comm.dispatch((x.detach() * 8).to(torch.int8), ids, weights, **fixed)
    gate = received.topk_weights if received.topk_idx is None else received.topk_weights.sum(dim=1)
    return comm.combine(gate[:, None] * (scale.float() + received.x), received.handle)


WAYS = (at_home, travelling, weights_alone)


def leaves_for(way, fixed, x, weights, scale):
    """Those on which what the way gives depends."""
    if way is weights_alone:
        return [weights, scale]
    return [x, scale] if way is at_home and "layout" in fixed else [x, weights, scale]


def learn(comm, dtype, fixed):
    """Gradients of all ways, and those of gradients."""
    found = []
    for way in WAYS:
        x, ids, weights, scale = leaves_of(comm, dtype)
        leaves = leaves_for(way, fixed, x, weights, scale)
        out = way(comm, x, ids, weights, scale, fixed)
        first = torch.autograd.grad(out.float().square().sum(), leaves, create_graph=True)
        total = sum(one.float().cos().sum() for one in first)
        found += [out, *first, *torch.autograd.grad(total, leaves, allow_unused=True)]
    return found


def compare(group, dtype, fixed):
    device = LateDevice(5e-4 * group.rank)
    with opened(group, device) as comm:
        got = learn(comm, dtype, fixed)
        assert calls_of_hosts(comm) == 0
        comm.check()
    device.end()
    with Communicator(group, **SIZES) as native:
        wanted = learn(native, dtype, fixed)
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert (one is None) == (other is None), number
        if one is not None:
            assert_bitwise_equal(one.detach(), other.detach(), f"rank {group.rank}: {number}")


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "fixed"),
    [
        (1, torch.float64, {"capacity": 40, "expert_alignment": 4}),
        (2, torch.bfloat16, FIXED),
        (3, torch.float32, {"capacity": 40, "expert_alignment": 2}),
        (1, torch.bfloat16, FLAT),
        (3, torch.float32, FLAT),
    ],
    ids=str,
)
def test_gradients_and_theirs_are_the_native_bits(num_ranks, dtype, fixed):
    launch(compare, num_ranks, dtype, fixed, timeout=200)


def record_on_some(group, fixed):
    device = LateDevice(1e-3 * group.rank)
    with opened(group, device) as comm:
        for recorder in (0, 1):
            x, ids = inputs_of(comm.rank)
            x.requires_grad_(comm.rank == recorder)
            received = comm.dispatch(x, ids, **fixed)
            assert received.x.requires_grad == (comm.rank == recorder)
            home = comm.combine(received.x, received.handle)
            assert torch.equal(home.detach(), home_of(comm, *inputs_of(comm.rank), received.handle.layout))
        assert calls_of_hosts(comm) == 0
        comm.check()
    device.end()


@pytest.mark.parametrize("fixed", [FIXED, FLAT], ids=str)
def test_who_makes_a_call_does_not_depend_on_who_records_it(fixed):
    launch(record_on_some, 2, fixed, timeout=100)


# -- nothing arrives, and too much -----------------------------------------------------------------------------------


def run_out_of_room(group, fixed):
    device = LateDevice(5e-4 * group.rank)
    with opened(group, device) as comm:
        x, ids = inputs_of(comm.rank)

        def learn_from(x, ids, **options):
            leaf = x.clone().requires_grad_()
            received = comm.dispatch(leaf, ids, **(fixed | options))
            home = comm.combine(2 * received.x, received.handle)
            return torch.autograd.grad(home.sum(), leaf)[0]

        for _ in range(2):
            with contextlib.suppress(CapacityExceeded):  # where a later call has been told
                learn_from(x, torch.zeros_like(ids[:, :1]), capacity=3)
            with pytest.raises(CapacityExceeded, match=f"{4 * comm.num_ranks} rows for rank 0, but .* room for 3"):
                comm.check()
            group.all_gather(None)
            found = learn_from(x, ids)
            assert torch.equal(found, 2 * home_of(comm, torch.ones_like(x), ids, fixed.get("layout")))
        few = x[: 2 * comm.rank]
        found = learn_from(few, torch.full_like(ids[: 2 * comm.rank], -1))  # no rows go anywhere, and rank 0 has none
        assert torch.equal(found, torch.zeros_like(few))
        assert calls_of_hosts(comm) == 0
        comm.check()
    device.end()


@pytest.mark.parametrize(("num_ranks", "fixed"), [(1, FIXED), (2, FIXED), (2, FLAT)], ids=str)
def test_ranks_go_on_after_they_ran_out_of_room_and_where_nothing_arrives(num_ranks, fixed):
    launch(run_out_of_room, num_ranks, fixed, timeout=100)


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [FIXED, FLAT], ids=str)
def test_a_handle_is_good_when_its_rows_have_gone(fixed):
    device = LateDevice()
    with opened(None, device) as comm:
        x, ids = inputs_of(0)
        first = comm.dispatch(x.clone().requires_grad_(), ids, **fixed)
        where, handle, y = first.x.data_ptr(), first.handle, first.x.detach().clone()
        del first
        gc.collect()
        other = check_pair(comm, 3, 3, **fixed)
        assert other.x.data_ptr() == where, "the block was kept"
        assert torch.equal(comm.combine(y, handle), home_of(comm, x, ids, handle.layout))
        assert torch.equal(comm.dispatch(x, handle=handle).x, y)
        counted = handle.counts.clone()
        assert torch.equal(counted, comm.dispatch(x, ids, **fixed).handle.counts)
    device.end()


def test_a_backward_keeps_no_rows_that_a_checkpoint_does_not():
    device = LateDevice()
    alive = {}
    with opened(None, device) as comm:
        x, ids = inputs_of(0)

        def layer(x):
            received = comm.dispatch(x, ids, **FIXED)
            return comm.combine(torch.sin(received.x), received.handle)

        for num_layers in (1, 2, 6):  # the first backward makes blocks of its own
            out = x.clone().requires_grad_()
            for _ in range(num_layers):
                out = checkpoint(layer, out, use_reentrant=False)
            gc.collect()
            alive[num_layers] = comm.stats["receive_blocks_alive"]
            out.sum().backward()
            del out
    device.end()
    assert alive[6] == alive[2]


def test_other_gradients_are_not_added_where_rows_arrive(monkeypatch):
    """In a graph nobody would notice, and rows that no route fills would not be zero in the next replay."""
    arrived, again = [], Exchanger.dispatch_again

    def look(*args):
        arrival = again(*args)
        arrived.append((arrival.x.data_ptr(), arrival.x.shape))
        return arrival

    device = LateDevice()

    def view(address, owner, dtype, shape):
        """A tensor to whose storage nothing else refers: whether that is so otherwise depends on torch's version."""
        memory = device.bytes_at(address, math.prod(shape) * dtype.itemsize, owner).numpy()
        return torch.from_numpy(memory.view(torch.empty(0, dtype=dtype).numpy().dtype).reshape(shape))

    monkeypatch.setattr(Exchanger, "dispatch_again", look)
    monkeypatch.setattr(device, "view", view)
    with opened(None, device) as comm:
        x, ids = inputs_of(0)
        received = comm.dispatch(x.requires_grad_(), ids, **FIXED)
        y = received.x + 1
        y.retain_grad()
        other = y.square().sum()  # whose gradient comes second
        home = comm.combine(y, received.handle)
        (home.sum() + other).backward()
        num_rows = int(received.num_tokens_per_expert.sum())
        ((address, shape),) = arrived
        rows = view(address, None, x.dtype, shape)
        assert torch.equal(y.grad, rows + 2 * y)
        assert bool((y.grad[num_rows:] == 2).all())
        assert not rows[num_rows:].any()
    device.end()


# -- recompute -------------------------------------------------------------------------------------------------------


def recompute(group, way, fixed, culprit):
    """Gradients under checkpointing; then one rank's recompute routes otherwise; then all is right again."""
    device = LateDevice(5e-4 * group.rank)
    with opened(group, device) as comm:
        x, ids, weights, scale = leaves_of(comm, torch.float32)
        leaves = leaves_for(way, fixed, x, weights, scale)
        routes = iter([])

        def part(x, weights, scale):
            return way(comm, x, next(routes), weights, scale, fixed)

        def step(second):
            nonlocal routes
            routes = iter([ids, second])
            out = checkpoint(part, x, weights, scale, use_reentrant=False)
            return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

        out = way(comm, x, ids, weights, scale, fixed)
        wanted = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

        def check_step():
            for one, other in zip(step(ids.clone()), wanted, strict=True):
                assert_bitwise_equal(one, other, f"rank {group.rank}")

        check_step()
        other = ids.clone()
        if comm.rank == culprit:
            other[[0, 1]] = ids[[1, 0]]  # all counts agree
            assert not torch.equal(ids, other)
        for _ in range(2):
            with contextlib.suppress(RoutingChanged):  # where a later call has been told
                step(other)
            with pytest.raises(RoutingChanged, match=rf"a recompute of the device of .*rank {culprit}"):
                comm.check()
            group.all_gather(None)
            check_step()
            comm.check()
        assert calls_of_hosts(comm) == 0
    device.end()


@pytest.mark.parametrize(
    ("num_ranks", "way", "fixed", "culprit"),
    [
        (1, at_home, FIXED, 0),
        (2, at_home, FIXED, 1),
        (3, travelling, FIXED, 2),
        (2, travelling, FLAT, 0),
        (2, at_home, FLAT, 1),
    ],
    ids=lambda it: getattr(it, "__name__", str(it)),
)
def test_a_recompute_that_routes_otherwise_stops_all_ranks(num_ranks, way, fixed, culprit):
    launch(recompute, num_ranks, way, fixed, culprit, timeout=200)


def change_the_shape(group):
    device = LateDevice()
    with opened(group, device) as comm:
        x, ids = inputs_of(comm.rank)
        routes = iter([])

        def part(x):
            received = comm.dispatch(x, next(routes), **FIXED)
            return comm.combine(received.x, received.handle)

        def step(second):
            nonlocal routes
            routes = iter([ids, second])
            leaf = x.clone().requires_grad_()
            out = checkpoint(part, leaf, use_reentrant=False, determinism_check="none")
            return torch.autograd.grad(out.sum(), leaf)[0]

        for _ in range(2):  # alike on all ranks, which go on
            with pytest.raises(RoutingChanged, match=r"topk_idx of shape \[4, 2\], the forward had \[4, 3\]"):
                step(ids[:, :2])
            group.all_gather(None)
            assert torch.equal(step(ids), torch.full_like(x, 3))
        comm.check()
    device.end()


def test_a_recompute_of_another_shape_is_found_by_the_host():
    launch(change_the_shape, 2, timeout=100)

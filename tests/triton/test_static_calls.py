"""Throughput calls of fixed shape that a device makes by itself: errors, calls in flight, mixtures, gradients."""

import gc
from datetime import timedelta

import pytest
import torch
from fixed_calls import FIXED, FLAT, LOW, check_pair, home_of, inputs_of, opened
from late_device import LateDevice, LateStream
from late_ranks import GIVE_UP, SIZES

from moecomm import (
    CallMismatch,
    CapacityExceeded,
    Communicator,
    CommunicatorClosed,
    MemoryLimitExceeded,
    PeerFailed,
    PeerLost,
    PeerTimeout,
    TooManyInFlight,
)
from moecomm.testing import launch


@pytest.fixture(autouse=True)
def _poisoned():
    """What torch makes uninitialised is NaN, so what is read too early is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# -- errors that the device finds --------------------------------------------------------------------------------------


def find_errors(group, fixed):
    device = LateDevice(1e-3 * group.rank)
    with opened(group, device) as comm:
        check_pair(comm, **fixed)
        x, ids = inputs_of(comm.rank)
        wrong = ids.clone()
        if comm.rank == group.size - 1:
            wrong[2, 1] = 99
        comm.dispatch(x, wrong, **fixed)
        with pytest.raises(ValueError, match=rf"topk_idx\[2, 1\] = 99 of the device of .*rank {group.size - 1}"):
            comm.check()
        check_pair(comm, 1, **fixed)
        all_at_one = torch.zeros(4, 1).long() if comm.rank == 0 else torch.full((0, 1), -1)
        received = comm.dispatch(x[: len(all_at_one)], all_at_one, **(fixed | {"capacity": 3}))
        # What is known is raised by later calls of the devices, until all ranks have checked.
        device.current_stream().synchronize()
        group.all_gather(None)
        comm._exchanger.session.device_calls.ask(lambda: None)
        for options in (fixed, LOW):
            with pytest.raises(CapacityExceeded, match="4 rows for rank 0, but there is room for 3"):
                comm.dispatch(x, ids, **options)
        with pytest.raises(CapacityExceeded):
            comm.combine(received.x, received.handle)
        there = comm.dispatch(x, ids)  # which hosts carry
        assert torch.equal(comm.combine(there.x, there.handle), 3 * x)
        with pytest.raises(CapacityExceeded):
            comm.check()
        group.all_gather(None)
        if group.size > 1:
            for others in ({"capacity": 41}, {"layout": "expert_major" if fixed is FLAT else "flat"}):
                comm.dispatch(x, ids, **(fixed | others if comm.rank else fixed))
                with pytest.raises(CallMismatch, match="all ranks must give the same .* layout, .* capacity"):
                    comm.check()
                group.all_gather(None)
        check_pair(comm, 2, **fixed)
        comm.check()
    device.end()


@pytest.mark.parametrize(("num_ranks", "fixed"), [(1, FIXED), (3, FIXED), (2, FLAT)], ids=str)
def test_check_tells_what_the_device_has_found_and_ranks_go_on(num_ranks, fixed):
    launch(find_errors, num_ranks, fixed, timeout=100)


def mix_handles(group):
    device = LateDevice()
    with opened(group, device) as comm:
        first, second = check_pair(comm), check_pair(comm, 1)
        other = (first, second)[comm.rank]
        comm.combine(other.x, other.handle)
        with pytest.raises(CallMismatch, match=r"readiness #2: .* handles of the same dispatch"):
            comm.check()
        group.all_gather(None)
        comm.dispatch(inputs_of(comm.rank)[0], handle=other.handle)
        with pytest.raises(CallMismatch, match=r"announcement #2: "):
            comm.check()
        group.all_gather(None)
        x = inputs_of(comm.rank, 1)[0]
        again = comm.dispatch(x, handle=second.handle)
        assert torch.equal(again.x, second.x)
        assert torch.equal(comm.combine(again.x, second.handle), 3 * x)
    device.end()


def test_handles_of_different_dispatches_are_told_from_each_other():
    launch(mix_handles, 2, timeout=100)


def never_come(group, fixed):
    device = LateDevice()
    with opened(group, device, timeout=GIVE_UP) as comm:
        check_pair(comm, **fixed)
        gc.collect()
        group.all_gather(None)
        if comm.rank == 0:
            received = comm.dispatch(*inputs_of(0), **fixed)
            with pytest.raises(PeerTimeout, match=r"announcement #1: .* rank 1.*: counter at 1, expected 2"):
                comm.check()
            with pytest.raises(PeerTimeout):  # this lasts
                comm.combine(received.x, received.handle)
            del received
            gc.collect()
            comm.trim()  # a late peer may still write to the block
            assert comm.stats["receive_bytes_alive"] > 0
        group.all_gather(None)
    device.end()


def test_a_rank_that_does_not_come_is_named_and_may_still_write():
    launch(never_come, 2, FLAT, timeout=100)


def leave(group):
    device = LateDevice()
    caller = LateStream(device.failures)
    with opened(group, device, timeout=timedelta(seconds=60)) as comm:
        received = check_pair(comm)
        if comm.rank == 0:
            with device.using(caller):  # on which nothing blocks the host
                home = comm.combine(received.x, received.handle)
            with pytest.raises(PeerLost, match="waited for work of ranks 1, which have ended"):
                comm.check()
            with pytest.raises(PeerLost):
                comm.dispatch(*inputs_of(0), **FIXED)
            assert home.shape == (4, 24)
    caller.end()
    device.end()


def test_a_rank_that_has_gone_is_named_long_before_the_timeout():
    launch(leave, 2, timeout=55)  # a wait may take 60 s


def refuse(group, fixed):
    device = LateDevice()
    with opened(group, device, timeout=timedelta(seconds=12)) as comm:
        x, ids = inputs_of(comm.rank)
        received = comm.dispatch(x, ids, **fixed)
        needed = 20 * (1 << 20) * (24 * 4 + (3 * 4 if fixed is FLAT else 0))
        for _ in range(2):  # alike on all ranks, which go on
            wrong = {"capacity": 3, "expert_alignment": 4}
            for options, why in ((fixed | {"capacity": 0}, "capacity must be in"), (fixed | wrong, "must be")):
                with pytest.raises(ValueError, match=why):
                    comm.dispatch(x, ids, **options)
            with pytest.raises(MemoryLimitExceeded, match=f"every rank needs {needed} bytes"):
                comm.dispatch(x, ids, **(fixed | {"capacity": 20 * (1 << 20)}))
            with pytest.raises(ValueError, match="y has 4 rows"):
                comm.combine(x, received.handle)
            check_pair(comm, **fixed)
        comm.check()
        group.all_gather(None)
        # Devices would pair the peer's call with this rank's next one.
        if comm.rank == 1:
            comm.dispatch_async(x, ids, **fixed)
        group.all_gather(None)
        if comm.rank == 0:
            with pytest.raises(ValueError, match="x has hidden size 23"):
                comm.dispatch(x[:, :23], ids, **fixed)
        group.all_gather(None)
        with pytest.raises(PeerFailed, match=r"rank 0.* has refused dispatch #\d+: ValueError: x has hidden size 23"):
            comm.dispatch(x, ids, **fixed)
    device.end()


@pytest.mark.parametrize("fixed", [FIXED, FLAT], ids=str)
def test_calls_that_one_rank_refuses_are_not_paired_with_others(fixed):
    launch(refuse, 2, fixed, timeout=100)


# -- calls in flight ---------------------------------------------------------------------------------------------------


def overlap(group):
    device = LateDevice(1e-3 * group.rank)
    with opened(group, device) as comm:
        sent = [inputs_of(comm.rank, seed) for seed in range(2)]
        works = [comm.dispatch_async(*one, **FIXED) for one in sent]
        with pytest.raises(TooManyInFlight, match="max_in_flight is 2"):
            comm.dispatch_async(*sent[0], **FIXED)
        order = (0, 1) if comm.rank else (1, 0)
        received = {one: works[one].wait() for one in order}
        assert all(work.done() for work in works)
        # The same handle twice, and two of them.
        works = [comm.combine_async((seed + 1) * received[0].x, received[0].handle) for seed in range(2)]
        for seed in order:
            assert torch.equal(works[seed].wait(), 3 * (seed + 1) * sent[0][0])
        works = [comm.combine_async(received[seed].x, received[seed].handle) for seed in range(2)]
        for seed in order:
            assert torch.equal(works[seed].wait(), 3 * sent[seed][0])
        # Calls of all kinds beside them, some ranks a phase further, waited for in different orders.
        for other in ({}, LOW, FIXED, FLAT):
            for seed in range(2):
                kinds = (FIXED, other) if seed else (other, FIXED)
                works = []
                for one, options in zip(sent, kinds, strict=True):
                    works.append(comm.dispatch_async(*one, **options))
                    if comm.rank == seed:
                        works[-1].step()
                order = (0, 1) if comm.rank else (1, 0)
                received = {one: works[one].wait() for one in order}
                works = [comm.combine_async(received[one].x, received[one].handle) for one in range(2)]
                for one in order:
                    home = home_of(comm, *sent[one], received[one].handle.layout)
                    assert torch.equal(works[one].wait(), home)
        comm.check()
    device.end()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_calls_in_flight_beside_each_other(num_ranks):
    launch(overlap, num_ranks, timeout=100)


def close_in_flight(group):
    device = LateDevice(2e-3)
    comm = opened(group, device)
    received = check_pair(comm)
    expected = received.x.clone()
    works = [comm.combine_async(received.x, received.handle), comm.dispatch_async(*inputs_of(comm.rank), **FIXED)]
    comm.close()
    for work in works:
        with pytest.raises(CommunicatorClosed, match="was in flight when the communicator was closed"):
            work.wait()
    del works, work, comm
    gc.collect()
    assert torch.equal(received.x, expected)
    device.end()


def test_closing_with_calls_in_flight():
    launch(close_in_flight, 2, timeout=100)


# -- gradients ---------------------------------------------------------------------------------------------------------


def learn(comm, fixed):
    """Gradients of what only experts and router have, so that autograd does not record the dispatch."""
    x, ids = inputs_of(comm.rank)
    received = comm.dispatch(x, ids, **fixed)
    scale = torch.linspace(0.5, 2, 24).requires_grad_()
    weights = torch.rand(4, 3, generator=torch.Generator().manual_seed(comm.rank)).requires_grad_()
    at_home = None if fixed is FLAT else weights
    home = comm.combine(received.x * scale, received.handle, topk_weights=at_home)
    (home * x.cumsum(1)).sum().backward()
    return received, home.detach(), scale.grad, *([] if at_home is None else [weights.grad])


def record_the_combine(group, fixed):
    device = LateDevice(1e-3 * group.rank)
    with opened(group, device) as comm:
        received, *found = learn(comm, fixed)
        assert received.handle.routing.on_device is not None
        counts, stamp = received.handle.counts, received.handle.stamp
        check_pair(comm, 1, **fixed)
    with Communicator(group, **SIZES) as native:
        received, *wanted = learn(native, fixed)
        assert torch.equal(counts, received.handle.counts)
        assert stamp[1] == received.handle.stamp[1]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    device.end()


@pytest.mark.parametrize(("num_ranks", "fixed"), [(1, FIXED), (2, FIXED), (2, FLAT)], ids=str)
def test_a_combine_is_recorded_where_its_dispatch_was_not(num_ranks, fixed):
    launch(record_the_combine, num_ranks, fixed, timeout=100)

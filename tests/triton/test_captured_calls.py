"""Low-latency calls of communicators on a device that does its work late: errors, calls in flight, blocks, mixtures."""

import gc
from datetime import timedelta

import pytest
import torch
from late_device import LateDevice
from late_ranks import GIVE_UP, SIZES

from moecomm import Communicator, CommunicatorClosed, MemoryLimitExceeded, PeerFailed, PeerTimeout, TooManyInFlight
from moecomm.testing import launch, masked, uniform
from moecomm.testing.contracts import World, low_latency
from moecomm.testing.contracts.cases import cases_for

LOW = {"mode": "low_latency"}


@pytest.fixture(autouse=True)
def _poisoned():
    """What torch makes uninitialised is NaN, so what is read too early is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def opened(group, device, **options):
    return Communicator(group, **(SIZES | {"memory_limit": 1 << 21} | options), transport="local", device=device)


def inputs_of(rank, seed=0, num_tokens=4):
    return torch.full((num_tokens, 24), float(rank + 1 + 10 * seed)), uniform(num_tokens, 6, 3, seed=rank + 7 * seed)


def check_pair(comm, seed=0):
    """A dispatch and a combine that bring back three times what was sent, without the host."""
    x, ids = inputs_of(comm.rank, seed)
    received = comm.dispatch(x, ids, **LOW)
    assert received.handle.routing.on_device is not None, "the hosts took part"
    assert torch.equal(comm.combine(received.x, received.handle), 3 * x)


def few_cases(num_ranks):
    """Kernels are interpreted."""
    return [case for case in cases_for(num_ranks) if max(case.tokens) <= 5][:3]


@pytest.mark.parametrize("check", low_latency.CHECKS, ids=lambda check: check.__name__)
def test_the_contract_of_low_latency(check, monkeypatch):
    def opened_for(group, transport, case, max_tokens=None):
        sizes = {"num_experts": case.num_experts, "hidden": case.hidden, "num_topk": case.num_topk}
        sizes["max_tokens_per_rank"] = max_tokens or max(1, *case.tokens)
        limit = {"memory_limit": 1 << 26, "timeout": timedelta(seconds=60)}
        return Communicator(group, **sizes, **limit, transport=transport, device=LateDevice())

    monkeypatch.setattr(low_latency, "_communicator", opened_for)
    check(World("threads", "local", rank_counts=(1, 2, 3, 4), timeout=200, cases=few_cases))


# -- errors that the device finds --------------------------------------------------------------------------------------


def find_errors(group):
    device = LateDevice(1e-3 * group.rank)
    with opened(group, device) as comm:
        comm.check()
        check_pair(comm)
        x, ids = inputs_of(comm.rank)
        wrong = ids.clone()
        if comm.rank == group.size - 1:
            wrong[2, 1] = 99
        comm.dispatch(x, wrong, **LOW)  # the host does not look
        with pytest.raises(ValueError, match=rf"topk_idx\[2, 1\] = 99 of the device of .*rank {group.size - 1}"):
            comm.check()
        comm.check()
        check_pair(comm, 1)
        twice = torch.zeros_like(ids) + torch.arange(3) % 2
        received = comm.dispatch(x.repeat(2, 1), twice.repeat(2, 1), **LOW)
        with pytest.raises(ValueError, match="room for"):
            comm.check()
        # What is known is raised by later calls, until all ranks have checked.
        comm.dispatch(x, wrong, **LOW)
        device.current_stream().synchronize()
        group.all_gather(None)
        for _ in range(2):
            with pytest.raises(ValueError, match="is not an expert"):
                comm.dispatch(x, ids, **LOW)
            with pytest.raises(ValueError, match="is not an expert"):
                comm.combine(received.x, received.handle)
        with pytest.raises(ValueError, match="is not an expert"):
            comm.check()
        group.all_gather(None)
        check_pair(comm, 2)
    device.end()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_check_tells_what_the_device_has_found_and_ranks_go_on(num_ranks):
    launch(find_errors, num_ranks, timeout=100)


def never_come(group):
    device = LateDevice()
    with opened(group, device, timeout=GIVE_UP) as comm:
        check_pair(comm)
        group.all_gather(None)
        if comm.rank == 0:
            received = comm.dispatch(*inputs_of(0), **LOW)
            with pytest.raises(PeerTimeout, match=r"dispatch #1: .* rank 1.*: counter at 1, expected 2"):
                comm.check()
            for _ in range(2):  # this lasts
                with pytest.raises(PeerTimeout):
                    comm.combine(received.x, received.handle)
        group.all_gather(None)
    device.end()


def test_a_rank_that_does_not_come_is_named():
    launch(never_come, 2, timeout=100)


def refuse(group):
    device = LateDevice()
    with opened(group, device, timeout=timedelta(seconds=12)) as comm:
        x, ids = inputs_of(comm.rank)
        received = comm.dispatch(x, ids, **LOW)
        for _ in range(2):  # alike on all ranks, which go on
            with pytest.raises(ValueError, match="x has hidden size 23"):
                comm.dispatch(x[:, :23], ids, **LOW)
            with pytest.raises(TypeError, match="cannot be summed"):
                comm.combine(received.x.to(torch.int32), received.handle)
            check_pair(comm)
        comm.check()
        group.all_gather(None)
        if comm.rank == 1:
            comm.combine_async(received.x, received.handle)
        group.all_gather(None)
        if comm.rank == 0:
            with pytest.raises(ValueError, match="y has 1 rows"):
                comm.combine(x[:1], received.handle)
        group.all_gather(None)
        # Devices would pair the peer's call with this rank's next one.
        for _ in range(2):
            with pytest.raises(PeerFailed, match=r"rank 0.* has refused combine #\d+: ValueError: y has 1 rows"):
                comm.dispatch(x, ids, **LOW)
            with pytest.raises(PeerFailed, match="Construct a new Communicator"):
                comm.check()
    device.end()


def test_calls_that_one_rank_refuses_are_not_paired_with_others():
    launch(refuse, 2, timeout=100)


# -- calls in flight ---------------------------------------------------------------------------------------------------


def overlap(group):
    device = LateDevice(1e-3 * group.rank)
    with opened(group, device) as comm:
        sent = [inputs_of(comm.rank, seed) for seed in range(2)]
        works = [comm.dispatch_async(*one, **LOW) for one in sent]
        with pytest.raises(TooManyInFlight, match="max_in_flight is 2"):
            comm.dispatch_async(*sent[0], **LOW)
        with pytest.raises(TooManyInFlight, match="max_in_flight is 2"):
            comm.dispatch_async(*sent[0])
        order = (0, 1) if comm.rank else (1, 0)
        received = {one: works[one].wait() for one in order}
        assert all(work.done() for work in works)
        assert torch.equal(works[0].wait().x, received[0].x)
        # The same handle twice, and two of them.
        works = [comm.combine_async((seed + 1) * received[0].x, received[0].handle) for seed in range(2)]
        for seed in order:
            assert torch.equal(works[seed].wait(), 3 * (seed + 1) * sent[0][0])
        assert torch.equal(comm.combine(received[1].x, received[1].handle), 3 * sent[1][0])
        # Throughput calls in flight beside them, waited for in different orders.
        for seed in range(2):
            work = comm.dispatch_async(*sent[0])
            if comm.rank == 0:
                work.step()
            other = comm.dispatch_async(*sent[1], **LOW)
            if comm.rank == seed:
                first, second = work.wait(), other.wait()
            else:
                second, first = other.wait(), work.wait()
            assert torch.equal(comm.combine(first.x, first.handle), 3 * sent[0][0])
            assert torch.equal(comm.combine(second.x, second.handle), 3 * sent[1][0])
        comm.check()
    device.end()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_calls_in_flight_beside_each_other(num_ranks):
    launch(overlap, num_ranks, timeout=100)


def close_in_flight(group):
    device = LateDevice(2e-3)
    comm = opened(group, device)
    x, ids = inputs_of(comm.rank)
    received = comm.dispatch(x, ids, **LOW)
    expected, tokens = received.x.clone(), received.num_tokens_per_expert.clone()
    work = comm.combine_async(received.x, received.handle)
    begun = comm.dispatch_async(x, ids, **LOW)
    comm.close()
    for one in (work, begun):
        with pytest.raises(CommunicatorClosed, match="was in flight when the communicator was closed"):
            one.wait()
    with pytest.raises(CommunicatorClosed):
        comm.check()
    del work, begun, comm
    gc.collect()
    assert torch.equal(received.x, expected)
    assert torch.equal(received.num_tokens_per_expert, tokens)
    device.end()


def test_closing_with_calls_in_flight():
    launch(close_in_flight, 2, timeout=100)


# -- gradients ---------------------------------------------------------------------------------------------------------


def learn(comm):
    """Gradients of what only experts and router have, so that autograd does not record the dispatch."""
    x, ids = inputs_of(comm.rank)
    received = comm.dispatch(x, ids, **LOW)
    scale = torch.linspace(0.5, 2, 24).requires_grad_()
    weights = torch.rand(4, 3, generator=torch.Generator().manual_seed(comm.rank)).requires_grad_()
    home = comm.combine(received.x * scale, received.handle, topk_weights=weights)
    (home * x.cumsum(1)).sum().backward()
    return received, home.detach(), scale.grad, weights.grad


def record_the_combine(group):
    device = LateDevice(1e-3 * group.rank)
    with opened(group, device) as comm:
        received, *found = learn(comm)
        assert received.handle.routing.on_device is not None
        counts, stamp = received.handle.counts, received.handle.stamp
        check_pair(comm, 1)
    with Communicator(group, **SIZES) as native:
        received, *wanted = learn(native)
        assert torch.equal(counts, received.handle.counts)
        assert stamp[1] == received.handle.stamp[1]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    device.end()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_combine_is_recorded_where_its_dispatch_was_not(num_ranks):
    launch(record_the_combine, num_ranks, timeout=100)


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_blocks_are_used_again_and_zero_beyond_the_rows():
    device = LateDevice()
    with opened(None, device) as comm:
        x, ids = inputs_of(0)
        first = comm.dispatch(x, ids, **LOW)
        where = first.x.data_ptr()
        other = comm.dispatch(x, ids, **LOW)
        assert other.x.data_ptr() != where, "a block that is in use was given out"
        first.x.fill_(7.0)  # also where there are no rows
        expected = other.x.clone()
        handle = first.handle
        del first
        gc.collect()
        third = comm.dispatch(x, ids, **LOW)
        assert third.x.data_ptr() != where, "routes are still there for the handle"
        assert torch.equal(comm.combine(third.x, handle), 3 * x)
        del handle, third
        gc.collect()
        again = [comm.dispatch(x, masked(4, 6, 3, seed=3), **LOW), comm.dispatch(x, ids, **LOW)]
        assert where in [one.x.data_ptr() for one in again]
        assert torch.equal(again[1].x, expected)
        for one in again:
            for expert, count in enumerate(one.num_tokens_per_expert.tolist()):
                assert not one.x[expert, count:].any()
        del again, other, one
        gc.collect()
        comm.trim()
        assert comm.stats["receive_bytes_alive"] == 0
    device.end()


def test_memory_that_blocks_keep_is_there_for_others():
    device = LateDevice()
    with opened(None, device) as comm:
        check_pair(comm)
        gc.collect()
        memory = comm._exchanger.session.memory
        assert memory.usage().live_bytes > 0, "the block is kept"
        others = memory.allocate(memory.limit - 4096)
        assert others is not None
        with pytest.raises(MemoryLimitExceeded, match=r"low-latency dispatch: .* needs \d+ bytes of receive memory"):
            comm.dispatch(*inputs_of(0), **LOW)
        del others
        check_pair(comm)
    device.end()


def test_what_a_graph_has_used_is_used_by_graphs_alone():
    device = LateDevice()
    with opened(None, device) as comm:
        x, ids = inputs_of(0)
        with device.capturing(), pytest.raises(ValueError, match="no block is free"):
            comm.dispatch(x, ids, **LOW)
        check_pair(comm)
        with device.capturing():
            received = comm.dispatch(x, ids, **LOW)
            comm.combine(received.x, received.handle)
            with pytest.raises(ValueError, match="hosts take part in this call"):
                comm.dispatch(x, ids)
            with pytest.raises(ValueError, match="hosts take part in this call"):
                comm.dispatch(x.clone().requires_grad_(), ids, **LOW)
        where = received.x.data_ptr()
        del received
        gc.collect()
        outside = comm.dispatch(x, ids, **LOW)
        assert outside.x.data_ptr() != where
        with device.capturing():
            assert comm.dispatch(x, ids, **LOW).x.data_ptr() == where
    device.end()


def test_rows_that_windows_do_not_hold_are_refused():
    device = LateDevice()
    with opened(None, device, hidden=64, max_tokens_per_rank=16, memory_limit=2_500_000) as comm:
        x, ids = torch.ones(4, 64), uniform(4, 6, 3, seed=0)
        with pytest.raises(ValueError, match="rows of torch.float64 have 512 bytes; a quarter of the memory_limit"):
            comm.dispatch(x.double(), ids, **LOW)
        received = comm.dispatch(x.half(), ids, **LOW)
        with pytest.raises(ValueError, match="rows of torch.float64 have 512 bytes"):
            comm.combine(received.x.double(), received.handle)
        assert torch.equal(comm.combine(received.x, received.handle), 3 * x.half())
        with pytest.raises(ValueError, match="give a smaller expert_alignment"):
            comm.dispatch(x.half(), ids, **LOW, layout="expert_major", expert_alignment=1 << 14)
    device.end()

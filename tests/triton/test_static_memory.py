"""Memory of throughput calls of fixed shape that a device makes by itself: sizes, blocks, copies, graphs."""

import gc

import pytest
import torch
from fixed_calls import FIXED, FLAT, LOW, check_pair, home_of, inputs_of, opened
from late_device import LateDevice

from moecomm.testing import launch


@pytest.fixture(autouse=True)
def _poisoned():
    """What torch makes uninitialised is NaN, so what is read too early is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def of_many_sizes(group, fixed):
    device = LateDevice()
    with opened(group, device) as comm:
        before = comm.tokens_per_expert
        rows = 0
        for step, num_tokens in enumerate((0, 1, 5, 12, 3, 0)):  # more than max_tokens_per_rank, too
            mine = num_tokens if comm.rank == 0 else 12 - num_tokens
            check_pair(comm, step, mine, **(fixed | {"capacity": 36 * group.size}))
            rows += 3 * mine
        arrived = sum(int(one.sum()) for one in group.all_gather(comm.tokens_per_expert - before))
        assert arrived == sum(group.all_gather(rows))
        comm.check()
    device.end()


@pytest.mark.parametrize(("num_ranks", "fixed"), [(1, FIXED), (2, FIXED), (2, FLAT)], ids=str)
def test_any_number_of_tokens(num_ranks, fixed):
    launch(of_many_sizes, num_ranks, fixed, timeout=100)


@pytest.mark.parametrize("fixed", [FIXED, FLAT], ids=str)
def test_blocks_are_used_again_and_zero_beyond_the_rows(fixed):
    device = LateDevice()
    with opened(None, device) as comm:
        first = check_pair(comm, **fixed)
        where = first.x.data_ptr()
        assert check_pair(comm, **fixed).x.data_ptr() != where, "a block that is in use was given out"
        if fixed is FLAT:
            first.topk_idx.fill_(7)  # also where there are no rows
        else:
            first.x.fill_(7.0)
        handle = first.handle
        del first
        gc.collect()
        third = check_pair(comm, 1, **fixed)
        assert third.x.data_ptr() != where, "routes are still there for the handle"
        x = third.x[:4]
        home = home_of(comm, x, inputs_of(0)[1], handle.layout)
        assert torch.equal(comm.combine(comm.dispatch(x, handle=handle).x, handle), home)
        del handle, third, x
        gc.collect()
        again = [check_pair(comm, seed, **fixed) for seed in range(4)]  # which finds zeros, or -1, behind the rows
        assert where in [one.x.data_ptr() for one in again]
        del again
        gc.collect()
        comm.trim()
        assert comm.stats["receive_bytes_alive"] == 0
    device.end()


def test_rows_in_receive_memory_are_not_copied():
    device = LateDevice()
    with opened(None, device) as comm:
        received = check_pair(comm)
        handle = received.handle
        assert comm.stats["copies"] == 0
        buffer = comm.combine_buffer(handle, torch.bfloat16)
        assert comm.combine(buffer.copy_(received.x), handle).dtype is torch.bfloat16
        assert comm.stats["copies"] == 0
        beside = torch.full((41 * 24,), float("nan"))
        for shift, num_copies in ((0, 1), (1, 2)):  # addresses of any alignment
            y = beside[shift : shift + 40 * 24].view(40, 24)
            num_rows = int(received.num_tokens_per_expert.sum())
            y[:num_rows] = received.x[:num_rows]  # and none of the rest is looked at
            assert torch.equal(comm.combine(y, handle), 3 * inputs_of(0)[0])
            assert comm.stats["copies"] == num_copies
    device.end()


def test_what_a_graph_has_used_is_used_by_graphs_alone():
    device = LateDevice()
    with opened(None, device) as comm:
        x, ids = inputs_of(0)
        with device.capturing(), pytest.raises(ValueError, match="dispatch: no block is free"):
            comm.dispatch(x, ids, **FIXED)
        received = comm.dispatch(x, ids, **FIXED)
        with device.capturing():
            with pytest.raises(ValueError, match="combine: no block is free"):
                comm.combine(received.x.clone(), received.handle)
            with pytest.raises(ValueError, match="combine_buffer: a capture makes no memory"):
                comm.combine_buffer(received.handle, torch.float32)
        comm.combine(received.x.clone(), received.handle)
        del received
        gc.collect()
        with device.capturing():
            received = comm.dispatch(x, ids, **FIXED)
            comm.combine(received.x.clone(), received.handle)
        where = received.x.data_ptr()
        del received
        gc.collect()
        assert check_pair(comm).x.data_ptr() != where
        with device.capturing():
            assert comm.dispatch(x, ids, **FIXED).x.data_ptr() == where
    device.end()


def test_where_low_latency_is_refused_for_its_windows():
    options = {"max_tokens_per_rank": 4096, "memory_limit": 1 << 16}
    with opened(None, LateDevice(), **options) as comm:
        with pytest.raises(ValueError, match="of cuda memory for windows"):
            comm.dispatch(*inputs_of(0), **LOW)
        for seed in range(3):
            check_pair(comm, seed)

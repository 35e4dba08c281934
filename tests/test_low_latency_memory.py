"""Memory of low-latency mode: what no route fills is zero whoever has written to it before, and nothing that is still
in use is ever written to.
"""

import ctypes
import threading

import pytest
import torch
from exchange_ranks import caught
from low_latency_ranks import low_latency_of, open_communicator, padding_is_zero, rows_in_order

from moecomm import SoloGroup
from moecomm.gradients import spread
from moecomm.kernels import kernels_for
from moecomm.testing import launch, masked, origin_of_rows, rows_with_origin, uniform
from moecomm.testing.compare import assert_bitwise_equal

HIDDEN, EXPERTS, TOPK, MOST = 16, 6, 2, 8


def batch(rank, number, dtype=torch.float32):
    """x, topk_idx and topk_weights of one call: more and fewer tokens in turn, which say where they come from."""
    count = (8, 0, 3, 5, 1)[(number + rank) % 5]
    idx = (uniform, masked)[number % 2](count, EXPERTS, TOPK, seed=10 * number + rank)
    return rows_with_origin(rank, count, HIDDEN, dtype), idx, torch.rand(count, TOPK) + 1


def write_torch(tensor):
    tensor.fill_(7)


def write_view(tensor):
    tensor.flatten()[-3:].add_(1)


def write_out(tensor):
    torch.add(tensor, 1, out=tensor)


def write_part(tensor):
    tensor[..., -1, -1:].copy_(torch.tensor([5.0]))


WRITES = {"fill_": write_torch, "view": write_view, "out=": write_out, "copy_ to a part": write_part}


@pytest.mark.parametrize("layout", ["slab", "expert_major"])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_padding_is_zero_after_writes_in_place(write, inference, layout):
    with torch.inference_mode(inference), open_communicator(SoloGroup()) as comm:
        for number in range(8):
            x, idx, weights = batch(0, number)
            received = low_latency_of(comm, x, idx, weights, layout=layout)
            assert padding_is_zero(received), number
            if number % 3:
                write(received.x)
            if number % 2:
                write(received.topk_weights[..., None])
            del received


def written_by_raw_pointer(comm, x, idx):
    """What compiled code does with the outputs of an operator: it uses their memory again, and torch never learns."""
    how = ("low_latency", "slab", MOST, 1)
    outputs = torch.ops.moecomm.dispatch(x, idx, None, *how, comm.id, 1, EXPERTS, EXPERTS)
    ctypes.memset(outputs[0].data_ptr(), 1, outputs[0].nbytes)


def test_padding_is_zero_after_compiled_code():
    with open_communicator(SoloGroup()) as comm:
        for number in range(4):
            x, idx, _ = batch(0, number)
            written_by_raw_pointer(comm, x, idx)
            assert padding_is_zero(low_latency_of(comm, x, idx)), number


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_that_writes_over_what_it_got_changes_nothing():
    with open_communicator(SoloGroup()) as comm:

        def exchange(x, idx, weights):
            received = comm.dispatch(x, idx, mode="low_latency")
            once = comm.combine(received.x * 2 + 1, received.handle, weights)
            return comm.combine((received.x * 3 + 1).sigmoid(), received.handle) + once

        compiled = torch.compile(exchange, fullgraph=True, dynamic=False)
        for number in range(6):
            x, idx, weights = batch(0, 5 * number)
            with torch.no_grad():
                assert_bitwise_equal(compiled(x, idx, weights), exchange(x, idx, weights), "compiled")
                assert padding_is_zero(low_latency_of(comm, x, idx))


def change_everything(group):
    """Blocks of several dtypes, with weights and without, in both layouts, trimmed in between, with results alive."""
    alive = []
    with open_communicator(group) as comm:
        for number in range(40):
            dtype = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)[number % 7 % 4]
            x, idx, weights = batch(comm.rank, number, dtype)
            layout = ("slab", "expert_major")[number // 3 % 2]
            alignment = (1, 4)[number // 2 % 2] if layout == "expert_major" else 1
            options = {"layout": layout, "expert_alignment": alignment}
            received = low_latency_of(comm, x, idx, weights if number % 5 else None, **options)
            assert padding_is_zero(received), number
            alive.append((received, received.x.clone()))
            if number % 4 == 1:
                alive.pop(number % len(alive))[0].x.fill_(3)
            if number % 6 == 2:
                comm.trim()
            del received
            for earlier, as_it_was in alive:
                assert_bitwise_equal(earlier.x, as_it_was, f"a result that is alive in call {number}")
            if len(alive) > 5:
                del alive[:3]
        del alive, earlier, as_it_was
        group.all_gather(None)


@pytest.mark.parametrize(("backend", "num_ranks"), [("threads", 1), ("threads", 3), ("stepped", 2), ("processes", 2)])
def test_padding_is_zero_and_results_stay_whatever_comes_in_between(backend, num_ranks):
    launch(change_everything, num_ranks, backend=backend)


def test_layouts_of_the_same_size_do_not_mislead_each_other():
    """Every token may choose every expert: slab and expert_major then have equally many rows, in other places."""
    with open_communicator(SoloGroup(), experts=2) as comm:
        for number in range(12):
            idx = torch.tensor([[0, 1]]).expand((8, 1, 5, 0)[number % 4], 2)
            received = low_latency_of(
                comm, torch.ones(idx.shape[0], HIDDEN), idx, layout=("slab", "expert_major")[number % 2]
            )
            assert padding_is_zero(received), number
            del received


def test_memory_is_used_again_and_cleared_only_where_it_must_be(monkeypatch):
    """A steady state clears nothing: otherwise each call would touch fresh pages."""
    with open_communicator(SoloGroup()) as comm:
        memory = comm._exchanger.session.memory
        cleared = []
        clear = memory.clear
        monkeypatch.setattr(memory, "clear", lambda block: (cleared.append(block.offset), clear(block)))
        for number in range(30):
            x, idx, weights = batch(0, number)
            received = low_latency_of(comm, x, idx)
            out = comm.combine(torch.tanh(received.x), received.handle, weights)
            assert out.shape == x.shape
            if number == 9:
                warm = len(cleared)
        assert len(cleared) == warm <= 2
        assert comm.stats["fixed_blocks_alive"] <= 1 + 2 * comm.max_in_flight


# -- windows -----------------------------------------------------------------------------------------------------------


def keep_in_flight(group, depth, layout):
    """`depth` calls in flight all the time, waited for in changing orders; every row must be that of its own call."""
    with open_communicator(group, max_in_flight=depth) as comm:
        calls, results = [], []
        for number in range(6 * depth + 5):
            x, idx, weights = batch(comm.rank, number)
            x = x + number
            if len(calls) == depth:
                results.append(finish(comm, *calls.pop(number % depth)))
            work = comm.dispatch_async(x, idx, weights, mode="low_latency", layout=layout)
            x.fill_(float("nan"))  # it has been sent
            calls.append((number, work))
        results += [finish(comm, *call) for call in calls]
        # The experts' rows of several calls lie in memory that peers read, all at once.
        for first in range(0, len(results), depth):
            some = results[first : first + depth]
            works = [comm.combine_async(received.x, received.handle) for _, received in some]
            for (number, _), work in zip(reversed(some), reversed(works), strict=True):
                x, idx, _ = batch(comm.rank, number)
                assert_bitwise_equal(work.wait(), (x + number) * (idx >= 0).sum(1)[:, None], f"home again: {number}")
        group.all_gather(None)


def finish(comm, number, work):
    received = work.wait()
    rows = rows_in_order(received, received.x) if received.handle.layout == "slab" else received.x
    rows = rows[rows.any(dim=1)] - number
    origins = origin_of_rows(rows).tolist()
    expected = []
    for expert in comm.local_experts:
        for rank in range(comm.num_ranks):
            idx = batch(rank, number)[1]
            expected += [[rank, token] for token, _ in (idx == expert).nonzero().tolist()]
    assert origins == expected, number
    return number, received


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("backend", "layout"), [("threads", "slab"), ("stepped", "expert_major"), ("processes", "slab")]
)
def test_calls_in_flight_do_not_disturb_each_other(backend, layout, depth):
    launch(keep_in_flight, 3, depth, layout, backend=backend)


def one_too_many(group, depth):
    with open_communicator(group, max_in_flight=depth) as comm:
        x, idx, _ = batch(comm.rank, 0)
        works = [comm.dispatch_async(x, idx, mode="low_latency") for _ in range(depth)]
        error = caught(lambda: comm.dispatch_async(x, idx, mode="low_latency"))
        received = [work.wait() for work in works]
        for one in received[1:]:
            assert_bitwise_equal(one.x, received[0].x, "x")
        # One that does not return before it is done makes room by itself.
        works = [comm.dispatch_async(x, idx, mode="low_latency") for _ in range(depth)]
        assert_bitwise_equal(low_latency_of(comm, x, idx).x, received[0].x, "x")
        assert works[0].done()
        return error, [work.wait().handle.origin for work in works]


@pytest.mark.parametrize("depth", [1, 2, 5, 8])
def test_one_call_too_many_raises_with_the_numbers(depth):
    for (kind, text, _), origins in launch(one_too_many, 2, depth):
        assert kind == "TooManyInFlight"
        assert f"{depth} calls have begun" in text
        assert f"max_in_flight is {depth}" in text
        assert origins == list(range(depth, 2 * depth))


def test_the_memory_of_a_combine_stays_until_nobody_can_read_it():
    with open_communicator(SoloGroup(), max_in_flight=2) as comm:
        x, idx, _ = batch(0, 0)
        received = low_latency_of(comm, x, idx)
        where = received.x.data_ptr()
        comm.combine(received.x, received.handle)
        del received
        for number in range(1, 4):
            again = low_latency_of(comm, x, idx)
            assert again.x.data_ptr() != where, number
            del again
        # The call that is 2 * max_in_flight later has the same window, and lets go of what was kept for it.
        assert low_latency_of(comm, x, idx).x.data_ptr() == where


def overwrite_at_once(group, written):
    """Rank 0 uses the memory of the experts' rows again as soon as the operator has returned."""
    with open_communicator(group) as comm:
        x, idx = torch.ones(4, HIDDEN), uniform(4, EXPERTS, TOPK, seed=group.rank)
        received = low_latency_of(comm, x, idx)
        for y in (comm.combine_buffer(received.handle, x.dtype), received.x):
            y.fill_(1)
            group.all_gather(None)
            out, _ = torch.ops.moecomm.combine(y.flatten(0, 1), None, None, *spread(received.handle))
            if group.rank == 0:
                y.fill_(float("nan"))
                written.set()
            assert torch.equal(out, torch.full((4, HIDDEN), 2.0))
            group.all_gather(None)
            written.clear()


def test_operators_leave_nothing_that_peers_still_read(monkeypatch):
    """Compiled code owns what it hands to operators: another rank that reads late must not see it change."""
    kernels, written = kernels_for("cpu"), threading.Event()
    combine_rows = kernels.combine_rows

    def late(*arguments, **options):
        if threading.current_thread().name == "rank 1":
            written.wait(10)
        combine_rows(*arguments, **options)

    monkeypatch.setattr(kernels, "combine_rows", late)
    launch(overwrite_at_once, 2, written)

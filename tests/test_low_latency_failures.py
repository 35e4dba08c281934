"""Low-latency mode beside refusals, full memory, other modes and ranks that disagree; and what comes after."""

import random
from functools import partial

import pytest
import torch
from exchange_ranks import HIDDEN, Batch, caught, open_communicator
from kernel_cases import bytes_at
from low_latency_ranks import check_exchange, check_received, low_latency_of, padding_is_zero

from moecomm.testing import launch

BACKENDS = ["threads", "stepped", "processes"]
ODD = 1  # the rank that does something else


# -- refusals ----------------------------------------------------------------------------------------------------------


def too_many_tokens(group, everywhere):
    with open_communicator(group, max_tokens_per_rank=8) as comm:
        for seed in range(5):  # every window has been used
            check_exchange(comm, seed)
        windows = comm._exchanger.session.algorithms["low_latency"].tools.windows
        first, following, *_ = [window for windows_of_call in windows.incoming for window in windows_of_call]
        shape = (windows.num_windows, group.size, following - first)
        messages = bytes_at(first, shape[0] * shape[1] * shape[2]).view(shape)
        before = messages.clone()
        group.all_gather(None)
        count = 9 if everywhere or group.rank == ODD else 3
        arguments = torch.ones(count, HIDDEN), torch.zeros(count, 2, dtype=torch.int64)
        seen = [caught(partial(low_latency_of, comm, *arguments)) for _ in range(6)]
        group.all_gather(None)
        assert torch.equal(messages[:, ODD], before[:, ODD]), "something was sent"
        for seed in range(5):
            check_exchange(comm, seed)
        return seen


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_too_many_tokens_are_named_with_both_numbers_on_every_rank(backend, everywhere):
    for rank, seen in enumerate(launch(too_many_tokens, 3, everywhere, backend=backend)):
        for kind, text, peers in seen:
            assert "x has 9 tokens, a low-latency call takes at most max_tokens_per_rank=8" in text
            wanted = ("ValueError", ()) if everywhere or rank == ODD else ("PeerFailed", (ODD,))
            assert (kind, peers) == wanted


def overflow(group, transport, layout):
    """All tokens name expert 0 twice: too many rows for it, and for its rank."""
    with open_communicator(group, max_tokens_per_rank=8, num_experts=3, transport=transport) as comm:
        idx = torch.zeros(8, 2, dtype=torch.int64)
        seen = [caught(partial(low_latency_of, comm, torch.ones(8, HIDDEN), idx, layout=layout)) for _ in range(6)]
        fitting = low_latency_of(comm, torch.ones(4, HIDDEN), idx[:4], layout=layout)
        assert fitting.num_tokens_per_expert.tolist() == comm.tokens_per_expert.tolist()
        assert comm.tokens_per_expert.tolist() == [8 * group.size if group.rank == 0 else 0]
        assert padding_is_zero(fitting)
        return [error[:2] for error in seen]


@pytest.mark.parametrize("layout", ["slab", "expert_major"])
@pytest.mark.parametrize("backend", [*BACKENDS, "collective"])
def test_duplicates_that_do_not_fit_are_the_same_error_everywhere(backend, layout):
    transport = "auto" if backend in BACKENDS else backend
    results = launch(overflow, 3, transport, layout, backend=backend if backend in BACKENDS else "processes")
    assert results[0] == results[1] == results[2]
    for kind, text in results[0]:
        what = "expert" if layout == "slab" else "rank"
        assert kind == "CapacityExceeded"
        assert f"48 rows for {what} 0, but there is room for 24" in text
        assert "remove the duplicates" in text


def run_out_of_space(group, where):
    """Rank 1 lets nothing that it got die."""
    kept = []
    with open_communicator(group, max_tokens_per_rank=8) as comm:
        batch = Batch(group.size, 2)
        if where == "dispatch":
            for _ in range(400):
                received = []
                error = caught(lambda received=received: received.append(batch.send(comm, mode="low_latency")))
                if error[0] != "nothing":
                    break
                kept += received if group.rank == ODD else []
        else:
            received = batch.send(comm, mode="low_latency")
            buffer = partial(comm.combine_buffer, received.handle, torch.float32)
            while group.rank == ODD and caught(lambda: kept.append(buffer()))[0] == "nothing":
                pass
            error = caught(partial(comm.combine, received.x.clone(), received.handle))
        kept.clear()
        for seed in range(6):
            check_exchange(comm, seed)
        return error[:2]


@pytest.mark.parametrize("where", ["dispatch", "combine"])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_every_rank_learns_who_has_no_space_left(backend, where):
    results = launch(run_out_of_space, 3, where, backend=backend)
    assert results[0] == results[1] == results[2]
    kind, text = results[0]
    assert kind == "MemoryLimitExceeded"
    assert text.startswith(f"low-latency {where} #")
    assert "rank 1 (pid " in text
    assert "Let earlier results die" in text


# -- both modes at once ------------------------------------------------------------------------------------------------


def mix(group, seed):
    """A program of calls in all modes that every rank makes alike, with results awaited in another order on each."""
    program, mine = random.Random(seed), random.Random(1000 * seed + group.rank)
    depth = program.choice([1, 2, 3, 4])
    with open_communicator(group, max_tokens_per_rank=8, max_in_flight=depth) as comm:
        pending, handles = [], []
        for _ in range(60):
            if len(pending) == depth or (pending and program.random() < 0.3):
                # Waiting for one carries its elders along, so what is left is the same on all ranks at the latest here.
                mine.shuffle(pending)
                for work, check in pending:
                    check(work.wait())
                pending = []
            batch = Batch(group.size, program.randrange(12), program.choice([torch.float32, torch.bfloat16]))
            mode, layout = program.choice(
                [("throughput", "expert_major"), ("low_latency", "slab"), ("low_latency", "expert_major")]
            )
            if handles and program.random() < 0.5:
                batch, received = program.choice(handles)
                if program.random() < 0.5:
                    home = comm.combine_async(received.x, received.handle)
                    pending.append((home, partial(home_is_right, comm, batch)))
                else:
                    again = comm.dispatch_async(batch.x(comm.rank), handle=received.handle)
                    pending.append((again, partial(rows_are_right, comm, batch)))
                continue
            received = batch.send(comm, mode=mode, layout=layout)
            rows_are_right(comm, batch, received)
            handles.append((batch, received))
            handles = handles[-4:]
            work = batch.send(comm, "dispatch_async", mode=mode, layout=layout)
            if len(pending) + 1 > depth:
                rows_are_right(comm, batch, work.wait())
            else:
                pending.append((work, partial(rows_are_right, comm, batch)))
        for work, check in pending:
            check(work.wait())


def rows_are_right(comm, batch, received):
    if received.handle.mode == "throughput":
        batch.check_received(received, comm.rank)
    else:
        check_received(received, batch, comm.rank)


def home_is_right(comm, batch, out):
    batch.check_home(out, comm.rank)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("backend", "num_ranks"), [("threads", 3), ("stepped", 3), ("processes", 2)])
def test_modes_may_be_mixed_in_any_agreed_order(backend, num_ranks, seed):
    launch(mix, num_ranks, seed, backend=backend)


def disagree(group, case):
    """Rank 1 makes its calls in another order, or another call."""
    with open_communicator(group, max_tokens_per_rank=8) as comm:
        batch = Batch(group.size, 2)
        received = batch.send(comm, mode="low_latency")
        slow = partial(batch.send, comm, "dispatch_async")
        fast = partial(batch.send, comm, "dispatch_async", mode="low_latency")
        combine = partial(comm.combine_async, received.x, received.handle)
        weighted = partial(fast, topk_weights=batch.topk_weights(comm.rank))
        grouped = partial(fast, layout="expert_major", expert_alignment=4)
        orders = {
            "modes": ([fast, slow], [slow, fast]),
            "dispatch and combine": ([fast, combine], [combine, fast]),
            "weights": ([fast], [weighted]),
            "layouts": ([fast], [grouped]),
        }[case]
        works = [call() for call in orders[group.rank == ODD]]
        seen = [caught(work.wait) for work in works]
        for seed in range(6):
            check_exchange(comm, seed)
        return seen


@pytest.mark.parametrize("case", ["modes", "dispatch and combine", "weights", "layouts"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_order_on_one_rank_is_named_with_both_calls(backend, case):
    named = {
        "modes": ("low-latency dispatch(", " dispatch("),
        "dispatch and combine": ("low-latency dispatch(", "low-latency combine("),
        "weights": ("travelling weights=no", "travelling weights=yes"),
        "layouts": ("layout=slab, expert_alignment=1", "layout=expert_major, expert_alignment=4"),
    }[case]
    for seen in launch(disagree, 3, case, backend=backend):
        for number, (kind, text, _) in enumerate(seen, start=1):
            assert kind == "CallMismatch", text
            assert f"call #{number} differs between ranks" in text
            assert all(call in text for call in named), text

"""Calls that cannot be: ranks that disagree, arguments wrong on one rank, memory that does not suffice on one. Every
rank gets the named error, nothing is sent, and later calls are right.
"""

import gc
from datetime import timedelta
from functools import partial

import pytest
import torch
from exchange_ranks import EXPERTS, HIDDEN, TOPK, Batch, caught, check_exchange, left_behind, open_communicator

from moecomm.testing import all_to_one_rank, launch

BACKENDS = ["threads", "stepped", "processes"]
ODD = 1  # the rank that does something else


# -- ranks that disagree -----------------------------------------------------------------------------------------------


def calls_that_differ(comm):
    """name -> (what most ranks call, what one calls, a word of each description)."""
    batch = Batch(comm.num_ranks, 1)
    x, idx, weights = batch.x(comm.rank), batch.topk_idx(comm.rank), batch.topk_weights(comm.rank)
    first, second = batch.send(comm), batch.send(comm)
    flat = batch.send(comm, layout="flat")
    y = first.x.clone()
    one, other = (int(received.handle.stamp[0]) for received in (first, second))
    dispatch = partial(comm.dispatch, x, idx)
    return {
        "dispatch and combine": (dispatch, partial(comm.combine, y, first.handle), "dispatch(hidden", "combine(hidden"),
        "dispatch and cached dispatch": (
            dispatch,
            partial(comm.dispatch, x, handle=first.handle),
            "dispatch(hidden",
            "dispatch (cached)(hidden",
        ),
        "dtype": (dispatch, partial(comm.dispatch, x.double(), idx), "dtype=float32", "dtype=float64"),
        "bytes of the same size": (
            partial(comm.dispatch, x.to(torch.uint8), idx),
            partial(comm.dispatch, x.to(torch.int8), idx),
            "dtype=uint8",
            "dtype=int8",
        ),
        "layout": (dispatch, partial(dispatch, layout="flat"), "layout=expert_major", "layout=flat"),
        "alignment": (
            partial(dispatch, expert_alignment=4),
            partial(dispatch, expert_alignment=8),
            "expert_alignment=4",
            "expert_alignment=8",
        ),
        "num_topk": (dispatch, partial(comm.dispatch, x, idx[:, :1]), "num_topk=2", "num_topk=1"),
        "weights": (
            dispatch,
            partial(dispatch, topk_weights=weights),
            "travelling weights=no",
            "travelling weights=yes",
        ),
        "weights of a combine": (
            partial(comm.combine, y, first.handle),
            partial(comm.combine, y, first.handle, weights),
            "travelling weights=no, handle",
            "travelling weights=no, topk_weights, handle",
        ),
        "handle of a cached dispatch": (
            partial(comm.dispatch, x, handle=first.handle),
            partial(comm.dispatch, x, handle=second.handle),
            f"handle of dispatch #{one}",
            f"handle of dispatch #{other}",
        ),
        "handle of a combine": (
            partial(comm.combine, y, first.handle),
            partial(comm.combine, y, second.handle),
            f"handle of dispatch #{one}",
            f"handle of dispatch #{other}",
        ),
        "layout of a combine": (
            partial(comm.combine, y, first.handle),
            partial(comm.combine, flat.x, flat.handle),
            "layout=expert_major",
            "layout=flat",
        ),
        "dtype of a combine": (
            partial(comm.combine, y, first.handle),
            partial(comm.combine, y.to(torch.bfloat16), first.handle),
            "dtype=float32",
            "dtype=bfloat16",
        ),
    }


def disagree(group):
    seen = {}
    with open_communicator(group) as comm:
        for number, (name, (usual, odd, *words)) in enumerate(calls_that_differ(comm).items()):
            seen[name] = (*caught(odd if group.rank == ODD else usual), words)
            check_exchange(comm, number)
        for _ in range(10):  # more often than messages are kept
            seen["again"] = caught(calls_that_differ(comm)["layout"][group.rank == ODD])
        check_exchange(comm, 50)
        usual, odd, *_ = calls_that_differ(comm)["layout"]
        alive = comm.stats["receive_blocks_alive"]
    del usual, odd
    return seen, alive


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_disagree_all_see_both_calls(backend, num_ranks):
    for rank, (seen, _) in enumerate(launch(disagree, num_ranks, backend=backend)):
        assert seen.pop("again")[0] == "CallMismatch"
        for name, (kind, text, peers, words) in seen.items():
            assert kind == "CallMismatch", f"{name}, rank {rank}: {kind}: {text}"
            assert "differs between ranks" in text
            for word in words:
                assert word in text, f"{name}, rank {rank}: {text}"
            assert f"rank {ODD}" in text
            assert peers
            assert peers != (rank,)


def disagree_in_low_latency(group):
    layout = ("slab", "expert_major")[group.rank == ODD]
    with open_communicator(group, max_tokens_per_rank=8) as comm:
        batch = Batch(comm.num_ranks, 1)
        dispatch = partial(comm.dispatch, batch.x(comm.rank), batch.topk_idx(comm.rank), mode="low_latency")
        return caught(partial(dispatch, layout=layout))


def test_what_nobody_has_given_is_not_in_the_description():
    for kind, text, _ in launch(disagree_in_low_latency, 2):
        assert kind == "CallMismatch"
        assert "layout=slab, expert_alignment=1, travelling weights=no" in text, text
        assert "capacity" not in text


def construct_differently(group, name, values):
    return caught(lambda: open_communicator(group, **{name: values[group.rank == ODD]}))


@pytest.mark.parametrize(
    ("name", "values"),
    [("hidden", (16, 32)), ("num_experts", (6, 7)), ("num_topk", (2, 3)), ("max_in_flight", (2, 3))],
)
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_ranks_that_construct_differently_are_all_told(backend, name, values):
    for rank, (kind, text, _) in enumerate(launch(construct_differently, 3, name, values, backend=backend)):
        assert kind == "ValueError"
        assert f"{name} must be equal on all ranks: rank {rank} has {values[rank == ODD]}" in text
        assert str(values[rank != ODD]) in text


def construct_in_vain(group):
    gc.collect()
    gc.disable()
    try:
        before = set(left_behind())  # by what ran here earlier
        return caught(lambda: open_communicator(group, codec="morse")), set(left_behind()) - before
    finally:
        gc.enable()


def test_what_was_opened_for_a_codec_that_does_not_exist_is_closed():
    for (kind, text, _), left in launch(construct_in_vain, 2, backend="processes"):
        assert (kind, text) == ("ValueError", "codec: unknown 'morse'; available: none")
        assert left == set()


# -- arguments that are wrong on one rank ------------------------------------------------------------------------------


def mistakes(comm):
    """(call that is wrong, the call that the other ranks make, what the error names)."""
    batch = Batch(comm.num_ranks, 2)  # rank 1 has tokens in it
    x, idx, weights = batch.x(comm.rank), batch.topk_idx(comm.rank), batch.topk_weights(comm.rank)
    received = batch.send(comm)
    y, handle = received.x.clone(), received.handle
    too_large, too_small = idx.clone(), idx.clone()
    too_large[-1:, 1], too_small[-1:, 0] = EXPERTS, -2
    dispatch, cached, combine = comm.dispatch, partial(comm.dispatch, handle=handle), comm.combine
    good, good_cached, good_combine = partial(dispatch, x, idx), partial(cached, x), partial(combine, y, handle)
    return [
        (partial(dispatch, x, too_large), good, "topk_idx"),
        (partial(dispatch, x, too_small), good, "topk_idx"),
        (partial(dispatch, x[:, 1:], idx), good, "hidden"),
        (partial(dispatch, x[1:], idx), good, "topk_idx"),
        (partial(dispatch, x, idx.float()), good, "topk_idx"),
        (partial(dispatch, x, None), good, "topk_idx"),
        (partial(dispatch, None, idx), good, "x"),
        (partial(dispatch, x.to(torch.complex64), idx), good, "dtype"),
        (partial(dispatch, x, idx, weights[:, :1]), good, "topk_weights"),
        (partial(dispatch, x, idx, weights.long()), good, "topk_weights"),
        (partial(dispatch, x, idx.repeat(1, 2)), good, "num_topk"),
        (partial(dispatch, x, idx, layout="slanted"), good, "layout"),
        (partial(dispatch, x, idx, expert_alignment=0), good, "expert_alignment"),
        (partial(dispatch, x, idx, mode="telepathy"), good, "mode"),
        (partial(dispatch, x, idx, mode=["throughput"]), good, "mode: unknown"),
        (partial(dispatch, x, idx, layout=["flat"]), good, "layout: ['flat'] is not one of"),
        (partial(dispatch, x, idx, capacity=[64]), good, "capacity must be an int or None, got list"),
        (partial(dispatch, x, idx, handle=handle), good_cached, "topk_idx"),
        (partial(cached, x[1:]), good_cached, "tokens"),
        (partial(dispatch, x, handle="mine"), good_cached, "handle"),
        (partial(combine, y[1:], handle), good_combine, "rows"),
        (partial(combine, y.long(), handle), good_combine, "y"),
        (partial(combine, y, None), good_combine, "handle"),
        (partial(combine, y, handle, weights[:, :1]), good_combine, "topk_weights"),
        (partial(combine, y, handle, reduce=["exact"]), good_combine, "reduce: unknown"),
    ]


def make_mistakes(group, requires_grad):
    seen = []
    with open_communicator(group) as comm, open_communicator(group) as another:
        everything = mistakes(comm)
        foreign = Batch(group.size, 2).send(another).handle
        y = torch.zeros(foreign.num_rows, HIDDEN)
        everything.append((partial(comm.combine, y, foreign), everything[-1][1], "handle"))
        for number, (bad, good, named) in enumerate(everything):
            if requires_grad:
                bad, good = (_with_grad(call) for call in (bad, good))
            seen.append((*caught(bad if group.rank == ODD else good), named))
            if number % 5 == 0:
                check_exchange(comm, number)
        for _ in range(10):
            for bad, good, _ in everything[:2]:
                seen.append((*caught(bad if group.rank == ODD else good), "topk_idx"))
        check_exchange(comm, 50)
    return seen


def _with_grad(call):
    """The same call, through the torch operators."""
    first, *rest = call.args
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        first = first.detach().clone().requires_grad_()
    return partial(call.func, first, *rest, **call.keywords)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mistake_on_one_rank_is_named_on_all(backend, requires_grad):
    results = launch(make_mistakes, 3, requires_grad, backend=backend)
    for number, (kind, text, _, named) in enumerate(results[ODD]):
        assert kind in ("ValueError", "TypeError"), f"mistake {number}: {kind}: {text}"
        assert named in text
        for rank in (0, 2):
            other_kind, other_text, peers, _ = results[rank][number]
            assert (other_kind, peers) == ("PeerFailed", (ODD,)), f"mistake {number}: {other_kind}: {other_text}"
            assert f"rank {ODD} (pid " in other_text
            assert f"gave up: {kind}: {text}"[:900] in other_text


# -- memory that does not suffice on one rank --------------------------------------------------------------------------

ROW = HIDDEN * 4
PAGE = 4096
LIMIT = 8 * PAGE  # of the rank that is short of memory
MANY = LIMIT // ROW  # rows that fill it


def flood(group, num_tokens):
    """x and topk_idx by which all tokens of all ranks go to the rank that is short of memory."""
    x = torch.full((num_tokens, HIDDEN), float(group.rank))
    return x, all_to_one_rank(num_tokens, EXPERTS, TOPK, seed=group.rank, num_ranks=group.size, rank=ODD)


def exceed(group, where):
    limit = LIMIT if group.rank == ODD else None
    with open_communicator(group, memory_limit=limit, timeout=timedelta(seconds=20)) as comm:
        check_exchange(comm, 1)
        if where == "dispatch":
            x, idx = flood(group, MANY)
            error = caught(lambda: comm.dispatch(x, idx))
        else:
            # Each rank sends as many rows as fill three quarters of that memory together.
            x, idx = flood(group, MANY * 3 // 4 // TOPK // group.size)
            x.requires_grad_(where == "backward")
            received = comm.dispatch(x, idx)
            y = received.x.detach() + 1
            if where == "cached dispatch":
                error = caught(lambda: comm.dispatch(x, handle=received.handle))
            elif where == "combine":
                error = caught(lambda: comm.combine(y, received.handle))
            elif where == "combine_buffer":
                error = caught(lambda: comm.combine_buffer(received.handle, torch.float32))
            else:
                out = comm.combine(received.x, received.handle)
                error = caught(lambda: out.sum().backward())
                del out
            del received
        for seed in range(2, 8):
            check_exchange(comm, seed)
        return error, comm.stats


@pytest.mark.parametrize("where", ["dispatch", "cached dispatch", "combine", "backward"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_learns_whose_memory_does_not_suffice(backend, where):
    results = launch(exceed, 3, where, backend=backend)
    texts = set()
    for rank, ((kind, text, _), stats) in enumerate(results):
        assert kind == "MemoryLimitExceeded", text
        assert f"rank {ODD} (pid " in text
        assert f"memory_limit of {LIMIT} bytes" in text
        need = 3 * MANY * TOPK * ROW if where == "dispatch" else MANY * 3 // 4 // TOPK // 3 * 3 * TOPK * ROW
        assert f"needs {need} bytes" in text
        assert "nothing was received" in text
        assert stats["receive_blocks_alive"] == 0
        assert stats["receive_bytes_alive"] == 0
        if rank == ODD:
            assert stats["receive_bytes_peak"] <= LIMIT
        texts.add(text)
    assert len(texts) == 1, texts


def test_a_combine_buffer_that_does_not_fit_concerns_its_rank_only():
    results = launch(exceed, 3, "combine_buffer")
    assert [kind for (kind, _, _), _ in results] == ["nothing", "MemoryLimitExceeded", "nothing"]
    assert "combine_buffer: rank 1" in results[ODD][0][1]

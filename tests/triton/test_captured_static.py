"""Throughput calls of fixed shape by kernels: the reference's rows, replayed, under chaos, and what goes wrong."""

from dataclasses import replace

import pytest
import torch
from captured_mistakes import acquire_one_too_few, acquire_without_barrier, last_by_relaxed_arrival
from captured_ranks import Case
from captured_replay import recorded, replay
from captured_worlds import StaticRanks, assert_unchanged, places_in
from interpreter_chaos import Chaos
from static_ranks import StaticRank, static_memory

from moecomm.errors import CallMismatch, CapacityExceeded, PeerTimeout
from moecomm.kernels.triton import captured_cards, captured_send, captured_static, signals
from moecomm.kernels.triton.captured_static import StaticExchange
from moecomm.testing import launch, masked, with_duplicates
from moecomm.transports.peers import gather_peers
from moecomm.transports.shm import ShmTransport

SOON_NS = 20_000_000


@pytest.mark.parametrize(
    "case",
    [
        Case(1, "expert_major", num_experts=3),
        Case(2, "expert_major", hidden=33, values=torch.float64, dtype=torch.float64, topk=3),
        Case(3, "expert_major", num_experts=2, values=None, alignment=4),
        Case(4, "expert_major", num_experts=70, topk=5, most=30, hidden=2, alignment=1),
        Case(1, "flat", num_experts=3),
        Case(3, "flat", hidden=33, values=torch.float64, dtype=torch.float64, topk=3),
        Case(3, "flat", num_experts=2, values=None, shift=16),
        Case(4, "flat", num_experts=70, topk=5, most=70, hidden=2),
    ],
    ids=str,
)
def test_blocks_are_the_references(case):
    ranks = StaticRanks(case)
    for call in range(2 if case.most >= 10 else 4 if case.layout == "flat" else 7):
        ranks.dispatch(call, case.inputs(call, routing=with_duplicates if call % 2 else masked))


def start(group, case):
    transport = ShmTransport(group, gather_peers(group), 1)
    rank = StaticRank(case, group.rank, *[transport.addresses(transport.allocate(n)) for n in static_memory(case)])
    group.all_gather(None)

    def end():
        group.all_gather(None)
        transport.close()

    return rank, end


def call_after_call(group, case, num_calls):
    rank, end = start(group, case)
    for call in range(num_calls):
        rank.pair(call, case.inputs(call, routing=with_duplicates if call % 3 == 2 else masked))
    end()


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(1, "flat"), (2, "expert_major"), (3, "expert_major"), (3, "flat"), (4, "expert_major")],
)
def test_processes_dispatch_and_combine(num_ranks, layout):
    case = Case(num_ranks, layout, hidden=9, dtype=torch.float16, in_place=num_ranks == 3)
    launch(call_after_call, num_ranks, case, 8, backend="processes", timeout=100)


def replayed(group, case, num_replays):
    rank, end = start(group, case)
    tokens = [3, 0, case.most][: group.size]
    mine = tokens[group.rank]
    x, ids = torch.zeros(mine, case.hidden, dtype=case.dtype), torch.full((mine, case.topk), -1)
    weights = torch.zeros(mine, case.topk)
    with recorded() as launches:
        rank.static.announce(x, ids, rank.block, signature=1, topk_weights=weights)
        rank.static.push(rank.block)
        rank.static.arrive(rank.block)
    for call in range(num_replays):
        inputs = case.inputs(call, tokens)
        for kept, given in ((x, inputs.rows), (ids, inputs.ids), (weights, inputs.weights)):
            kept.copy_(given[group.rank])
        replay(launches)
        rank.exchange.check()
        rank.compare(inputs, call)
    end()


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_launches_can_be_replayed_with_new_contents(layout):
    launch(replayed, 3, Case(3, layout, hidden=16), 6, backend="processes", timeout=100)


# -- under chaos -------------------------------------------------------------------------------------------------------


def exchange(case, seed, num_calls, *, in_pairs=False):
    memory, places = places_in(case.num_ranks, static_memory(case))
    chaos = Chaos(seed, shared=memory, max_steps=600_000)
    ranks = [StaticRank(case, rank, *places, read=chaos.read) for rank in range(case.num_ranks)]

    def body(rank):
        def calls():
            for call in range(num_calls):
                (rank.pair if in_pairs else rank.dispatch)(call, case.inputs(call))

        return calls

    chaos.run(*[body(rank) for rank in ranks])


CHAOS = Case(2, "expert_major", num_experts=3, hidden=4)
FLAT = replace(CHAOS, layout="flat")


@pytest.mark.parametrize(("case", "seed"), [(CHAOS, 0), (CHAOS, 1), (CHAOS, 2), (FLAT, 0)], ids=str)
def test_right_kernels_bear_it(case, seed):
    exchange(case, seed, 3)


@pytest.mark.parametrize("case", [CHAOS, FLAT], ids=str)
def test_right_combines_bear_it(case):
    exchange(case, 0, 3, in_pairs=True)


MISTAKES = {
    "plans before all cards are there": (captured_cards, "acquire_lanes", acquire_one_too_few),
    "no barrier behind the acquire": (captured_cards, "acquire_lanes", acquire_without_barrier),
    "cards behind a relaxed arrival": (captured_send, "is_last_program", last_by_relaxed_arrival),
    "does not wait for the last rows": (signals, "acquire_lanes", acquire_one_too_few),
    "nothing becomes zero": (captured_static, "zero_rows", lambda *args: None),
}


def is_caught(case, *, in_pairs=False):
    for seed in range(8):
        try:
            exchange(case, seed, 4, in_pairs=in_pairs)
        except (AssertionError, CallMismatch, ValueError):
            return True
    return False


def test_flat_rows_that_keep_what_was_there_before_come_out(monkeypatch):
    monkeypatch.setattr(*MISTAKES["nothing becomes zero"])
    assert is_caught(FLAT)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_comes_out_with_one_of_eight_seeds(mistake, monkeypatch):
    monkeypatch.setattr(*MISTAKES[mistake])
    assert is_caught(CHAOS), "wrong kernels have given right rows with every seed"


def test_rows_that_change_before_everybody_has_read_them_come_out(monkeypatch):
    monkeypatch.setattr(StaticExchange, "release", lambda self, answered: self._combines.end(answered))
    assert is_caught(CHAOS, in_pairs=True), "nobody has noticed"


def test_one_mailbox_too_few_comes_out():
    """A rank that is ahead writes over a card that a peer still counts."""
    assert is_caught(replace(CHAOS, too_few_windows=1))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_peer_that_never_announces_is_named_and_nothing_is_written():
    case = Case(3, "expert_major")
    ranks = StaticRanks(case, timeout_ns=SOON_NS)
    ranks.dispatch(0)
    inputs = case.inputs(1)
    me, other, _ = ranks
    me.send(inputs)
    other.send(inputs)
    before = ranks.state_of(me)
    me.receive()
    with pytest.raises(PeerTimeout, match=r"announcement #1: .* rank 2: counter at 1, expected 2") as caught:
        me.exchange.check()
    assert caught.value.peers == (2,)
    assert_unchanged(before, ranks.state_of(me))
    other.receive()
    with pytest.raises(PeerTimeout, match="announcement #1"):
        other.exchange.check()
    assert_unchanged(before, [*ranks.state_of(me)[:-2], *before[-2:]])


def test_a_peer_that_announces_and_then_pushes_nothing_is_named():
    case = Case(2, "expert_major")
    ranks = StaticRanks(case, timeout_ns=SOON_NS)
    inputs = case.inputs(1)
    for rank in ranks:
        rank.send(inputs)
    ranks.ranks[0].receive()
    with pytest.raises(PeerTimeout, match=r"push #0: .* rank 1: counter at 0, expected 1"):
        ranks.ranks[0].exchange.check()


def rows_of(case, inputs):
    """Rows of each rank, padded."""
    experts = case.world.expert_rank.tolist()
    if case.layout == "flat":
        chosen = [case.world.expert_rank[ids].masked_fill(ids < 0, -1) for ids in inputs.ids]
        return [sum(int((ranks == rank).any(1).sum()) for ranks in chosen) for rank in range(case.num_ranks)]
    found = [0] * case.num_ranks
    for expert, rank in enumerate(experts):
        count = sum(int((ids == expert).sum()) for ids in inputs.ids)
        found[rank] += -(-count // case.alignment) * case.alignment
    return found


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_what_does_not_fit_stops_every_rank_alike_and_then_they_go_on(layout):
    case = Case(3, layout, num_experts=4, topk=3, alignment=2)
    ranks = StaticRanks(case)
    for rank in ranks:
        rank.block = rank.make_block(case.form._replace(num_rows=8))
    found = set()
    for call in range(2):
        inputs = case.inputs(call, [4, 4, 4], routing=with_duplicates)
        for rank in ranks:
            rank.send(inputs)
        for rank in ranks:
            before = ranks.state_of(rank)
            rank.receive()
            with pytest.raises(CapacityExceeded, match=rf"announcement #{call}: .* room for 8") as caught:
                rank.exchange.check()
            found.add(str(caught.value))
            fullest = max(range(3), key=rows_of(case, inputs).__getitem__)
            assert f"{rows_of(case, inputs)[fullest]} rows for rank {fullest}, but" in str(caught.value)
            assert_unchanged(before, ranks.state_of(rank))
    assert len(found) == 2
    for rank in ranks:
        rank.block = rank.make_block(case.form)
    ranks.dispatch(2)


def test_an_id_that_is_none_and_another_form_stop_every_rank():
    case = Case(2, "expert_major", most=300)
    ranks = StaticRanks(case)
    inputs = case.inputs(0, [2, 300])
    inputs.ids[1][290, 1] = 2**40
    inputs.ids[1][291, 0] = -5
    for rank in ranks:
        rank.send(inputs)
    for rank in ranks:
        before = ranks.state_of(rank)
        rank.receive()
        with pytest.raises(ValueError, match=r"announcement #0: topk_idx\[290, 1\] = 1099511627776 of rank 1 is not"):
            rank.exchange.check()
        assert_unchanged(before, ranks.state_of(rank))
    ranks.dispatch(1, case.inputs(1, [3, 1]))
    other = ranks.ranks[1]
    other.signature += 1
    inputs = case.inputs(2, [3, 1])
    for rank in ranks:
        rank.send(inputs)
    for rank in ranks:
        rank.receive()
        with pytest.raises(CallMismatch, match=rf"announcement #2: what rank {1 - rank.rank} has sent"):
            rank.exchange.check()
    other.signature -= 1
    ranks.dispatch(3, inputs)
    for rank in ranks:
        rank.static.send_rows(case.answers(3)[rank.rank], rank.block.answered, place=rank.out_at, signature=rank.rank)
    for rank in ranks:
        out = torch.full((inputs.ids[rank.rank].shape[0], case.hidden), 7, dtype=case.dtype)
        rank.static.sum_rows(rank.block.answered, out, signature=rank.rank)
        rank.static.release(rank.block.answered)
        with pytest.raises(CallMismatch, match=rf"readiness #0: what rank {1 - rank.rank} has sent"):
            rank.exchange.check()
        assert bool((out == 7).all())
    ranks.dispatch(4, inputs)


def test_two_calls_in_flight_fill_two_blocks_and_a_fault_of_one_is_not_the_others():
    case = Case(2, "expert_major", num_experts=3, depth=2)
    worlds = [StaticRanks(case), StaticRanks(case)]  # the second one lends its blocks
    for first, other in zip(*worlds, strict=True):
        distance = other.answers_at - other.out_at - first.answers_at + first.out_at
        other.static, other.exchange = first.static, first.exchange
        other.wanted.tokens_per_expert = first.wanted.tokens_per_expert
        other.block = first.make_block(case.form, distance)
    for call in range(0, 8, 2):
        inputs = [case.inputs(call), case.inputs(call + 1)]
        is_bad = call == 4
        if is_bad:
            inputs[0].ids[0][0, 0] = 99
        for ranks, given in zip(worlds, inputs, strict=True):
            for rank in ranks:
                rank.send(given)
        for ranks, given in zip(worlds, inputs, strict=True):
            for rank in ranks:
                rank.static.push(rank.block)
            for rank in ranks:
                rank.static.arrive(rank.block)
                if not is_bad:
                    rank.exchange.check()
                    rank.compare(given)
        for rank in worlds[0]:
            if is_bad:
                with pytest.raises(ValueError, match=r"announcement #4: topk_idx\[0, 0\] = 99 of rank 0"):
                    rank.exchange.check()


def test_arguments_are_checked():
    case = Case(2, "expert_major")
    ranks = StaticRanks(case)
    rank, inputs = ranks.ranks[0], case.inputs(0, [2, 5])
    static, form, y = rank.static, case.form, case.answers(0)[0]
    for wrong, arguments in {
        "form has slabs of 4 rows": (form._replace(capacity=4), 0, 0, None),
        "rows_at is 8, values_at 16, ids_at None; wanted multiples of 16": (form, 8, 16, None),
        "rows_at is 16, values_at 8, ids_at None; wanted multiples of 16": (form, 16, 8, None),
        "rows_at is 16, values_at 16, ids_at 8; wanted multiples of 16": (form._replace(alignment=1), 16, 16, 8),
        "form aligns experts to 3 rows; flat rows are not": (form, 16, 16, 16),
    }.items():
        *places, ids_at = arguments
        with pytest.raises(ValueError, match=wrong):
            static.block(*places, 4, ids_at=ids_at)
    for wrong, mailboxes, regions in (("mailboxes", [64], [64, 64]), ("regions", [64, 64], [64, 8])):
        with pytest.raises(ValueError, match=rf"{wrong} is \[.*\]; wanted 2 addresses, multiples of"):
            StaticExchange(rank.exchange, mailboxes, regions)
    with pytest.raises(ValueError, match="no dispatch has been announced"):
        static.push(rank.block)
    with pytest.raises(ValueError, match="no dispatch has begun"):
        static.arrive(rank.block)
    with pytest.raises(ValueError, match="topk_idx has 5 tokens; there is room for 4"):
        static.announce(inputs.rows[1], inputs.ids[1], rank.block, signature=1)
    for wrong, place in ((y[1:], 64), (y, 8)):
        with pytest.raises(ValueError, match=rf"y is .* wanted {form.num_rows} rows, a multiple of 16"):
            static.send_rows(wrong, rank.block.answered, place=place, signature=1)
    values = torch.zeros(form.num_rows + 1)
    for wrong, at in ((values, 64), (values[1:], 8), (torch.zeros(form.num_rows, 2)[:, 0], 64)):
        beside = {"values": wrong, "values_at": at}
        with pytest.raises(ValueError, match=rf"values is .* wanted {form.num_rows} rows, a multiple of 16"):
            static.send_rows(y, rank.block.answered, place=64, signature=1, **beside)

"""Captured low-latency calls between real processes: what the reference says, through all windows, and replayed."""

import pytest
import torch
from captured_ranks import CapturedRank, Case
from captured_replay import recorded, replay
from eager_cases import inputs_of

from moecomm.testing import launch, masked, with_duplicates
from moecomm.transports.peers import gather_peers
from moecomm.transports.shm import ShmTransport


def start(group, case):
    """The rank of this process, and what ends it."""
    transport = ShmTransport(group, gather_peers(group), 1)
    places = [transport.addresses(transport.allocate(nbytes)) for nbytes in case.memory()[:3]]
    rank = CapturedRank(case, group.rank, *places)
    rank.poison_all()
    group.all_gather(None)

    def end():
        rank.check_guards()
        group.all_gather(None)
        transport.close()

    return rank, end


def call_after_call(group, case, num_calls):
    rank, end = start(group, case)
    for call in range(num_calls):
        routing = with_duplicates if call % 3 == 2 and case.layout == "expert_major" else masked
        rank.pair(call, case.inputs(call, routing=routing))
    end()


@pytest.mark.parametrize(
    "case",
    [
        Case(1, "slab"),
        Case(1, "expert_major", hidden=1, dtype=torch.float64, values=torch.float64, topk=3, num_experts=3),
        Case(2, "slab", topk=3, hidden=33, weighted=False),
        Case(2, "expert_major", dtype=torch.float32, hidden=16, in_place=True),
        Case(3, "slab", values=None, num_experts=2, in_place=True),
        Case(3, "expert_major", hidden=5, dtype=torch.float16, alignment=4),
    ],
    ids=str,
)
def test_dozens_of_calls_give_what_the_reference_says(case):
    launch(call_after_call, case.num_ranks, case, 12, backend="processes", timeout=60)


def test_four_ranks_and_more_ids_than_one_block_holds():
    case = Case(4, "expert_major", most=40, topk=5, num_experts=9, hidden=3)
    launch(call_after_call, 4, case, 2, backend="processes", timeout=60)


def overlap(group, case, num_calls):
    """`depth` calls in flight, each with a block of its own."""
    rank, end = start(group, case)
    others = [rank.exchange.block(case.form, rank.rows.address, rank.values.address) for _ in range(case.depth - 1)]
    blocks = [rank.block, *others]
    for block in others:  # they fill one place in turns, so they share what is known of it
        block.placed.arrived.used.set_(rank.block.placed.arrived.used)
    for call in range(num_calls + case.depth):
        rank.block = blocks[call % case.depth]
        if call >= case.depth:
            rank.receive()
            rank.exchange.check()
            rank.compare(case.inputs(call - case.depth), call - case.depth)
        if call < num_calls:
            rank.send(case.inputs(call))
    end()


def test_two_calls_in_flight_through_four_windows():
    launch(overlap, 2, Case(2, "slab", depth=2), 10, backend="processes", timeout=60)


def replayed(group, case, num_replays):
    """A dispatch and its combine are recorded once, with the number of tokens of each rank, and replayed."""
    rank, end = start(group, case)
    tokens = [3, 0, case.most][: group.size]
    mine = tokens[group.rank]
    ids = torch.full((mine, case.topk), -1)
    x, out = (torch.zeros(mine, case.hidden, dtype=case.dtype) for _ in range(2))
    weights, at_home = torch.zeros(mine, case.topk), torch.zeros(mine, case.topk)
    y = rank.answer(0).clone()
    with recorded() as launches:
        rank.exchange.dispatch(x, ids, rank.block, topk_weights=weights)
        rank.exchange.combine(y, rank.block.placed, out, topk_weights=at_home)
    for call in range(num_replays):
        inputs = inputs_of(
            case.world, tokens, case.topk, hidden=case.hidden, dtype=case.dtype, values=case.values, seed=call
        )
        given = case.inputs(call, tokens)
        inputs.weights = given.weights
        x.copy_(inputs.rows[group.rank])
        ids.copy_(inputs.ids[group.rank])
        weights.copy_(inputs.weights[group.rank])
        at_home.copy_(rank.weights_at_home(call, mine))
        y.copy_(case.answers(call)[group.rank])
        replay(launches)
        rank.exchange.check()
        rank.compare(inputs, call)
        rank.compare_sums(call, out, at_home)
    end()


@pytest.mark.parametrize("case", [Case(2, "slab"), Case(3, "expert_major", hidden=16)], ids=str)
def test_launches_of_one_call_can_be_replayed_with_new_contents(case):
    launch(replayed, case.num_ranks, case, 9, backend="processes", timeout=60)

"""Throughput dispatch into blocks of fixed size: the rows of the reference, replayed, under chaos, and what goes wrong."""

import pytest
import torch
from captured_ranks import GUARD, Case, StaticRank, recorded, replay, static_memory
from interpreter_chaos import Chaos
from test_captured_failures import Ranks

from moecomm.testing import launch, masked, with_duplicates
from moecomm.transports.peers import gather_peers
from moecomm.transports.shm import ShmTransport

SOON_NS = 20_000_000


class StaticRanks(Ranks):
    """All ranks of a case in this process."""

    def __init__(self, case, **options):
        self.case = case
        self.memory = [torch.zeros(case.num_ranks, size // 8 + 8, dtype=torch.int64) for size in static_memory(case)]
        places = [[-(-row.data_ptr() // GUARD) * GUARD for row in one] for one in self.memory]
        self.ranks = [StaticRank(case, rank, *places, **options) for rank in range(case.num_ranks)]

    def dispatch(self, call, inputs=None):
        inputs = self.case.inputs(call) if inputs is None else inputs
        for rank in self:
            rank.announce(inputs)
        for rank in self:
            rank.static.push(rank.batch)
        for rank in self:
            rank.static.arrive(rank.block)
            rank.exchange.check()
            rank.compare(inputs, call)

    def state_of(self, rank):
        placed = rank.block.placed
        kept = (*placed.arrived[1:], placed.routes, rank.everything, rank.exchange.pushes.begun)
        return [one.clone() for one in kept]


@pytest.mark.parametrize(
    "case",
    [
        Case(1, "expert_major", num_experts=3),
        Case(2, "expert_major", hidden=33, values=torch.float64, dtype=torch.float64, topk=3),
        Case(3, "expert_major", num_experts=2, values=None, alignment=4),
        Case(4, "expert_major", num_experts=70, topk=5, most=30, hidden=2, alignment=1),
    ],
    ids=str,
)
def test_blocks_are_the_references(case):
    ranks = StaticRanks(case)
    for call in range(7 if case.most < 10 else 2):
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


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_processes_dispatch_and_combine(num_ranks):
    case = Case(num_ranks, "expert_major", hidden=9, dtype=torch.float16)
    launch(call_after_call, num_ranks, case, 8, backend="processes", timeout=60)


def replayed(group, case, num_replays):
    rank, end = start(group, case)
    tokens = [3, 0, case.most][: group.size]
    mine = tokens[group.rank]
    x, ids, weights = torch.zeros(mine, case.hidden, dtype=case.dtype), torch.full((mine, case.topk), -1), None
    weights = torch.zeros(mine, case.topk)
    with recorded() as launches:
        rank.static.dispatch(x, ids, rank.block, topk_weights=weights)
    for call in range(num_replays):
        inputs = case.inputs(call, tokens)
        for kept, given in ((x, inputs.rows), (ids, inputs.ids), (weights, inputs.weights)):
            kept.copy_(given[group.rank])
        replay(launches)
        rank.exchange.check()
        rank.compare(inputs, call)
        group.all_gather(None)  # the next round may write to this block as soon as it is announced
    end()


def test_launches_can_be_replayed_with_new_contents():
    launch(replayed, 3, Case(3, "expert_major", hidden=16), 6, backend="processes", timeout=60)


# -- under chaos -------------------------------------------------------------------------------------------------------


def exchange(case, seed, num_calls):
    memory = [torch.zeros(case.num_ranks, size // 8 + 8, dtype=torch.int64) for size in static_memory(case)]
    places = [[-(-row.data_ptr() // GUARD) * GUARD for row in one] for one in memory]
    chaos = Chaos(seed, shared=memory, max_steps=600_000)
    ranks = [StaticRank(case, rank, *places, read=chaos.read) for rank in range(case.num_ranks)]

    def body(rank):
        def calls():
            for call in range(num_calls):
                rank.dispatch(call, case.inputs(call))

        return calls

    chaos.run(*[body(rank) for rank in ranks])


CHAOS = Case(2, "expert_major", num_experts=3, hidden=4)


@pytest.mark.parametrize("seed", range(3))
def test_right_kernels_bear_it(seed):
    exchange(CHAOS, seed, 3)

"""All ranks of captured calls in one process, step by step: what is sent is there before anybody waits for it."""

import torch
from captured_ranks import GUARD, CapturedRank
from kernel_cases import assert_same_bits
from static_ranks import StaticRank, static_memory


def places_in(num_ranks, sizes):
    """Zeroed memory of each size and rank, and where it begins, at multiples of 64."""
    memory = [torch.zeros(num_ranks, size // 8 + 8, dtype=torch.int64) for size in sizes]
    return memory, [[-(-row.data_ptr() // GUARD) * GUARD for row in one] for one in memory]


class Ranks:
    """All ranks of a case, and their memory."""

    def __init__(self, case, **options):
        self.case = case
        self.memory, places = places_in(case.num_ranks, case.memory()[:3])
        self.ranks = [CapturedRank(case, rank, *places, **options) for rank in range(case.num_ranks)]

    def __iter__(self):
        return iter(self.ranks)

    def dispatch(self, call, inputs=None):
        inputs = self.case.inputs(call) if inputs is None else inputs
        for rank in self:
            rank.send(inputs)
        for rank in self:
            rank.receive()
            rank.exchange.check()
            rank.compare(inputs, call)

    def state_of(self, rank):
        """All that a call may write, copied."""
        control, block = rank.exchange.control, rank.block
        kept = (*block.placed.arrived[1:], block.routes, rank.everything, self.memory[0], rank.exchange._dispatch.begun)
        return [one.clone() for one in (*kept, rank.exchange._combine.begun, control.boards)]


class StaticRanks:
    """All ranks of a case with dispatches of throughput mode."""

    def __init__(self, case, **options):
        self.case = case
        self.memory, places = places_in(case.num_ranks, static_memory(case))
        self.ranks = [StaticRank(case, rank, *places, **options) for rank in range(case.num_ranks)]

    def __iter__(self):
        return iter(self.ranks)

    def dispatch(self, call, inputs=None):
        inputs = self.case.inputs(call) if inputs is None else inputs
        for rank in self:
            rank.send(inputs)
        for rank in self:
            rank.static.push(rank.block)
        for rank in self:
            rank.static.arrive(rank.block)
            rank.exchange.check()
            rank.compare(inputs, call)

    def state_of(self, rank):
        placed = rank.block.placed
        kept = (*placed.arrived[1:], placed.routes, rank.everything, rank.exchange.pushes.begun)
        return [one.clone() for one in kept]


def assert_unchanged(before, after):
    for one, other in zip(before, after, strict=True):
        assert_same_bits(one, other)

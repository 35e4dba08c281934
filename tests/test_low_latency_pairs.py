"""Many pairs of dispatch and combine of random shapes and routings over processes, each equal to the oracle bit by bit.

A run takes 3000 pairs, `MOECOMM_PAIRS=100000 pytest tests/test_low_latency_pairs.py` as many as that says. All ranks
draw the same numbers, so each knows what the others send. The oracle is vectorised, for a pair must not cost much more
than what it tests; `test_the_oracle_of_this_file_is_the_oracle` holds it to the one in the package.
"""

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from exchange_ranks import caught
from low_latency_ranks import open_communicator

from moecomm.testing import launch, reference_combine, reference_dispatch

NUM_PAIRS = int(os.environ.get("MOECOMM_PAIRS", "3000"))
NUM_RANKS = 3
PAIRS_PER_COMMUNICATOR = 250
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
POOL = 64  # rows of a rank to choose from, beyond the most that it sends


@dataclass
class Shapes:
    """What is the same for all pairs of one communicator, and the numbers that they are made of."""

    num_experts: int
    hidden: int
    num_topk: int
    most: int
    depth: int
    dtype: torch.dtype
    rows: torch.Tensor  # [R, most + POOL, H]: no two calls in a row send the same
    weights: torch.Tensor  # [R, most + POOL, K]

    @classmethod
    def draw(cls, rng):
        sizes = [int(rng.integers(1, most + 1)) for most in (12, 40, 6, 16, 3)]
        dtype = DTYPES[rng.integers(len(DTYPES))]
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        num_rows = sizes[3] + POOL
        rows = torch.randn(NUM_RANKS, num_rows, sizes[1], generator=generator, dtype=torch.float64).to(dtype)
        kept = torch.float64 if dtype is torch.float64 else torch.float32
        weights = torch.randn(NUM_RANKS, num_rows, sizes[2], generator=generator, dtype=torch.float64).to(kept)
        return cls(*sizes, dtype, rows, weights)

    def local_experts(self, rank):
        each, more = divmod(self.num_experts, NUM_RANKS)
        first = rank * each + min(rank, more)
        return first, first + each + (rank < more)


class Pair:
    """One dispatch and one combine, and what they must give."""

    def __init__(self, shapes, rng):
        self.shapes = shapes
        kinds = rng.random(6)
        self.tokens = rng.integers(0, shapes.most + 1, NUM_RANKS)
        if kinds[0] < 0.1:
            self.tokens[rng.integers(NUM_RANKS)] = 0
        self.ids = rng.integers(-1, shapes.num_experts, (int(self.tokens.sum()), shapes.num_topk))
        if kinds[1] < 0.15:
            self.ids[:] = rng.integers(-1, shapes.num_experts)  # all to one expert, or nowhere
        self.first = np.concatenate([[0], np.cumsum(self.tokens)])
        self.offset = int(rng.integers(POOL))
        self.layout = "slab" if kinds[2] < 0.6 else "expert_major"
        self.alignment = 1 if self.layout == "slab" else int(rng.integers(1, 9))
        self.travel = kinds[3] < 0.3  # weights travel with the rows, and are applied there
        self.in_place = kinds[4] < 0.5
        self.id_dtype = torch.int32 if kinds[5] < 0.5 else torch.int64
        self.counts = np.bincount(self.ids[self.ids >= 0], minlength=shapes.num_experts)

    def part(self, table, rank):
        """A rank's part of rows or weights."""
        return table[rank, self.offset : self.offset + self.tokens[rank]]

    def all_of(self, table):
        return torch.cat([self.part(table, rank) for rank in range(NUM_RANKS)])

    def ids_of(self, rank):
        return self.ids[self.first[rank] : self.first[rank + 1]]

    def fits(self, capacity):
        if self.layout == "slab":
            return self.counts.max() <= capacity
        padded = -(-self.counts // self.alignment) * self.alignment
        return all(padded[slice(*self.shapes.local_experts(rank))].sum() <= capacity for rank in range(NUM_RANKS))

    def received(self, rank, capacity):
        """Rows and weights as they must arrive, padding included."""
        shapes = self.shapes
        begin, end = shapes.local_experts(rank)
        token, choice = np.nonzero((self.ids >= begin) & (self.ids < end))
        expert = self.ids[token, choice] - begin
        order = np.argsort(expert, kind="stable")
        counts = self.counts[begin:end]
        pitch = (
            np.full(end - begin, capacity) if self.layout == "slab" else -(-counts // self.alignment) * self.alignment
        )
        starts = np.cumsum(pitch) - pitch
        before = np.cumsum(counts) - counts
        place = torch.from_numpy(np.arange(order.size) + (starts - before)[expert[order]])
        num_rows = capacity * (end - begin) if self.layout == "slab" else capacity
        rows = torch.zeros(num_rows, shapes.hidden, dtype=shapes.dtype)
        weights = torch.zeros(num_rows, dtype=shapes.weights.dtype)
        source = torch.from_numpy(token[order])
        rows[place] = self.all_of(shapes.rows)[source]
        weights[place] = self.all_of(shapes.weights)[source, torch.from_numpy(choice[order])]
        return rows, weights

    def home(self, rank):
        """The sums of `outputs` that must come home."""
        shapes = self.shapes
        ids, rows = torch.from_numpy(self.ids_of(rank)), self.part(shapes.rows, rank)
        weights = self.part(shapes.weights, rank)
        total = torch.zeros(rows.shape, dtype=weights.dtype)
        for k in range(shapes.num_topk):
            y = rows * scale_of(ids[:, k], rows.dtype)[:, None]
            if self.travel:
                y = (y.to(weights.dtype) * weights[:, k, None]).to(rows.dtype)
                term = y.to(weights.dtype)
            else:
                term = weights[:, k, None] * y.to(weights.dtype)
            total = torch.where(ids[:, k, None] >= 0, total + term, total)
        return total.to(rows.dtype)

    def outputs(self, received, comm):
        """The experts' outputs: each multiplies by a number of its own."""
        begin, end = self.shapes.local_experts(comm.rank)
        scale = scale_of(torch.arange(begin, end), received.x.dtype)
        if self.layout == "slab":
            y = received.x * scale[:, None, None]
        else:
            ends = torch.cat([torch.zeros(1, dtype=torch.int32), received.offsets])
            y = received.x * 0
            y[: int(ends[-1])] = received.x[: int(ends[-1])] * scale.repeat_interleave(ends.diff())[:, None]
        if self.travel:
            y = (y.to(received.topk_weights.dtype) * received.topk_weights[..., None]).to(y.dtype)
        if not self.in_place:
            return y
        buffer = comm.combine_buffer(received.handle, y.dtype)
        buffer.copy_(y)
        return buffer

    def begin(self, comm):
        shapes, rank = self.shapes, comm.rank
        weights = self.part(shapes.weights, rank) if self.travel else None
        return comm.dispatch_async(
            self.part(shapes.rows, rank),
            torch.from_numpy(self.ids_of(rank)).to(self.id_dtype),
            weights,
            mode="low_latency",
            layout=self.layout,
            expert_alignment=self.alignment,
        )

    def finish(self, comm, work):
        rank, capacity = comm.rank, comm._exchanger.capacity("low_latency", self.layout, self.alignment)
        if not self.fits(capacity):
            kind, text, _ = caught(work.wait)
            assert (kind, "there is room for" in text) == ("CapacityExceeded", True), text
            return
        received = work.wait()
        rows, weights = self.received(rank, capacity)
        begin, end = self.shapes.local_experts(rank)
        assert same_bits(received.x.reshape(rows.shape), rows)
        assert received.num_tokens_per_expert.tolist() == self.counts[begin:end].tolist()
        assert not self.travel or same_bits(received.topk_weights.reshape(-1), weights)
        own = None if self.travel else self.part(self.shapes.weights, rank)
        out = comm.combine(self.outputs(received, comm), received.handle, own)
        assert same_bits(out, self.home(rank))


def scale_of(experts, dtype):
    """A power of two, so that the product is exact; of either sign."""
    return torch.tensor([1, -2, 0.5, 4], dtype=dtype)[experts % 4]


def same_bits(one, other):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def many_pairs(group, num_pairs, seed):
    done = 0
    while done < num_pairs:
        rng = np.random.default_rng([seed, done])
        shapes = Shapes.draw(rng)
        with open_communicator(
            group,
            experts=shapes.num_experts,
            hidden=shapes.hidden,
            topk=shapes.num_topk,
            most=shapes.most,
            max_in_flight=shapes.depth,
            seconds=60,
        ) as comm:
            for _ in range(PAIRS_PER_COMMUNICATOR // shapes.depth):
                pairs = [Pair(shapes, rng) for _ in range(shapes.depth)]
                try:
                    works = [pair.begin(comm) for pair in pairs]
                    for pair, work in zip(pairs, works, strict=True):
                        pair.finish(comm, work)
                except AssertionError as error:
                    raise AssertionError(f"seed {[seed, done]}, rank {comm.rank}, {shapes}, {pair.__dict__}") from error
                done += len(pairs)
    return done


def test_every_pair_is_that_of_the_oracle():
    counts = launch(many_pairs, NUM_RANKS, NUM_PAIRS, 1, backend="processes", timeout=60 + NUM_PAIRS / 20)
    assert min(counts) == max(counts) >= NUM_PAIRS


@pytest.mark.parametrize("seed", range(20))
def test_the_oracle_of_this_file_is_the_oracle(seed):
    rng = np.random.default_rng([2, seed])
    shapes = Shapes.draw(rng)
    for _ in range(4):
        pair, ranks = Pair(shapes, rng), range(NUM_RANKS)
        ids = [torch.from_numpy(pair.ids_of(rank)) for rank in ranks]
        xs, weights = ([pair.part(table, rank) for rank in ranks] for table in (shapes.rows, shapes.weights))
        capacity = int(pair.counts.max()) if pair.layout == "slab" else None
        wanted = [
            reference_dispatch(
                xs,
                ids,
                weights,
                num_experts=shapes.num_experts,
                rank=rank,
                layout=pair.layout,
                expert_alignment=pair.alignment,
                capacity=capacity or 0,
            )
            for rank in ranks
        ]
        for rank, one in enumerate(wanted):
            rows, kept = pair.received(rank, capacity if pair.layout == "slab" else one.x.shape[0])
            assert same_bits(rows, one.x.reshape(rows.shape))
            assert same_bits(kept, one.topk_weights.reshape(-1))
        pair.travel = False
        ys = []
        for rank, one in enumerate(wanted):
            begin, end = shapes.local_experts(rank)
            pitch = one.num_tokens_per_expert if pair.layout != "slab" else torch.full((end - begin,), capacity)
            pitch = -(-pitch // pair.alignment) * pair.alignment
            scale = scale_of(torch.arange(begin, end), shapes.dtype).repeat_interleave(pitch)
            ys.append(one.x * scale.reshape(*one.x.shape[:-1], 1))
        for rank in ranks:
            home = reference_combine(
                ys,
                ids,
                num_experts=shapes.num_experts,
                rank=rank,
                topk_weights=weights[rank],
                layout=pair.layout,
                expert_alignment=pair.alignment,
                capacity=capacity or 0,
            )
            assert same_bits(pair.home(rank) + 0.0, home + 0.0)

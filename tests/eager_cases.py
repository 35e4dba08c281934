"""What the tests of low-latency kernels share: placements, poisoned memory, messages, a receiver that is used again."""

from dataclasses import dataclass, field

import torch
from kernel_cases import assert_same_bits

from moecomm.kernels.eager import Form, Home, message_bytes
from moecomm.kernels.registry import eager_kernels_for
from moecomm.testing import masked
from moecomm.testing.contracts.cases import random_rows

CPU = eager_kernels_for("cpu")
REFERENCE = eager_kernels_for("reference")
POISON = 0xA5
GUARD = 64  # poisoned bytes behind everything


@dataclass
class World:
    """The placement of experts, and what each rank keeps between calls. `experts` names the rank of each expert."""

    experts: list[int]
    num_ranks: int
    expert_rank: torch.Tensor = field(init=False)
    expert_local: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.expert_rank = torch.tensor(self.experts, dtype=torch.int32)
        local = [self.experts[:e].count(rank) for e, rank in enumerate(self.experts)]
        self.expert_local = torch.tensor(local, dtype=torch.int32)

    def num_local(self, rank):
        return self.experts.count(rank)


def blocks_of(num_experts, num_ranks):
    each, more = divmod(num_experts, num_ranks)
    return [rank for rank in range(num_ranks) for _ in range(each + (rank < more))]


@dataclass
class Memory:
    """Bytes at any address, and poison around them that must not be touched."""

    num_bytes: int
    fill: int = POISON
    shift: int = 0

    def __post_init__(self):
        self.whole = torch.full((self.num_bytes + 2 * GUARD,), POISON, dtype=torch.uint8)
        self.part = self.whole[self.shift : self.shift + self.num_bytes]
        self.part.fill_(self.fill)

    @property
    def address(self):
        return self.whole.data_ptr() + self.shift


@dataclass
class Inputs:
    rows: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor] | None

    @property
    def row_bytes(self):
        return self.rows[0].shape[1] * self.rows[0].element_size()

    @property
    def value_bytes(self):
        return 0 if self.weights is None else self.weights[0].element_size()


def inputs_of(world, tokens, num_topk, *, hidden, dtype=torch.bfloat16, values=None, routing=masked, seed=0):
    num_experts = len(world.experts)
    ids = [routing(n, num_experts, num_topk, seed=100 * seed + rank) for rank, n in enumerate(tokens)]
    rows = [random_rows((n, hidden), dtype, f"{seed} {rank}") for rank, n in enumerate(tokens)]
    weights = None
    if values is not None:
        weights = [torch.randn(i.shape, dtype=values).masked_fill(i < 0, float("nan")) for i in ids]
    return Inputs(rows, ids, weights)


def send(kernels, world, inputs):
    """Everybody's messages, `[destination][source]`."""
    windows = [
        [Memory(message_bytes(ids.shape[0], ids.shape[1], inputs.row_bytes, inputs.value_bytes)) for ids in inputs.ids]
        for _ in range(world.num_ranks)
    ]
    sent = []
    for rank, (rows, ids) in enumerate(zip(inputs.rows, inputs.ids, strict=True)):
        weights = None if inputs.weights is None else inputs.weights[rank]
        mine = [windows[peer][rank].address for peer in range(world.num_ranks)]
        sent.append(kernels.send_eager(rows, ids, weights, world.expert_rank, mine))
    return windows, sent


@dataclass
class Receiver:
    """The block of one rank and form, used again and again by one implementation."""

    kernels: object
    world: World
    rank: int
    row_bytes: int
    value_bytes: int
    capacity: int
    alignment: int
    num_rows: int
    shift: int = 0
    domain_of: tuple | None = None

    def __post_init__(self):
        num_local = self.world.num_local(self.rank)
        num_rows = num_local * self.capacity if self.capacity else self.num_rows
        self.rows = Memory(num_rows * self.row_bytes, fill=0, shift=self.shift)
        self.values = Memory(num_rows * self.value_bytes, fill=0, shift=self.shift)
        self.used = torch.zeros(max(1, num_local), dtype=torch.int64)
        self.tokens_per_expert = torch.zeros(num_local, dtype=torch.int64)

    def receive(self, windows, inputs):
        world = self.world
        home = Home(self.rank, world.expert_rank, world.expert_local, self.tokens_per_expert, *self.domain())
        num_topk = inputs.ids[0].shape[1]
        form = Form(num_topk, inputs.row_bytes, inputs.value_bytes, self.capacity, self.alignment, self.num_rows)
        return self.kernels.receive_eager(
            home,
            form,
            [window.address for window in windows[self.rank]],
            [ids.shape[0] for ids in inputs.ids],
            self.rows.address,
            self.values.address if self.value_bytes else 0,
            self.used,
        )

    def domain(self):
        """Experts of my domain, and sources whose message is one for all of it: those of other domains."""
        if self.domain_of is None:
            return None, None
        domains = torch.tensor(self.domain_of)
        return domains[self.world.expert_rank.long()] == domains[self.rank], domains != domains[self.rank]

    @property
    def everything(self):
        return torch.cat([self.rows.whole, self.values.whole])


def pair_of(world, rank, inputs, *, kernels=CPU, **form):
    return [Receiver(k, world, rank, inputs.row_bytes, inputs.value_bytes, **form) for k in (kernels, REFERENCE)]


def compare(got, want, got_result, want_result):
    for one, other in zip(got_result, want_result, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_same_bits(one, other)
    assert_same_bits(got.everything, want.everything)
    assert_same_bits(got.used, want.used)
    assert_same_bits(got.tokens_per_expert, want.tokens_per_expert)


def slab(world, tokens):
    return {"capacity": max(1, sum(tokens)), "alignment": 1, "num_rows": max(1, sum(tokens))}


def grouped(world, tokens, num_topk, alignment):
    rows = sum(tokens) * num_topk + len(world.experts) * alignment
    return {"capacity": 0, "alignment": alignment, "num_rows": rows}


def check_message_for_a_domain(kernels, domain_of):
    """One message that all ranks of a domain read gives each what a message of its own gives; three ranks."""
    world, tokens = World([1, 0, 1, 2, 0, 1, 2, 2], 3), (5, 0, 9)
    inputs = inputs_of(world, tokens, 3, hidden=5, values=torch.float32)
    apart, _ = send(kernels, world, inputs)
    # Rank d's part of these messages is what goes to domain d.
    expert_domain = [domain_of[rank] for rank in world.experts]
    together, _ = send(kernels, World(expert_domain, 2), inputs)
    for rank in range(3):
        windows = [
            apart[rank][source] if domain_of[source] == domain_of[rank] else together[domain_of[rank]][source]
            for source in range(3)
        ]
        for form in (slab(world, tokens), grouped(world, tokens, 3, 4)):
            shape = {"row_bytes": inputs.row_bytes, "value_bytes": 4, **form}
            want = Receiver(kernels, world, rank, **shape)
            got = Receiver(kernels, world, rank, **shape, domain_of=domain_of)
            compare(got, want, got.receive({rank: windows}, inputs), want.receive(apart, inputs))

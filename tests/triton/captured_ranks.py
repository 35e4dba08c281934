"""One rank of captured calls beside the reference: what it sends, what it must find, and poison all around.

Every rank can make everybody's inputs, so each knows what all others send and answer.
"""

from dataclasses import dataclass

import torch
import triton
from eager_cases import POISON, REFERENCE, Memory, Receiver, World, blocks_of, grouped, inputs_of, send, slab
from kernel_cases import assert_same_bits, bytes_at
from window_ranks import fill

from moecomm.kernels import kernels_for
from moecomm.kernels.base import weights_dtype
from moecomm.kernels.eager import Form, Sorted
from moecomm.kernels.triton.captured import CapturedExchange, captured_memory
from moecomm.testing import masked
from moecomm.testing.contracts.cases import random_rows

GUARD = 64
TIMEOUT_NS = 10_000_000_000
POISON_WORD = int.from_bytes(bytes([POISON] * 4), "little", signed=True)


@dataclass(frozen=True)
class Case:
    """What all ranks do alike.

    Attributes:
        layout: "slab", "expert_major" or (static calls) "flat".
        values: dtype of weights that travel, or None.
        weighted: combine applies weights at home.
        in_place: rows of a combine lie where peers read them.
        most: T is at most that.
        shift: of blocks from multiples of 64; so many bytes before them are guarded, as those behind are.
    """

    num_ranks: int
    layout: str
    num_experts: int = 5
    topk: int = 2
    hidden: int = 7
    dtype: torch.dtype = torch.bfloat16
    values: torch.dtype | None = torch.float32
    weighted: bool = True
    in_place: bool = False
    most: int = 4
    depth: int = 1
    alignment: int = 3
    too_few_windows: int = 0
    shift: int = GUARD

    @property
    def world(self):
        return World(blocks_of(self.num_experts, self.num_ranks), self.num_ranks)

    @property
    def block(self):
        most = [self.most] * self.num_ranks
        if self.layout == "flat":
            return {"capacity": 0, "alignment": 1, "num_rows": sum(most)}
        return slab(self.world, most) if self.layout == "slab" else grouped(self.world, most, self.topk, self.alignment)

    @property
    def row_bytes(self):
        return self.hidden * self.dtype.itemsize

    @property
    def form(self):
        value_bytes = 0 if self.values is None else self.values.itemsize
        return Form(self.topk, self.row_bytes, value_bytes, *self.block.values())

    @property
    def num_rows(self):
        most = max(self.world.num_local(rank) for rank in range(self.num_ranks))
        return max(1, most * self.form.capacity) if self.form.capacity else self.form.num_rows

    def receiver(self, rank):
        """What the reference makes of everybody's inputs."""
        if self.layout == "flat":
            return FlatReceiver(self, rank)
        sizes = self.row_bytes, self.form.value_bytes
        return Receiver(REFERENCE, self.world, rank, *sizes, **self.block, shift=self.shift)

    def memory(self):
        """Bytes of boards, windows and outputs; between messages and outputs there are guards."""
        needed = captured_memory(
            num_ranks=self.num_ranks,
            max_in_flight=self.depth,
            max_tokens_per_rank=self.most,
            num_topk=self.topk,
            row_bytes=self.row_bytes,
            value_bytes=self.form.value_bytes,
            num_rows=self.num_rows,
        )
        windows = needed.windows + 2 * self.depth * self.num_ranks * GUARD
        return needed.board, windows, needed.outputs + 2 * self.depth * GUARD, needed

    def tokens(self, call):
        """T of each rank: none, one, all and between."""
        return [(0, 1, self.most, 3, self.most, 2, 0)[(call + 2 * rank) % 7] for rank in range(self.num_ranks)]

    def inputs(self, call, tokens=None, routing=masked):
        with torch.random.fork_rng():
            torch.manual_seed(call)
            tokens = self.tokens(call) if tokens is None else tokens
            options = {"hidden": self.hidden, "dtype": self.dtype, "values": self.values, "seed": call}
            return inputs_of(self.world, tokens, self.topk, routing=routing, **options)

    def answers(self, call):
        """The rows that each rank's experts answer."""
        slab = self.form.capacity
        rows = [self.world.num_local(r) * slab if slab else self.form.num_rows for r in range(self.num_ranks)]
        return [random_rows((n, self.hidden), self.dtype, f"y {call} {rank}") for rank, n in enumerate(rows)]


class FlatReceiver:
    """The flat block of one rank, which the reference fills from everybody's inputs; as `Receiver`."""

    def __init__(self, case, rank):
        num_rows, num_local = case.form.num_rows, case.world.num_local(rank)
        self.case, self.rank = case, rank
        self.rows, self.values, self.ids = (
            Memory(num_rows * nbytes, shift=case.shift)
            for nbytes in (case.row_bytes, case.topk * case.form.value_bytes, case.topk * 4)
        )
        self.used = torch.zeros(1, dtype=torch.int64)
        self.tokens_per_expert = torch.zeros(num_local, dtype=torch.int64)

    def receive(self, messages, inputs):
        world, kernels, num_ranks = self.case.world, kernels_for("reference"), self.case.num_ranks
        num_experts = len(world.experts)
        counts = torch.zeros(num_ranks, num_experts + num_ranks, dtype=torch.int32)
        for memory, blank in ((self.rows, 0), (self.values, 0), (self.ids, 0xFF)):
            memory.part.fill_(blank)
        following = torch.zeros(num_ranks, dtype=torch.int64)
        nowhere = [Memory(memory.num_bytes) for memory in (self.rows, self.values, self.ids)]
        for source, (x, ids) in enumerate(zip(inputs.rows, inputs.ids, strict=True)):
            kernels.count_routes(ids, world.expert_rank, num_ranks, counts[source])
            routes = kernels.plan_flat(ids, world.expert_rank, following)
            following += counts[source, num_experts:]
            rows, values, local_ids = (
                [mine.address if rank == self.rank else other.address for rank in range(num_ranks)]
                for mine, other in zip((self.rows, self.values, self.ids), nowhere, strict=True)
            )
            kernels.push_rows(x, routes, rows)
            weights = None if inputs.weights is None else inputs.weights[source]
            tables = world.expert_rank, world.expert_local, local_ids
            kernels.push_flat_metadata(ids, weights, routes, *tables, None if weights is None else values)
            if source == self.rank:
                mine = routes
        self.used[0] = following[self.rank]
        arrived = counts.sum(0, dtype=torch.int32)[:num_experts][world.expert_rank == self.rank]
        self.tokens_per_expert += arrived
        return Sorted(counts, mine, arrived, None)

    @property
    def everything(self):
        return torch.cat([self.rows.whole, self.values.whole, self.ids.whole])


class CapturedRank:
    """One rank.

    Arguments:
        boards, windows, outputs: by rank, addresses of memory as `Case.memory` says.
        far: as `CapturedExchange` takes it.
    """

    def __init__(self, case, rank, boards, windows, outputs, *, timeout_ns=TIMEOUT_NS, far=None):
        needed = case.memory()[3]
        self.case, self.rank, self.windows, self.outputs = case, rank, windows, outputs
        self.message_bytes, self.output_bytes = needed.message + GUARD, needed.output + GUARD
        self.exchange = CapturedExchange(
            rank,
            boards=boards,
            windows=windows,
            outputs=outputs,
            message_bytes=self.message_bytes,
            output_bytes=self.output_bytes,
            expert_rank=case.world.expert_rank,
            expert_local=case.world.expert_local,
            max_tokens_per_rank=case.most,
            max_in_flight=case.depth,
            timeout_ns=timeout_ns,
            far=far,
        )
        if case.too_few_windows:
            control = self.exchange.control
            self.exchange.control = control._replace(num_windows=2 * case.depth - case.too_few_windows)
        self.wanted = case.receiver(rank)
        self.rows = Memory(self.wanted.rows.num_bytes, fill=0, shift=case.shift)
        self.values = Memory(self.wanted.values.num_bytes, fill=0, shift=case.shift)
        values = self.values.address if case.form.value_bytes else 0
        self.block = self.exchange.block(case.form, self.rows.address, values)
        self.found = None

    # -- calls ---------------------------------------------------------------------------------------------------------

    def send(self, inputs):
        weights = None if inputs.weights is None else inputs.weights[self.rank]
        self.exchange.send(inputs.rows[self.rank], inputs.ids[self.rank], self.block, topk_weights=weights)

    def receive(self):
        self.exchange.receive(self.block)

    def combine(self, y, out, weights):
        outputs = self.exchange.outputs_at(self.outputs) if self.case.in_place else None
        self.exchange.combine(y, self.block.placed, out, topk_weights=weights, outputs=outputs)

    def answer(self, call):
        """Rows of mine, where they must lie."""
        y = self.case.answers(call)[self.rank]
        if not self.case.in_place:
            return y
        place = bytes_at(self.outputs[self.rank], max(1, y.nbytes))[: y.nbytes].view(y.dtype).view(y.shape)
        return place.copy_(y)

    def weights_at_home(self, call, num_tokens):
        if not self.case.weighted or self.case.layout == "flat":  # whose rows are sums
            return None
        make = torch.Generator().manual_seed(call * 10 + self.rank)
        return torch.randn(num_tokens, self.case.topk, generator=make, dtype=weights_dtype(self.case.dtype))

    def dispatch(self, call, inputs):
        """A dispatch, compared."""
        self.send(inputs)
        self.receive()
        self.exchange.check()
        self.compare(inputs, call)

    def pair(self, call, inputs=None):
        """A dispatch and its combine, both compared."""
        inputs = self.case.inputs(call) if inputs is None else inputs
        self.dispatch(call, inputs)
        num_tokens = inputs.ids[self.rank].shape[0]
        around = torch.full((num_tokens + 2, self.case.hidden), 7, dtype=self.case.dtype)
        out, weights = around[1:-1], self.weights_at_home(call, num_tokens)
        self.combine(self.answer(call), out, weights)
        self.exchange.check()
        self.compare_sums(call, out, weights)
        assert bool((around[[0, -1]] == 7).all()), "a sum lies outside"

    # -- what must be --------------------------------------------------------------------------------------------------

    def compare(self, inputs, call=None):
        """What has arrived with what the reference makes of the same inputs."""
        expected = self.wanted.receive(send(REFERENCE, self.case.world, inputs)[0], inputs)
        arrived, num_tokens = self.block.placed.arrived, inputs.ids[self.rank].shape[0]
        assert_same_bits(arrived.counts, expected.counts)
        assert_same_bits(arrived.num_tokens_per_expert, expected.num_tokens_per_expert)
        if expected.offsets is not None:
            assert_same_bits(arrived.offsets, expected.offsets)
        assert_same_bits(self.block.placed.routes[:num_tokens], expected.routes)
        assert_same_bits(self.everything, self.wanted.everything)
        assert_same_bits(arrived.used, self.wanted.used)
        assert_same_bits(self.exchange.tokens_per_expert, self.wanted.tokens_per_expert)
        self.routes = expected.routes
        if call is not None:
            self.poison(call)

    @property
    def everything(self):
        return torch.cat([self.rows.whole, self.values.whole])

    def compare_sums(self, call, out, weights):
        answers = self.case.answers(call)
        want = torch.empty_like(out)
        addresses = [answer.data_ptr() for answer in answers]
        kernels_for("reference").combine_rows(want, self.routes, addresses, weights=weights)
        assert_same_bits(out, want)

    def window(self, call):
        num_windows = self.exchange.control.num_windows
        return self.windows[self.rank] + call % num_windows * self.case.num_ranks * self.message_bytes

    def poison(self, call):
        """Overwrites the messages of a call that was received, by a kernel, so that it is in the stream's order."""
        num_words = self.case.num_ranks * self.message_bytes // 4
        fill[(1,)](self.window(call), num_words, POISON_WORD, BLOCK=triton.next_power_of_2(num_words))

    def poison_all(self):
        for window in range(2 * self.case.depth):
            self.poison(window)

    def check_guards(self):
        """Nothing has been written between messages and behind rows."""
        needed, depth = self.case.memory()[3], self.case.depth
        for number in range(2 * depth * self.case.num_ranks):
            start = self.windows[self.rank] + number * self.message_bytes + needed.message
            assert bool((bytes_at(start, GUARD) == POISON).all()), f"behind message {number}"
        for number in range(2 * depth):
            start = self.outputs[self.rank] + number * self.output_bytes + needed.output
            assert bool((bytes_at(start, GUARD) == 0).all()), f"behind outputs {number}"

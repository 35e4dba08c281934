"""One rank of throughput calls of fixed shape, beside the reference; as in captured_ranks.py."""

import itertools

import torch
import triton
from captured_ranks import GUARD, POISON_WORD, CapturedRank
from eager_cases import POISON
from kernel_cases import bytes_at
from window_ranks import fill

from moecomm.kernels.triton.captured_announce import card_bytes
from moecomm.kernels.triton.captured_static import StaticExchange, static_mailbox_bytes


class StaticRank(CapturedRank):
    """One rank.

    Arguments:
        mailboxes, blocks: by rank, addresses of memory as `static_memory` says.
        read: copies a tensor that peers write to.

    Attributes:
        signature: of its calls.
        planes: rows, weights and (flat) ids that must be found.
        places: their offsets in its region.
    """

    signature = 1234

    def __init__(self, case, rank, boards, windows, outputs, mailboxes, blocks, *, read=torch.clone, **options):
        super().__init__(case, rank, boards, windows, outputs, **options)
        self.mailboxes, self.read = mailboxes, read
        wanted, is_flat = self.wanted, case.layout == "flat"
        self.planes = [wanted.rows, wanted.values, *([wanted.ids] if is_flat else [])]
        behind = [0, *itertools.accumulate(_whole(memory.num_bytes) for memory in self.planes)]
        self.parts = [(blocks[rank] + at, len(memory.whole)) for at, memory in zip(behind, self.planes, strict=False)]
        for (start, nbytes), memory in zip(self.parts, self.planes, strict=True):
            whole = bytes_at(start, nbytes)
            whole[: case.shift] = POISON
            whole[case.shift if is_flat else case.shift + memory.num_bytes :] = POISON
        # At each rank blocks lie elsewhere in the region.
        self.static = StaticExchange(self.exchange, mailboxes, [start - 64 * r for r, start in enumerate(blocks)])
        self.places = [64 * rank + at + case.shift for at in behind[:-1]]
        self.block = self.make_block(case.form)
        self.out_at = 64 * rank + behind[-1]
        self.answers_at = blocks[rank] - 64 * rank + self.out_at
        self.returned_at = self.out_at + _whole(case.form.num_rows * case.row_bytes)
        self.num_combines = 0

    def make_block(self, form, distance=0):
        """A block of this form, so many bytes away from the rank's own."""
        rows_at, values_at, *ids_at = (at + distance for at in self.places)
        return self.static.block(form, rows_at, values_at, self.case.most, ids_at=ids_at[0] if ids_at else None)

    def send(self, inputs):
        weights = None if inputs.weights is None else inputs.weights[self.rank]
        self.ids = inputs.ids[self.rank]
        arguments = inputs.rows[self.rank], self.ids, self.block
        self.static.announce(*arguments, signature=self.signature, topk_weights=weights)

    def receive(self):
        self.static.push(self.block)
        self.static.arrive(self.block)

    def answer(self, call):
        y = self.case.answers(call)[self.rank]
        if not self.case.in_place:
            return y
        return bytes_at(self.answers_at, max(1, y.nbytes))[: y.nbytes].view(y.dtype).view(y.shape).copy_(y)

    def combine(self, y, out, weights):
        """With numbers beside the rows; every other time the way home is a copy."""
        static, answered, (num_tokens, num_topk) = self.static, self.block.answered, self.ids.shape
        self.num_combines += 1
        if self.num_combines % 2 == 0:
            memory = torch.full((static.answered_words(self.block, num_tokens),), -7)
            answered = static.answered(self.block, memory, num_tokens)
            static.keep(self.block, answered)
        is_flat, home = self.case.layout == "flat", torch.full((num_tokens, num_topk), float("nan"))
        values = _values_of(self.rank, torch.arange(len(y)))
        values = values[:, None] + torch.arange(num_topk) / 16 if is_flat else values
        beside = {"values": values, "values_at": self.returned_at}
        static.send_rows(y, answered, place=self.out_at, signature=self.signature, **beside)
        back = {"home": home, "topk_idx": self.ids.int() if is_flat else None}
        static.sum_rows(answered, out, signature=self.signature, topk_weights=weights, **back)
        static.release(answered)
        assert torch.equal(home, self._expected(answered.routes[:num_tokens]))
        num_words = y.nbytes // 4  # which nobody reads any more
        fill[(1,)](self.answers_at, num_words, POISON_WORD, BLOCK=triton.next_power_of_2(max(1, num_words)))

    def _expected(self, routes):
        """The numbers that come home."""
        wanted = _values_of(routes >> 40, routes & (1 << 40) - 1).masked_fill(routes < 0, 0)
        if self.case.layout != "flat":
            return wanted
        # Of each choice: that of the route to its expert's rank, from its own column.
        ranks = torch.where(self.ids < 0, -1, self.case.world.expert_rank[self.ids])
        is_it = (ranks[:, :, None] == (routes >> 40)[:, None, :]) & (routes >= 0)[:, None, :]
        found = torch.where(is_it, wanted[:, None, :], 0).sum(dim=2)
        return torch.where(ranks < 0, 0, found + torch.arange(self.ids.shape[1]) / 16)

    @property
    def everything(self):
        return torch.cat([self.read(bytes_at(start, nbytes)) for start, nbytes in self.parts])

    def poison(self, call):
        num_windows = self.exchange.control.num_windows
        nbytes = self.case.num_ranks * card_bytes(self.case.num_experts, self.case.num_ranks)
        start = self.mailboxes[self.rank] + call % num_windows * nbytes
        fill[(1,)](start, nbytes // 4, POISON_WORD, BLOCK=triton.next_power_of_2(nbytes // 4))


def static_memory(case):
    """Bytes of all memory of a `StaticRank`: the last is of blocks with guards, and of the rows of a combine."""
    sizes = {"num_ranks": case.num_ranks, "num_experts": case.num_experts, "max_in_flight": case.depth}
    choices = case.topk * (case.form.value_bytes + 4) if case.layout == "flat" else case.form.value_bytes
    rows = case.form.num_rows * (2 * case.row_bytes + choices + 4 * case.topk)
    return *case.memory()[:3], static_mailbox_bytes(**sizes), rows + 15 * GUARD


def _values_of(rank, rows):
    """One number for each row of a rank, exact in fp32."""
    return (rank * 4096 + rows + 1).float()


def _whole(nbytes):
    """Bytes of a plane with guards, so that the next one begins at a multiple of 64."""
    return -(-(nbytes + 2 * GUARD) // GUARD) * GUARD

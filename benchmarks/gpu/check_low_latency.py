"""Low-latency kernels against kernels/reference_eager.py, by bits; signals and waits against what they promise.

T tokens of a rank   K num_topk   E experts   R ranks   H hidden
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from answers import poisoned, wrong_bits
from context import Context
from torch import Tensor

from moecomm.errors import PeerTimeout
from moecomm.kernels.eager import EagerKernels, Form, Home, Sorted, message_bytes
from moecomm.kernels.registry import eager_kernels_for
from moecomm.placement import Placement
from moecomm.testing import masked
from moecomm.testing.contracts.cases import random_rows

__all__ = ["GUARD", "Inputs", "Side", "check", "check_signals", "guarded", "make_inputs"]

GUARD = 64  # bytes, poisoned, before and behind all memory
_TIMEOUT_NS = 5_000_000_000


def guarded(num_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Poisoned memory, and the part of it between two guards."""
    whole = poisoned(num_bytes + 2 * GUARD, dtype=torch.uint8, device=device)
    return whole, whole[GUARD : GUARD + num_bytes]


class Side:
    """What one implementation works on: all ranks' inputs, messages and blocks, on its device."""

    def __init__(self, kernels: EagerKernels, device: torch.device, inputs: Inputs) -> None:
        self.kernels, self.device, self.inputs = kernels, device, inputs
        placement = Placement(inputs.num_experts, inputs.num_ranks)
        self.expert_rank, self.expert_local = (
            placement.expert_rank.to(device),
            placement.expert_local.to(device),
        )
        self.num_local = [len(placement.local_experts(rank)) for rank in range(inputs.num_ranks)]
        self.first = [placement.local_experts(rank).start for rank in range(inputs.num_ranks)]
        self.messages = [[guarded(inputs.message_bytes(t), device) for t in inputs.tokens] for _ in inputs.tokens]

    def send(self, rank: int) -> tuple[Tensor, int]:
        weights = self.inputs.weights
        return self.kernels.send_eager(
            self.inputs.rows[rank].to(self.device),
            self.inputs.ids[rank].to(self.device),
            None if weights is None else weights[rank].to(self.device),
            self.expert_rank,
            [self.messages[peer][rank][1].data_ptr() for peer in range(self.inputs.num_ranks)],
        )

    def receive(self, rank: int, form: Form) -> tuple[Sorted, list[Tensor]]:
        """What is learned, and all the memory that may have been written."""
        num_local = self.num_local[rank]
        num_rows = num_local * form.capacity if form.capacity else form.num_rows
        rows, values = guarded(num_rows * form.row_bytes, self.device), guarded(num_rows * 4, self.device)
        for _, part in (rows, values):
            part.zero_()
        used = torch.zeros(max(1, num_local), dtype=torch.int64, device=self.device)
        arrived = torch.zeros(num_local, dtype=torch.int64, device=self.device)
        learned = self.kernels.receive_eager(
            Home(rank, self.expert_rank, self.expert_local, arrived),
            form,
            [part.data_ptr() for _, part in self.messages[rank]],
            list(self.inputs.tokens),
            rows[1].data_ptr(),
            values[1].data_ptr() if form.value_bytes else 0,
            used,
        )
        return learned, [rows[0], values[0], used, arrived]

    def copy(self, rank: int, form: Form, learned: Sorted, rows: Tensor) -> Tensor:
        block = rows[GUARD:-GUARD].view(-1, form.row_bytes)
        whole, part = guarded(block.numel(), self.device)
        local = (self.first[rank], self.first[rank] + self.num_local[rank])
        self.kernels.copy_expert_rows(
            part.data_ptr(), block, form.row_bytes, learned.counts, local, form.capacity, form.alignment
        )
        return whole


@dataclass
class Inputs:
    num_experts: int
    num_topk: int
    tokens: tuple[int, ...]
    rows: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor] | None

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def row_bytes(self) -> int:
        return self.rows[0].shape[1] * self.rows[0].element_size()

    def message_bytes(self, num_tokens: int) -> int:
        return message_bytes(num_tokens, self.num_topk, self.row_bytes, 0 if self.weights is None else 4)

    def forms(self) -> Iterator[tuple[str, Form]]:
        make = partial(Form, self.num_topk, self.row_bytes, 0 if self.weights is None else 4)
        total = sum(self.tokens)
        yield "slab", make(max(1, total), 1, max(1, total))
        yield "expert_major", make(0, 4, total * self.num_topk + 4 * self.num_experts)


def make_inputs(context: Context, hidden: int, *, has_weights: bool, call: int = 0) -> Inputs:
    """Random ones; those of another call have other numbers of tokens, which add up to as many."""
    num_experts, num_topk = (32, 8) if context.timer.is_gpu else (5, 2)
    tokens: tuple[int, ...] = (40, 0, 7, 1, 33, 5, 2, 64) if context.timer.is_gpu else (3, 0, 4)
    tokens = tokens[call:] + tokens[:call]
    seeds = [context.seed + 1000 * rank + call for rank in range(len(tokens))]
    ids = [masked(n, num_experts, num_topk, seed=seed).int() for n, seed in zip(tokens, seeds, strict=True)]
    rows = [random_rows((n, hidden), torch.bfloat16, f"{seed}") for n, seed in zip(tokens, seeds, strict=True)]
    weights = None
    if has_weights:
        weights = [random_rows(tuple(each.shape), torch.float32, "weights").masked_fill(each < 0, 0) for each in ids]
    return Inputs(num_experts, num_topk, tokens, rows, ids, weights)


def check(kernels: EagerKernels, context: Context) -> Iterator[tuple[str, str, int]]:
    """Kernel, case and wrong elements, for every method of `EagerKernels`."""
    hidden = (33, 7168) if context.timer.is_gpu else (8,)
    for columns, has_weights in ((hidden[0], True), (hidden[-1], False)):
        inputs = make_inputs(context, columns, has_weights=has_weights)
        name = f"{columns} columns{', weights' if has_weights else ''}"
        got = Side(kernels, context.device, inputs)
        want = Side(eager_kernels_for("reference"), torch.device("cpu"), inputs)
        for rank in range(inputs.num_ranks):
            (ids, _), (right, _) = got.send(rank), want.send(rank)
            yield "send_eager", name, wrong_bits(ids, right)
        context.timer.synchronize()
        for mine, right_ones in zip(got.messages, want.messages, strict=True):
            for (one, _), (other, _) in zip(mine, right_ones, strict=True):
                yield "send_eager", name, wrong_bits(one, other)
        for layout, form in inputs.forms():
            for rank in range(inputs.num_ranks):
                learned, memory = got.receive(rank, form)
                right_learned, right_memory = want.receive(rank, form)
                wrong = sum(map(wrong_bits, learned, right_learned)) + sum(map(wrong_bits, memory, right_memory))
                yield "receive_eager", f"{name}, {layout}", wrong
                copies = (
                    got.copy(rank, form, learned, memory[0]),
                    want.copy(rank, form, right_learned, right_memory[0]),
                )
                yield "copy_expert_rows", f"{name}, {layout}", wrong_bits(*copies)


def check_signals(context: Context) -> Iterator[tuple[str, str, int]]:
    """Every lane has what was added; a wait ends when its lanes are there, and reports when they are not."""
    from moecomm.kernels.triton.signals import make_status, raise_if_behind, signal, signal_all, wait

    num_ranks, num_slots, device = 3, 2, context.device
    boards = torch.zeros(num_ranks, num_slots, num_ranks, dtype=torch.int64, device=device)
    table = boards.data_ptr() + torch.arange(num_ranks, device=device) * (num_slots * num_ranks * 8)
    places = table.tolist()
    want = torch.zeros_like(boards, device="cpu")
    for rank in range(num_ranks):
        signal_all(table, rank, 1, n=2 + rank)
        want[:, 1, rank] += 2 + rank
    signal(table, 2, 0, peer=1, n=5)
    want[1, 0, 2] += 5
    yield "signal", "all ranks, one peer", wrong_bits(boards, want)
    status = make_status(num_ranks, device)
    for at_least in (2, torch.tensor([2], device=device)):
        wait(places[0], 1, at_least, status=status, timeout_ns=_TIMEOUT_NS)
    yield "wait", "ready", int((status.cpu()[:1] != 0).sum())
    wait(places[1], 0, 5, status=status, timeout_ns=1_000_000)
    try:
        raise_if_behind(status, "check")
    except PeerTimeout as error:
        yield "wait", "two lanes behind", int(tuple(error.peers) != (0, 1))
    else:
        yield "wait", "two lanes behind", 1

"""Kernels of the calls that a CUDA graph can hold, against kernels/reference_eager.py, by bits.

All ranks share the device and go in step, phase by phase on one stream: what is waited for is always there, so a wait
that is not over at once is wrong. Blocks are used call after call, and must be zero where no row is.

T tokens of a rank   K num_topk   E experts   R ranks   H hidden
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from answers import poisoned, wrong_bits
from check_low_latency import Inputs, Side, guarded, make_inputs
from context import Context
from torch import Tensor

from moecomm.kernels.eager import Form, Sorted
from moecomm.kernels.registry import eager_kernels_for, kernels_for
from moecomm.kernels.triton.captured import CapturedExchange, captured_memory
from moecomm.kernels.triton.captured_blocks import Placed
from moecomm.kernels.triton.captured_static import StaticExchange, static_mailbox_bytes
from moecomm.testing.contracts.cases import random_rows

__all__ = ["check"]

_TIMEOUT_NS = 5_000_000_000
_LINE = 64
_SIGNATURE = 1
_CALLS = 3  # into the same block; one more than there are windows


class _Shared:
    """Zero memory that every rank gives to all."""

    def __init__(self, num_ranks: int, num_bytes: int, device: torch.device) -> None:
        words = (-(-num_bytes // _LINE) + 1) * _LINE // 8
        self._memory = torch.zeros(num_ranks, words, dtype=torch.int64, device=device)
        self.addresses = [-(-each.data_ptr() // _LINE) * _LINE for each in self._memory]


class _Ranks:
    """All ranks of one form: exchanges, blocks, and the memory behind them."""

    def __init__(self, inputs: Inputs, form: Form, side: Side, *, is_static: bool) -> None:
        self.form, self.side = form, side
        num_ranks, most, device = inputs.num_ranks, max(inputs.tokens), side.device
        self.num_rows = [local * form.capacity if form.capacity else form.num_rows for local in side.num_local]
        needed = captured_memory(
            num_ranks=num_ranks,
            max_in_flight=1,
            max_tokens_per_rank=most,
            num_topk=form.num_topk,
            row_bytes=form.row_bytes,
            value_bytes=form.value_bytes,
            num_rows=max(self.num_rows),
        )
        self._shared = [
            _Shared(num_ranks, num_bytes, device) for num_bytes in (needed.board, needed.windows, needed.outputs)
        ]
        boards, windows, outputs = (shared.addresses for shared in self._shared)
        self._outputs = outputs
        self.exchanges = [
            CapturedExchange(
                rank,
                boards=boards,
                windows=windows,
                outputs=outputs,
                message_bytes=needed.message,
                output_bytes=needed.output,
                expert_rank=side.expert_rank,
                expert_local=side.expert_local,
                max_tokens_per_rank=most,
                timeout_ns=_TIMEOUT_NS,
            )
            for rank in range(num_ranks)
        ]
        self.rows = [guarded(n * form.row_bytes, device) for n in self.num_rows]
        self.values = [guarded(n * 4, device) for n in self.num_rows]
        for _, part in (*self.rows, *self.values):
            part.zero_()
        rows, values = ([part.data_ptr() for _, part in parts] for parts in (self.rows, self.values))
        self.placed: list[Placed]
        if is_static:
            mailboxes = _Shared(
                num_ranks,
                static_mailbox_bytes(num_ranks=num_ranks, num_experts=inputs.num_experts, max_in_flight=1),
                device,
            )
            self._shared.append(mailboxes)
            # One process: all memory is one region, from address 0 on.
            nowhere = [0] * num_ranks
            self.statics = [StaticExchange(exchange, mailboxes.addresses, nowhere) for exchange in self.exchanges]
            places = zip(self.statics, rows, values, inputs.tokens, strict=True)
            self.static_blocks = [static.block(form, *where) for static, *where in places]
            self.placed = [block.placed for block in self.static_blocks]
        else:
            self.blocks = [
                exchange.block(form, rows[rank], values[rank] if form.value_bytes else 0)
                for rank, exchange in enumerate(self.exchanges)
            ]
            self.placed = [block.placed for block in self.blocks]
        self.is_static = is_static

    def dispatch(self, inputs: Inputs) -> None:
        device = self.side.device
        given = [
            (
                inputs.rows[rank].to(device),
                inputs.ids[rank].to(device),
                None if inputs.weights is None else inputs.weights[rank].to(device),
            )
            for rank in range(inputs.num_ranks)
        ]
        if self.is_static:
            parts = zip(self.statics, self.static_blocks, given, strict=True)
            for static, block, (x, ids, weights) in parts:
                static.announce(x, ids, block, signature=_SIGNATURE, topk_weights=weights)
            for static, block in zip(self.statics, self.static_blocks, strict=True):
                static.push(block)
            for static, block in zip(self.statics, self.static_blocks, strict=True):
                static.arrive(block)
            return
        for exchange, block, (x, ids, weights) in zip(self.exchanges, self.blocks, given, strict=True):
            exchange.send(x, ids, block, topk_weights=weights)
        for exchange, block in zip(self.exchanges, self.blocks, strict=True):
            exchange.receive(block)

    def combine(self, answers: list[Tensor], weights: list[Tensor | None], outs: list[Tensor]) -> None:
        device = self.side.device
        for exchange, placed, y in zip(self.exchanges, self.placed, answers, strict=True):
            exchange.send_rows(y.to(device), placed)
        for exchange, placed, out, scale in zip(self.exchanges, self.placed, outs, weights, strict=True):
            exchange.sum_rows(placed, out, topk_weights=None if scale is None else scale.to(device))

    def combine_static(
        self, answers: list[Tensor], numbers: list[Tensor], weights: list[Tensor | None], outs: list[Tensor]
    ) -> list[Tensor]:
        """The same, with a number beside each row; what comes home of those. Every other rank goes by a copy."""
        device, parts = self.side.device, []
        for rank, (static, block) in enumerate(zip(self.statics, self.static_blocks, strict=True)):
            answered, num_tokens = block.answered, len(outs[rank])
            if rank % 2 == 0:
                memory = torch.empty(static.answered_words(block, num_tokens), dtype=torch.int64, device=device)
                answered = static.answered(block, memory, num_tokens)
                static.keep(block, answered)
            parts.append((static, answered))
        beside = [each.to(device) for each in numbers]
        for (static, answered), y, values, place in zip(parts, answers, beside, self._outputs, strict=True):
            how = {"place": place, "values": values, "values_at": values.data_ptr()}
            static.send_rows(y.to(device), answered, signature=_SIGNATURE, **how)
        home = [poisoned(len(out), self.form.num_topk, dtype=values.dtype, device=device) for out in outs]
        for (static, answered), out, scale, of_mine in zip(parts, outs, weights, home, strict=True):
            moved = None if scale is None else scale.to(device)
            static.sum_rows(answered, out, signature=_SIGNATURE, topk_weights=moved, home=of_mine)
        for static, answered in parts:
            static.release(answered)
        return home

    def wrong(self, rank: int, inputs: Inputs, learned: Sorted, memory: list[Tensor]) -> int:
        """Elements of a rank's block, and of what it has learned, that are not the reference's."""
        placed, num_tokens = self.placed[rank], inputs.tokens[rank]
        arrived, (rows, values, used, _) = placed.arrived, memory
        pairs = [
            (arrived.counts, learned.counts),
            (placed.routes[:num_tokens], learned.routes),
            (arrived.num_tokens_per_expert, learned.num_tokens_per_expert),
            (self.rows[rank][0], rows),
            (self.values[rank][0], values),
            (arrived.used, used),
        ]
        if learned.offsets is not None:
            pairs.append((arrived.offsets, learned.offsets))
        return sum(wrong_bits(got, want) for got, want in pairs)


def check(context: Context) -> Iterator[tuple[str, str, int]]:
    """Kernel, case and wrong elements: dispatch in both layouts, static dispatch, and the combines that answer them."""
    cases = [(33, True, _CALLS), (7168, False, 1)] if context.timer.is_gpu else [(7, True, 1)]
    forms = (("captured dispatch", "slab", False), ("captured dispatch", "expert_major", False))
    for columns, has_weights, num_calls in cases:
        for kernel, layout, is_static in (*forms, ("static dispatch", "expert_major", True)):
            name = f"{columns} columns{', weights' if has_weights else ''}, {layout}"
            calls = [make_inputs(context, columns, has_weights=has_weights, call=call) for call in range(num_calls)]
            yield from _pairs(context, kernel, name, calls, layout, is_static=is_static)


def _pairs(
    context: Context, kernel: str, name: str, calls: list[Inputs], layout: str, *, is_static: bool
) -> Iterator[tuple[str, str, int]]:
    """Dispatches and combines into the same blocks, one after the other."""
    form = dict(calls[0].forms())[layout]
    reference, cpu = kernels_for("reference"), torch.device("cpu")
    everyone = range(calls[0].num_ranks)
    ranks = _Ranks(calls[0], form, Side(eager_kernels_for("triton"), context.device, calls[0]), is_static=is_static)
    for call, inputs in enumerate(calls):
        want = Side(eager_kernels_for("reference"), cpu, inputs)
        for rank in everyone:
            want.send(rank)
        right = [want.receive(rank, form) for rank in everyone]
        ranks.dispatch(inputs)
        for rank, exchange in enumerate(ranks.exchanges):
            exchange.check()
            yield kernel, name, ranks.wrong(rank, inputs, *right[rank])
        columns = inputs.rows[0].shape[1]
        answers = [
            random_rows((n, columns), torch.bfloat16, f"y {call} {rank}") for rank, n in enumerate(ranks.num_rows)
        ]
        weights = [
            random_rows(tuple(ids.shape), torch.float32, f"w {call}").masked_fill(ids < 0, torch.nan)
            if call % 2 == 0
            else None
            for ids in inputs.ids
        ]
        whole = [poisoned(t + 2, columns, dtype=torch.bfloat16, device=context.device) for t in inputs.tokens]
        outs = [each[1:-1] for each in whole]
        if is_static:
            numbers = [random_rows((n,), torch.float32, f"v {call} {rank}") for rank, n in enumerate(ranks.num_rows)]
            home = ranks.combine_static(answers, numbers, weights, outs)
            for rank in everyone:
                came = reference.pull_values(right[rank][0].routes, [each.data_ptr() for each in numbers])
                yield "static combine", f"{name}, numbers beside rows", wrong_bits(home[rank], came)
        else:
            ranks.combine(answers, weights, outs)
        addresses = [answer.data_ptr() for answer in answers]
        for rank, exchange in enumerate(ranks.exchanges):
            exchange.check()
            summed = poisoned(inputs.tokens[rank] + 2, columns, dtype=torch.bfloat16, device=cpu)
            reference.combine_rows(summed[1:-1], right[rank][0].routes, addresses, weights=weights[rank])
            yield f"{'static' if is_static else 'captured'} combine", name, wrong_bits(whole[rank], summed)

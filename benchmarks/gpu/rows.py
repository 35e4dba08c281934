"""Push and combine at full size: all virtual ranks' memory on one device, the rate of a device copy beside them.

T tokens of a rank   K num_topk   H hidden   E experts   R ranks

Bytes are those of rows: push reads each row once and writes it once per route; combine reads one row per route and
writes one per token. The copy reads and writes as many bytes in the same run. Every answer is checked after it was
timed: pushed rows, and sums made again by torch in the same order, by their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from answers import poisoned, wrong_bits
from context import Context
from report import compared
from sizes import combine_bytes, push_bytes
from torch import Tensor

from moecomm.kernels.base import ROW_BITS
from moecomm.kernels.cuda.push_bulk import push_rows_in_bulk
from moecomm.kernels.triton.push_engines import forced_engine
from moecomm.kernels.triton.rows import TritonRowKernels
from moecomm.placement import Placement
from moecomm.testing import uniform

__all__ = ["Ranks", "make_ranks", "run"]


@dataclass
class Ranks:
    """What all virtual ranks have, by rank.

    Attributes:
        x: `[T, H]` each.
        topk_idx, topk_weights: `[T, K]` each.
        routes: `[T, K]` each, EXPERT_MAJOR.
        received: `[N, H]`: the rows of all ranks, one rank after the other; `begins` `[R]`: the first of each.
        addresses: `[R]` int64, of each rank's part of `received`.
        out: `[T, H]` each.
    """

    x: list[Tensor]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor]
    routes: list[Tensor]
    received: Tensor
    begins: Tensor
    addresses: Tensor
    out: list[Tensor]

    def places(self, rank: int) -> Tensor:
        """`[T, K]`: the row of `received` that each of a rank's routes names."""
        routes = self.routes[rank]
        return self.begins[routes >> ROW_BITS] + (routes & ((1 << ROW_BITS) - 1))

    def wrong_rows(self, ranks: range) -> int:
        """Elements of pushed rows that are not those of their source."""
        wrong = 0
        for rank in ranks:
            for place in self.places(rank).unbind(1):
                wrong += wrong_bits(self.received[place], self.x[rank])
        return wrong

    def wrong_sums(self, ranks: range, *, has_weights: bool) -> int:
        """Elements of `out` that are not the sum over k in ascending order, in fp32, rounded once."""
        wrong = 0
        for rank in ranks:
            total = torch.zeros_like(self.x[rank], dtype=torch.float32)
            for k, place in enumerate(self.places(rank).unbind(1)):
                row = self.received[place].float()
                total += self.topk_weights[rank][:, k, None] * row if has_weights else row
            wrong += wrong_bits(self.out[rank], total.to(self.out[rank].dtype))
        return wrong


def make_ranks(context: Context, kernels: TritonRowKernels) -> Ranks:
    """Random rows and choices, and where each goes in the canonical order."""
    sizes, device = context.sizes, context.device
    model, dtype = sizes.exchange, torch.bfloat16
    placement = Placement(model.num_experts, sizes.num_ranks)
    ids = [
        uniform(sizes.tokens, model.num_experts, model.num_topk, seed=context.seed + rank)
        for rank in range(sizes.num_ranks)
    ]
    counts = torch.stack([torch.bincount(each.flatten(), minlength=model.num_experts) for each in ids])
    bases, totals = torch.empty_like(counts), []
    for rank in range(sizes.num_ranks):
        local = placement.local_experts(rank)
        mine = counts[:, local.start : local.stop].t().flatten()  # by expert, then source
        bases[:, local.start : local.stop] = (mine.cumsum(0) - mine).view(len(local), sizes.num_ranks).t()
        totals.append(int(mine.sum()))
    ends = torch.tensor(totals).cumsum(0)
    begins = (ends - torch.tensor(totals)).to(device)
    received = poisoned(int(ends[-1]), model.hidden, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(context.seed)
    expert_rank = placement.expert_rank.to(device)
    topk_idx = [each.to(device) for each in ids]

    def random(num_columns: int) -> Tensor:
        return torch.randn(sizes.tokens, num_columns, generator=generator, device=device)

    return Ranks(
        x=[random(model.hidden).to(dtype) for _ in ids],
        topk_idx=topk_idx,
        topk_weights=[random(model.num_topk) for _ in ids],
        routes=[
            kernels.plan_expert_major(each, expert_rank, base.to(device))
            for each, base in zip(topk_idx, bases, strict=True)
        ],
        received=received,
        begins=begins,
        addresses=received.data_ptr() + begins * (model.hidden * dtype.itemsize),
        out=[poisoned(sizes.tokens, model.hidden, dtype=dtype, device=device) for _ in ids],
    )


def run(context: Context) -> None:
    """Push and combine, of one rank and of all ranks at once on a stream each."""
    kernels = TritonRowKernels()
    sizes, model = context.sizes, context.sizes.exchange
    ranks = make_ranks(context, kernels)
    row_bytes = model.hidden * ranks.received.element_size()
    shape = f"{sizes.num_ranks} x {sizes.tokens} x {model.hidden} bf16, top-{model.num_topk} of {model.num_experts}"
    everyone = range(sizes.num_ranks)

    def push(rank: int) -> None:
        with forced_engine("triton"):
            kernels.push_rows(ranks.x[rank], ranks.routes[rank], ranks.addresses)

    def push_in_bulk(rank: int) -> None:
        push_rows_in_bulk(ranks.x[rank], ranks.routes[rank], ranks.addresses)

    def push_weighted(rank: int) -> None:
        weights = ranks.topk_weights[rank]
        kernels.push_rows(ranks.x[rank], ranks.routes[rank], ranks.addresses, weights=weights)

    def combine(rank: int) -> None:
        kernels.combine_rows(ranks.out[rank], ranks.routes[rank], ranks.addresses)

    def combine_weighted(rank: int) -> None:
        weights = ranks.topk_weights[rank]
        kernels.combine_rows(ranks.out[rank], ranks.routes[rank], ranks.addresses, weights=weights)

    def wrong_weighted_rows(which: range) -> int:
        # Through a plain combine, which reads every row that was pushed and is checked by itself below.
        for rank in which:
            kernels.combine_rows(ranks.out[rank], ranks.routes[rank], ranks.addresses)
        wrong = 0
        for rank in which:
            total = torch.zeros_like(ranks.x[rank], dtype=torch.float32)
            for weight in ranks.topk_weights[rank].unbind(1):
                total += (weight[:, None] * ranks.x[rank].float()).to(ranks.x[rank].dtype).float()
            wrong += wrong_bits(ranks.out[rank], total.to(ranks.x[rank].dtype))
        return wrong

    def measure(
        what: str,
        kernel: Callable[[int], None],
        wrong: Callable[[range], int],
        *,
        written: list[Tensor],
        bytes_of: Callable[[int, int, int], int],
        goal: float | None,
    ) -> None:
        for which, name in ((everyone[:1], "one rank"), (everyone, "all ranks at once")):

            def case(which: range = which, name: str = name) -> None:
                for tensor in written:
                    tensor.fill_(torch.nan)
                context.timer.on_streams([kernel], len(which))
                num_wrong = wrong(which)
                num_tokens = len(which) * sizes.tokens
                num_bytes = bytes_of(num_tokens, num_tokens * model.num_topk, row_bytes)
                copy = context.timer.copy(num_bytes, seconds=context.case_seconds)

                def step() -> None:
                    if len(which) == 1:
                        kernel(0)
                    else:
                        context.timer.on_streams([kernel], len(which))

                context.add(
                    compared(
                        context.part,
                        f"{what}, {name}",
                        shape,
                        context.timer.measure(step, seconds=context.case_seconds),
                        bound="device copy of as many bytes",
                        bound_us=copy.median_us,
                        goal=goal,
                        num_bytes=num_bytes,
                        wrong=num_wrong,
                    )
                )

            context.attempt(f"{what}, {name}", shape, case)

    pushes = partial(measure, written=[ranks.received], bytes_of=push_bytes)
    pushes("push weighted", push_weighted, wrong_weighted_rows, goal=None)
    if context.timer.is_gpu:
        pushes("push in bulk (CUDA C++)", push_in_bulk, ranks.wrong_rows, goal=0.85)
    pushes("push", push, ranks.wrong_rows, goal=0.85)
    context.timer.on_streams([push], sizes.num_ranks)  # what the combines read, also where a case was left out
    combines = partial(measure, written=ranks.out, bytes_of=combine_bytes, goal=0.8)
    combines("combine", combine, partial(ranks.wrong_sums, has_weights=False))
    combines("combine weighted", combine_weighted, partial(ranks.wrong_sums, has_weights=True))

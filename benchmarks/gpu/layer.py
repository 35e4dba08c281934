"""The layer on one rank, forward and backward: router, dispatch, experts, combine.

T tokens   K num_topk   H hidden   I intermediate   E experts

Ours is a `MoELayer` as users have it, with our own kernels and a communicator of one rank. The other side is written as
one writes it in torch alone: a softmax over the gate, rows sorted by expert, and the experts in a loop, or by
grouped_mm. Outputs and gradients are compared as far as rounding allows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from answers import wrong_sums
from context import Context
from gemm import dtype_of
from report import compared, unmeasured
from sizes import layer_flops
from torch import Tensor

from moecomm import Communicator, SoloGroup
from moecomm.nn import GroupedExperts, MoELayer, TopKRouter

__all__ = ["run"]

Experts = Callable[[Tensor, Tensor], Tensor]


def grouped_layer(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_experts: int, experts: Experts) -> Tensor:
    """`[T, H]`: the rows of x grouped by expert, through the experts (rows, offsets), summed over k in fp32."""
    chosen, order = topk_idx.flatten().sort(stable=True)
    token = order // topk_idx.shape[1]
    # No count that the host would have to wait for.
    offsets = torch.searchsorted(chosen, torch.arange(num_experts, device=x.device), right=True).to(torch.int32)
    y = experts(x.index_select(0, token), offsets)
    weighted = y.float() * topk_weights.flatten()[order, None]
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, weighted).to(x.dtype)


def plain_router(x: Tensor, gate: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
    """Choices `[T, K]` and their renormalised softmax, in fp32."""
    # The same product as in TopKRouter: other bits would choose other experts now and then.
    scores = F.softmax(F.linear(x.float(), gate.float()), dim=1)
    weights, chosen = scores.topk(num_topk, dim=1)
    return chosen, weights / weights.sum(1, keepdim=True)


def looped_experts(rows: Tensor, offsets: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Expert by expert; the host reads the offsets."""
    counts = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    outputs = []
    for part, w, v in zip(torch.split(rows, counts), gate_up, down, strict=True):
        gate, up = (part @ w.t()).chunk(2, dim=1)
        outputs.append((F.silu(gate) * up) @ v.t())
    return torch.cat(outputs)


def grouped_experts(rows: Tensor, offsets: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """By torch's grouped product."""
    gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=offsets).chunk(2, dim=1)
    return F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=offsets)


def run(context: Context) -> None:
    """Ours against both forms of torch."""
    sizes, model = context.sizes, context.sizes.exchange
    num_experts = sizes.layer_experts
    shape = (
        f"{sizes.layer_tokens} x {model.hidden}, {num_experts} experts of {model.intermediate}, top-{model.num_topk}"
    )
    flops = layer_flops(sizes.layer_tokens, model.num_topk, num_experts, model.hidden, model.intermediate)

    def case() -> None:
        with Communicator(
            SoloGroup(),
            num_experts=num_experts,
            hidden=model.hidden,
            num_topk=model.num_topk,
            max_tokens_per_rank=1,  # of low-latency calls, of which there are none
            transport="local",
            device=context.device,
        ) as comm:
            measure(comm)

    def measure(comm: Communicator) -> None:
        place: dict[str, Any] = {"device": context.device}
        dtype = dtype_of(context)
        # Their own initial weights are drawn on the CPU, which takes longer than all that is measured.
        experts = GroupedExperts(
            num_experts, model.hidden, model.intermediate, backend="triton", device="meta", dtype=dtype
        ).to_empty(**place)
        router = TopKRouter(model.hidden, num_experts, model.num_topk, **place)
        generator = torch.Generator(context.device).manual_seed(context.seed)
        rows = (sizes.layer_tokens, model.hidden)
        x = torch.randn(rows, generator=generator, **place).to(dtype).requires_grad_()
        grad = torch.randn(rows, generator=generator, **place).to(dtype)
        with torch.no_grad():
            for weight in (router.weight, experts.gate_up_proj, experts.down_proj):
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
        leaves = [x, router.weight, experts.gate_up_proj, experts.down_proj]
        layer = MoELayer(router, experts, communicator=comm)

        def theirs(compute: Callable[..., Tensor]) -> Tensor:
            chosen, weights = plain_router(x, router.weight, model.num_topk)
            weights_of = (experts.gate_up_proj, experts.down_proj)
            return grouped_layer(x, chosen, weights, num_experts, lambda r, offsets: compute(r, offsets, *weights_of))

        def step(forward: Callable[[], Tensor]) -> list[Tensor]:
            y = forward()
            return [y, *torch.autograd.grad(y, leaves, grad)]

        want = step(lambda: theirs(looped_experts))
        wrong = sum(
            wrong_sums(one, other, relative=2.0**-6, absolute=0.1)
            for one, other in zip(step(lambda: layer(x)), want, strict=True)
        )
        del want
        timing = context.timer.measure(lambda: step(lambda: layer(x)), seconds=context.case_seconds, waits=True)
        for name, compute, waits in (
            ("plain torch, experts in a loop", looped_experts, True),
            ("plain torch, grouped_mm", grouped_experts, False),
        ):
            try:
                rival = partial(step, partial(theirs, compute))
                other = context.timer.measure(rival, seconds=context.case_seconds, waits=waits)
            except (RuntimeError, AttributeError) as error:
                context.add(unmeasured(context.part, "forward + backward", shape, f"not measured: {name}: {error}"))
                continue
            context.add(
                compared(
                    context.part,
                    "forward + backward",
                    shape,
                    timing,
                    bound=name,
                    bound_us=other.median_us,
                    flops=flops,
                    wrong=wrong,
                )
            )

    context.attempt("forward + backward", shape, case)

"""Whole communicators on one device: virtual ranks, a thread and a stream each, over transport `local`.

By the hosts' clock, the device waited for after each pair: what a training step sees, launches included.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from answers import wrong_bits
from context import Context
from report import compared
from sizes import Model, combine_bytes, push_bytes
from timing import Timing

from moecomm import Communicator, Group
from moecomm.testing import launch, uniform

__all__ = ["run_pairs"]

_WARM, _REPETITIONS = 3, 15
_SECONDS = 60.0


def run_pairs(context: Context, num_ranks: int, devices: list[Any]) -> None:
    """Dispatch and combine of one layer, in throughput mode.

    Arguments:
        context: of the part.
        num_ranks: virtual ranks.
        devices: by rank, what `Communicator` takes.
    """
    model, tokens = context.sizes.exchange, context.sizes.tokens
    found = launch(_pairs, num_ranks, devices, model, tokens, context.seed, timeout=_SECONDS)
    slowest = max((times for times, _ in found), key=lambda times: Timing.of(times).median_us)
    row_bytes, num_routes = model.hidden * 2, tokens * model.num_topk
    moved = num_ranks * (push_bytes(tokens, num_routes, row_bytes) + combine_bytes(tokens, num_routes, row_bytes))
    context.add(
        compared(
            context.part,
            "dispatch + combine, communicator",
            f"{num_ranks} virtual ranks x {tokens} x {model.hidden} bf16, top-{model.num_topk}",
            Timing.of(slowest),
            bound="device copy of as many bytes",
            bound_us=context.timer.copy(moved, seconds=context.case_seconds).median_us,
            num_bytes=moved,
            wrong=sum(wrong for _, wrong in found),
        )
    )


def _stream_of(device: Any) -> AbstractContextManager[Any]:
    """A stream of a rank's own: otherwise all threads give their work to one and the same."""
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return nullcontext()


def _pairs(group: Group, devices: list[Any], model: Model, tokens: int, seed: int) -> tuple[list[float], int]:
    """One rank's times in microseconds, and how many of the last answer's numbers are wrong."""
    times = []
    with (
        _stream_of(devices[group.rank]),
        Communicator(
            group,
            num_experts=model.num_experts,
            hidden=model.hidden,
            num_topk=model.num_topk,
            max_tokens_per_rank=1,
            memory_limit=4 * tokens * model.num_topk * model.hidden * 2 + (1 << 20),
            timeout=timedelta(seconds=_SECONDS / 2),
            device=devices[group.rank],
        ) as comm,
    ):
        generator = torch.Generator().manual_seed(seed + group.rank)
        x = torch.randn(tokens, model.hidden, generator=generator).bfloat16().to(comm.device)
        ids = uniform(tokens, model.num_experts, model.num_topk, seed=seed + group.rank).to(comm.device)
        for _ in range(_WARM + _REPETITIONS):
            begin = time.perf_counter()
            received = comm.dispatch(x, ids)
            home = comm.combine(received.x, received.handle)
            del received
            home[:1].cpu()
            times.append(1e6 * (time.perf_counter() - begin))
        # Sums of as many equal bfloat16 are exact in float32.
        wrong = wrong_bits(home.cpu(), (x.float() * model.num_topk).bfloat16().cpu())
    return times[_WARM:], wrong

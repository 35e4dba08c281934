"""Rows between processes, a GPU each: transport `nvlink` against `all_to_all_single` over NCCL and the links' copies.

What each process does is in link_ranks.py. With one GPU two processes share it over CUDA IPC: tried and reported, since
containers may forbid it; NCCL takes no two ranks on one GPU. Before that, whole communicators of virtual ranks, which
are threads. Without a GPU, to rehearse: processes with CPU tensors, and gloo.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from context import Context
from exchange import run_pairs
from link_ranks import COPY, OURS, THEIRS, Found, Job, measure, on_gpu, on_host
from report import compared, unmeasured
from timing import Timing

from moecomm.bench.config import BenchConfig
from moecomm.errors import TransportUnavailable
from moecomm.testing import launch
from moecomm.testing.failures import RankFailure

__all__ = ["run", "run_processes"]

_GRACE_SECONDS = 25.0  # for what is under way when the part's time is over; run.py waits for longer
_WAIT_SECONDS = 30.0  # of one wait of a rank for another
_CASES = 4  # modes and operations, which share the time of a measurement of several contestants
_VIRTUAL = (1, 2)
_NCCL = "NCCL all_to_all_single"


def run(context: Context) -> None:
    """All there is on this machine; what is missing is said."""
    if not context.timer.is_gpu:
        run_processes(context, "2 CPU processes", 2, on_host, transport="auto", collective="gloo")
        return
    index, count = context.device.index or 0, torch.cuda.device_count()
    if count > 1:
        # The current one is the first, as everywhere in this run.
        devices = tuple(sorted(range(count), key=lambda other: other != index))
        run_processes(context, f"{count} GPUs", count, partial(on_gpu, devices), transport="nvlink", collective="nccl")
    else:
        note = "not measured: there is one GPU, and NCCL takes no two ranks on one"
        context.add(unmeasured(context.part, _NCCL, "1 GPU", note))
    alone = partial(on_gpu, (index, index))
    run_processes(context, "2 processes in turn on 1 GPU", 2, alone, transport="nvlink", collective=None)
    for num_ranks in _VIRTUAL:
        context.attempt(
            "dispatch + combine, communicator",
            f"{num_ranks} virtual ranks",
            partial(run_pairs, context, num_ranks, [context.device] * num_ranks),
        )


def run_processes(
    context: Context,
    where: str,
    num_ranks: int,
    device_of: Callable[[int], Any],
    *,
    transport: str,
    collective: str | None,
) -> None:
    """Dispatch and combine in both modes, by one process per rank.

    Arguments:
        context: of the part.
        where: what the ranks are on, in words.
        num_ranks: at least 2.
        device_of: as in `Job`; a function that other processes can import.
        transport: of our communicator.
        collective: as in `Job`.
    """
    sizes, model = context.sizes, context.sizes.exchange
    for mode, tokens in (("throughput", sizes.tokens), ("low_latency", sizes.decode_tokens)):
        config = BenchConfig(
            ranks=num_ranks,
            tokens=(tokens,),
            hidden=model.hidden,
            experts=model.num_experts,
            topk=model.num_topk,
            mode=mode,
            transport=transport,
            seed=context.seed,
            timeout=_WAIT_SECONDS,
        )
        shape = f"{where} x {tokens} x {model.hidden} bf16, top-{model.num_topk}"
        context.attempt(f"exchange, {mode}", shape, partial(_exchange, context, config, shape, device_of, collective))


def _exchange(
    context: Context, config: BenchConfig, shape: str, device_of: Callable[[int], Any], collective: str | None
) -> None:
    limit = max(0.0, context.deadline - time.monotonic()) + _GRACE_SECONDS
    with tempfile.TemporaryDirectory(prefix="moecomm-links-") as folder:
        job = Job(config, device_of, collective, _CASES * context.case_seconds, folder)
        try:
            ranks: list[Found] = launch(measure, config.ranks, job, backend="processes", timeout=limit)
        except RankFailure as failure:
            if isinstance(failure.error, TransportUnavailable):
                raise failure.error from None  # nothing is broken: this machine does not have it
            raise
    _report(context, config, shape, ranks, collective)


def _report(context: Context, config: BenchConfig, shape: str, ranks: Sequence[Found], collective: str | None) -> None:
    """Each contestant against the copies of the same bytes; ours against theirs."""
    away = max(found.bytes_away for found in ranks)
    here = max(found.bytes_here for found in ranks)
    shape = f"{shape}; {_megabytes(away)} to others, {_megabytes(here)} kept"
    copy = _slowest(ranks, (COPY, "dispatch"))
    theirs = _NCCL if collective == "nccl" else f"{collective} all_to_all_single"
    names = {OURS: ranks[0].transport, THEIRS: theirs}
    if copy is not None:
        wrong = sum(found.wrong[COPY, "dispatch"] for found in ranks)
        context.add(compared(context.part, "copies to all ranks", shape, copy, num_bytes=away, wrong=wrong))
    for what in ("dispatch", "combine"):
        timings = {who: timing for who in names if (timing := _slowest(ranks, (who, what))) is not None}
        rivals = [(who, "copies of as many bytes", copy) for who in timings if copy is not None]
        if THEIRS in timings:
            rivals.append((OURS, theirs, timings[THEIRS]))
        for who, bound, other in rivals:
            context.add(
                compared(
                    context.part,
                    f"{what}, {config.mode}, {names[who]}",
                    shape,
                    timings[who],
                    bound=bound,
                    bound_us=None if other is None else other.median_us,
                    num_bytes=away,
                    wrong=sum(found.wrong[who, what] for found in ranks),
                )
            )


def _slowest(ranks: Sequence[Found], key: tuple[str, str]) -> Timing | None:
    """The times of the rank whose median is the largest; None where nobody measured this."""
    times = [found.times_us[key] for found in ranks if key in found.times_us]
    return Timing.of(max(times, key=median)) if times else None


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB"

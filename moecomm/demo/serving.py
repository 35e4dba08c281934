"""Continuous batching on one rank: requests join and leave between steps; all ranks make equally many steps."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moecomm.demo.checkpoint import load_model, load_settings
from moecomm.demo.decoder import Decoder
from moecomm.demo.requests import Answer, Request, Slots
from moecomm.groups import Group
from moecomm.nn import set_mode
from moecomm.nn.reductions import sum_over_group

__all__ = ["Plan", "Service", "serve"]

# Steps between two looks at whether anybody still has work; a look is an all-reduce of one number.
_STEPS_PER_LOOK = 8
_WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Plan:
    """How requests are served.

    Attributes:
        path: of the saved model.
        requests: of all ranks.
        num_slots: per rank.
        transport: of the communicator.
        mode: of the experts' exchange: "low_latency" or "throughput".
    """

    path: Path
    requests: Sequence[Request]
    num_slots: int
    transport: str = "auto"
    mode: str = "low_latency"


@dataclass
class Service:
    """What one rank did.

    Attributes:
        nanoseconds: of each step.
        num_tokens: of each step: slots that were not empty.
        seconds: from the first step to the end of the last, whatever lay between steps included.
        exchange_seconds: of the steps, in dispatch and combine, waiting included.
        answers: of this rank's requests.
        digests: by number of request: of all logits it was answered from.
        transport: name of the transport.
    """

    nanoseconds: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    exchange_seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    transport: str = ""


def serve(group: Group, plan: Plan) -> Service:
    """Answers all requests together with the other ranks, always by the likeliest byte. Collective."""
    # One thread, so that products are added up in the same order everywhere.
    torch.set_num_threads(1)
    model, communicator = load_model(
        plan.path,
        group=group,
        max_tokens_per_rank=plan.num_slots,
        transport=plan.transport,
        balance_coefficient=0.0,
        z_coefficient=0.0,
    )
    with communicator:
        set_mode(model, plan.mode)
        decoder = Decoder(model, num_slots=plan.num_slots, window=load_settings(plan.path).window)
        slots = Slots(plan.requests, plan.num_slots, rank=group.rank, num_ranks=group.size)
        for _ in range(_WARM_UP_STEPS):
            decoder.step(*slots.inputs())
        service = Service(transport=communicator.transport_name)
        digests = {request.number: hashlib.blake2b(digest_size=16) for request in plan.requests}
        exchanged, started = communicator.seconds, time.perf_counter()
        step = 0
        while step % _STEPS_PER_LOOK or sum_over_group(torch.tensor([not slots.is_done]).long(), group).item():
            begin = time.perf_counter_ns()
            slots.admit(step)
            logits = decoder.step(*slots.inputs())
            running = list(slots.running)
            slots.take(logits.argmax(dim=1).tolist(), step)
            service.nanoseconds.append(time.perf_counter_ns() - begin)
            service.num_tokens.append(sum(answer is not None for answer in running))
            for slot, answer in enumerate(running):
                if answer is not None:
                    digests[answer.request.number].update(logits[slot].numpy().tobytes())
            step += 1
        service.seconds = time.perf_counter() - started
        service.exchange_seconds = communicator.seconds - exchanged
        service.answers = slots.answers
        service.digests = {
            answer.request.number: digests[answer.request.number].hexdigest() for answer in slots.answers
        }
        return service

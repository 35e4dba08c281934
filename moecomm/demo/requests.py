"""Requests that come and go, and the slots of a rank that they are decoded in.

    request i   goes to slot i mod S of rank (i div S) mod R, S slots per rank, R ranks

So a request has the same slot whatever the number of ranks. It waits until it has arrived and the slot is free. Its
prompt and then its own bytes go through the same steps, one byte per step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Answer", "Request", "Slots", "make_requests"]

STOP = b"\n\n"
_PROMPTS = (
    "The for statement is used to ",
    "A class ",
    "If the object ",
    "The following ",
    "An expression list containing at least one comma ",
    "def ",
    "Note that ",
    "When a function is called, ",
    "Return ",
    "The value of ",
    "in ",
    "Changed in version 3",
)


@dataclass(frozen=True)
class Request:
    """Text to be continued.

    Attributes:
        number: of the request, from 0.
        arrival: step from which it can be served.
        prompt: at least one byte.
        num_bytes: most bytes to generate; it ends earlier after an empty line.
    """

    number: int
    arrival: int
    prompt: bytes
    num_bytes: int


@dataclass
class Answer:
    """What came of a request.

    Attributes:
        request: the request.
        text: the bytes generated so far.
        begin: step in which its first byte went in.
        end: step after its last; None while it runs.
    """

    request: Request
    text: bytearray
    begin: int
    end: int | None = None


def make_requests(num_requests: int, *, longest: int, seed: int) -> list[Request]:
    """Requests of unequal prompts and lengths that arrive a few steps apart, in the order of their numbers."""
    generator = random.Random(seed)
    requests, arrival = [], 0
    for number in range(num_requests):
        prompt = _PROMPTS[number % len(_PROMPTS)].encode()
        requests.append(Request(number, arrival, prompt, generator.randint(longest // 4, longest)))
        arrival += generator.randint(0, 8)
    return requests


class Slots:
    """One rank's slots.

    Arguments:
        requests: of all ranks.
        num_slots: S.
        rank, num_ranks: whose slots.

    Attributes:
        answers: of this rank's requests that have begun.
    """

    def __init__(self, requests: Sequence[Request], num_slots: int, *, rank: int, num_ranks: int) -> None:
        self.answers: list[Answer] = []
        self._waiting: list[deque[Request]] = [deque() for _ in range(num_slots)]
        for request in requests:
            if request.number // num_slots % num_ranks == rank:
                self._waiting[request.number % num_slots].append(request)
        self._running: list[Answer | None] = [None] * num_slots
        self._positions = [0] * num_slots

    @property
    def is_done(self) -> bool:
        """Whether all requests of this rank have been answered."""
        return not any(self._running) and not any(self._waiting)

    @property
    def running(self) -> list[Answer | None]:
        """The answer under way in each slot; None = the slot is empty."""
        return self._running

    def admit(self, step: int) -> None:
        """Lets requests that have arrived join in empty slots."""
        for slot, waiting in enumerate(self._waiting):
            if self._running[slot] is None and waiting and waiting[0].arrival <= step:
                self._running[slot] = Answer(waiting.popleft(), bytearray(), begin=step)
                self._positions[slot] = 0
                self.answers.append(self._running[slot])  # type: ignore[arg-type]

    def inputs(self) -> tuple[Tensor, Tensor]:
        """The next byte of each slot and its position, both `[S]` int64; position -1 = the slot is empty."""
        symbols, positions = [0] * len(self._running), [-1] * len(self._running)
        for slot, answer in enumerate(self._running):
            if answer is not None:
                position = positions[slot] = self._positions[slot]
                prompt = answer.request.prompt
                symbols[slot] = prompt[position] if position < len(prompt) else answer.text[position - len(prompt)]
        return torch.tensor(symbols), torch.tensor(positions)

    def take(self, symbols: Sequence[int], step: int) -> None:
        """Takes the byte that the model gave for each slot in this step; who has enough leaves."""
        for slot, answer in enumerate(self._running):
            if answer is None:
                continue
            self._positions[slot] += 1
            if self._positions[slot] < len(answer.request.prompt):
                continue  # the next byte is known: it is the prompt's
            answer.text.append(symbols[slot])
            if len(answer.text) == answer.request.num_bytes or answer.text.endswith(STOP):
                answer.end = step + 1
                self._running[slot] = None

"""What stands in for a mode that a communicator cannot offer: its calls are refused before anything is sent."""

from __future__ import annotations

from typing import NoReturn

from moecomm.algorithms.base import Algorithm

__all__ = ["Refused"]


class Refused(Algorithm):
    """Refuses each dispatch, on all ranks alike.

    Arguments:
        reason: why, and what to do instead, as a sentence without its full stop.
    """

    name = "not available"

    def __init__(self, reason: str) -> None:
        self.refusal = reason

    def check_size(self, num_tokens: int) -> None:
        raise ValueError(self.refusal)

    def capacity(self, layout: str, expert_alignment: int) -> int:
        return 0

    def begin_dispatch(self, *arguments: object, **options: object) -> NoReturn:
        raise AssertionError("a refused dispatch has begun")

    def begin_combine(self, *arguments: object, **options: object) -> NoReturn:
        raise AssertionError("a combine of a dispatch that was refused has begun")

"""What crosses the link between domains: bytes so far, and the bytes that were compared when a way was chosen."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

__all__ = ["WAYS", "Choice", "Hops", "Promise", "Way"]

Way = Literal["auto", "direct", "hierarchical"]
WAYS: tuple[str, ...] = get_args(Way)


@dataclasses.dataclass(frozen=True)
class Choice:
    """How one call went, and what that was decided by: payload bytes of all ranks together.

    Attributes:
        title: of the call.
        is_hierarchical: over rails; else from rank to rank.
        direct_bytes, hierarchical_bytes: between domains, of either way.
        inside_bytes: over rails, what these pass on in a dispatch, and what they read inside their domains to answer in
            a combine.
    """

    title: str
    is_hierarchical: bool
    direct_bytes: int
    hierarchical_bytes: int
    inside_bytes: int


@dataclasses.dataclass(frozen=True)
class Promise:
    """How low-latency calls go: fixed when the communicator is made, since they do not know each other's counts.

    Attributes:
        is_hierarchical: over rails; else from rank to rank.
        direct_rows, hierarchical_rows: of either way, how often a token of mine crosses between domains in a dispatch,
            on average over all choices of K different experts.
    """

    is_hierarchical: bool
    direct_rows: float
    hierarchical_rows: float


class Hops:
    """Of one rank.

    Attributes:
        way: what the user wants.
        between: payload bytes that this rank has put to ranks of other domains.
        forwarded: payload bytes that it has passed on inside its domain, to itself as well.
        choices: the last one by kind of call.
        promise: how low-latency calls go; None where there are none, or no other domain.
    """

    promise: Promise | None = None

    def __init__(self, way: Way = "auto") -> None:
        self.way = way
        self.between = 0
        self.forwarded = 0
        self.choices: dict[str, Choice] = {}

    def choose(self, kind: str, title: str, direct_bytes: int, hierarchical_bytes: int, inside_bytes: int) -> bool:
        """Whether a call goes over rails: if that moves fewer bytes between domains, unless the user says otherwise."""
        is_hierarchical = self.prefers_rails(direct_bytes, hierarchical_bytes)
        self.note(kind, Choice(title, is_hierarchical, direct_bytes, hierarchical_bytes, inside_bytes))
        return is_hierarchical

    def prefers_rails(self, direct_bytes: int, hierarchical_bytes: int) -> bool:
        """The same without keeping it; from one rank's bytes alone, it says how a call will probably go."""
        return self.way == "hierarchical" or (self.way == "auto" and hierarchical_bytes < direct_bytes)

    def note(self, kind: str, choice: Choice) -> None:
        """Keeps a choice for whoever asks."""
        self.choices[kind] = choice

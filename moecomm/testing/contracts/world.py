"""How the ranks of a contract test are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moecomm.testing.contracts.cases import Case, cases_for
from moecomm.testing.launch import launch

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """Ranks of one kind that reach each other by one transport.

    Attributes:
        backend: how `launch` makes ranks: "threads", "stepped" or "processes".
        transport: name of the transport, as `Communicator` takes it.
        rank_counts: numbers of ranks to test with.
        timeout: seconds for one launch.
        cases: gives the cases for a number of ranks; fewer than all where each takes long. A check leaves out what its
            calls cannot carry.
    """

    backend: str
    transport: str
    rank_counts: tuple[int, ...] = (1, 2, 3, 4, 8)
    timeout: float = 120.0
    cases: Callable[[int], Sequence[Case]] = cases_for

    def run(self, fn: Callable[..., Any], num_ranks: int, *args: Any, return_exceptions: bool = False) -> list[Any]:
        """Calls `fn(group, transport, *args)` on every rank; see `launch`."""
        return launch(
            fn,
            num_ranks,
            self.transport,
            *args,
            backend=self.backend,
            timeout=self.timeout,
            return_exceptions=return_exceptions,
        )

    @property
    def several(self) -> int:
        """A number of ranks for tests that need peers."""
        return max(count for count in self.rank_counts if count <= 4)

    def __str__(self) -> str:
        return f"{self.transport}-{self.backend}"

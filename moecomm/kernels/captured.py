"""Low-latency calls that a device makes by itself: what communicators want of the kernels.

T num_tokens   K num_topk   E num_experts   E_local experts here   R num_ranks   H hidden   N rows of the block
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from moecomm.kernels.eager import Form

__all__ = ["CapturedCalls", "CapturedKernels", "CapturedMemory"]


class CapturedMemory(NamedTuple):
    """Bytes of memory that every rank gives to all, beginning at multiples of 64, zero at first.

    Attributes:
        board: lanes.
        message: of one message; `windows` has room for those of R ranks, for as many calls as are kept.
        windows: where messages arrive.
        output: of the rows of one combine; `outputs` has room for those of as many calls.
        outputs: where peers read rows.
    """

    board: int
    message: int
    windows: int
    output: int
    outputs: int


class CapturedCalls(Protocol):
    """The calls of one rank. Methods only launch on the current stream, unless they say that they wait.

    Attributes:
        status: int64 on the device; its first word is 0 unless something has gone wrong.
        tokens_per_expert: `[E_local]` int64 on the device: what has arrived in all calls.
    """

    @property
    def status(self) -> Tensor: ...

    @property
    def tokens_per_expert(self) -> Tensor: ...

    def block(self, form: Form, rows: int, values: int = 0) -> Any:
        """A place for the rows of a dispatch: zeros at these addresses. Its `placed` tells what has arrived.

        `placed` has `arrived` (`counts` `[R, E + R]`, `num_tokens_per_expert`, `offsets` `[E_local]` int32, `used`) and
        `routes` `[Tmax, K]` int64, on the device, in memory that calls do not move.
        """
        ...

    def send(self, x: Tensor, topk_idx: Tensor, block: Any, *, topk_weights: Tensor | None = None) -> None:
        """Begins a dispatch."""
        ...

    def receive(self, block: Any) -> None:
        """Ends it."""
        ...

    def send_rows(self, y: Tensor, placed: Any) -> None:
        """Begins a combine."""
        ...

    def sum_rows(self, placed: Any, out: Tensor, *, topk_weights: Tensor | None = None) -> None:
        """Ends it."""
        ...

    def failure(self) -> Exception | None:
        """What has stopped the calls; waits for the device."""
        ...

    def check(self) -> None:
        """Raises `failure`, and forgets it if all ranks find the same; waits for the device."""
        ...


class CapturedKernels(Protocol):
    """Makes calls that a device makes by itself."""

    def memory(
        self,
        *,
        num_ranks: int,
        max_in_flight: int,
        max_tokens_per_rank: int,
        num_topk: int,
        row_bytes: int,
        value_bytes: int,
        num_rows: int,
    ) -> CapturedMemory:
        """What to set aside for calls up to these sizes; `num_rows` is N, or the most E_local * capacity of a rank."""
        ...

    def make(
        self,
        rank: int,
        *,
        boards: Sequence[int],
        windows: Sequence[int],
        outputs: Sequence[int],
        message_bytes: int,
        output_bytes: int,
        expert_rank: Tensor,
        expert_local: Tensor,
        max_tokens_per_rank: int,
        max_in_flight: int,
        timeout_ns: int,
        describe: Callable[[int], str],
    ) -> CapturedCalls:
        """The calls of a rank, with the addresses of everybody's memory, by rank."""
        ...

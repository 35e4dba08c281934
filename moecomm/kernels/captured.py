"""Calls that a device makes by itself, low-latency ones and those of fixed shape: what communicators want of kernels.

T num_tokens   K num_topk   E num_experts   E_local experts here   R num_ranks   H hidden   N rows of the block
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from moecomm.errors import CallMismatch, RoutingChanged
from moecomm.kernels.eager import Form

__all__ = ["FOUND_BY_ALL", "CapturedCalls", "CapturedKernels", "CapturedMemory", "StaticCalls"]

FOUND_BY_ALL = (ValueError, CallMismatch, RoutingChanged)
"""What all ranks find alike, in the same call, and may go on from once they have raised it."""


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

        `placed` has `arrived` (`counts` `[R, E + R]`, `num_tokens_per_expert`, `offsets` `[E_local]` int32) and
        `routes` `[Tmax, K]` int64, on the device, in memory that calls do not move. Where rows may have been written to
        that nothing fills, `placed.distrust()` lets the next dispatch blank them.
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


class StaticCalls(Protocol):
    """The throughput calls of one rank, of fixed shape, expert_major or flat; methods launch and never wait.

    What goes wrong is told by the `CapturedCalls` for which they were made. `signature` stands for what the ranks of a
    call must agree on, a number of 31 bits.
    """

    def block(self, form: Form, rows_at: int, values_at: int, max_tokens: int, *, ids_at: int | None = None) -> Any:
        """A place for the rows of a dispatch, at these offsets in my region, for up to so many tokens of mine.

        Its `placed` is as in `CapturedCalls.block`; `arrived.offsets` means nothing for flat rows. Its `answered` is
        what combines want.

        Arguments:
            ids_at: flat: of local ids `[num_rows, K]` int32, and weights are `[num_rows, K]`; None: the layout is
                expert_major, and what is there is zero.
        """
        ...

    def announce(
        self,
        x: Tensor,
        topk_idx: Tensor,
        block: Any,
        *,
        signature: int,
        topk_weights: Tensor | None = None,
        changed: Tensor | None = None,
    ) -> None:
        """Begins a dispatch: tells every rank how many rows come, and where the block is.

        Arguments:
            changed: one int64: whether all ranks shall stop, because a recompute here has routed otherwise than the
                forward; None: it has not.
        """
        ...

    def push(self, block: Any) -> None:
        """Goes on with it, behind what all ranks have announced: writes my rows to their places."""
        ...

    def arrive(self, block: Any) -> None:
        """Ends it, behind what all ranks have pushed."""
        ...

    def answered(self, block: Any, memory: Tensor, num_tokens: int) -> Any:
        """What combines want of a block, once `keep` has copied it there: the block may serve other dispatches then.

        It has `counts` `[R, E + R]` int32 and `routes` `[T, K]` int64.

        Arguments:
            memory: `[answered_words(block, num_tokens)]` int64.
            num_tokens: T of the dispatch that has filled the block.
        """
        ...

    def answered_words(self, block: Any, num_tokens: int) -> int:
        """Numbers of 64 bits that `answered` takes."""
        ...

    def keep(self, block: Any, answered: Any) -> None:
        """Copies what has arrived in a block to what combines want of it."""
        ...

    def send_rows(
        self,
        y: Tensor,
        answered: Any,
        *,
        place: int,
        signature: int,
        values: Tensor | None = None,
        values_at: int = 0,
        changed: Tensor | None = None,
    ) -> None:
        """Begins a combine of rows that lie, or are copied to, at this offset in my region; with numbers beside them.

        Arguments:
            answered: of the block whose rows they answer, or what `answered` gives.
            values: `[N]` (flat: `[N, K]`), which lie, or are copied to, at `values_at`.
            changed: as in `announce`.
        """
        ...

    def sum_rows(
        self,
        answered: Any,
        out: Tensor,
        *,
        signature: int,
        topk_weights: Tensor | None = None,
        home: Tensor | None = None,
        topk_idx: Tensor | None = None,
    ) -> None:
        """Goes on with it, behind what all ranks have begun: reads my tokens' rows where they lie and sums them.

        Arguments:
            out: `[T, H]`, overwritten; H may be 0.
            home: `[T, K]`, overwritten with the number of each route, 0 where there is none; None: none travel.
            topk_idx: flat, with `home`: `[T, K]` of the dispatch.
        """
        ...

    def release(self, answered: Any) -> None:
        """Ends it, when all ranks have read."""
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

    def mailbox_bytes(self, *, num_ranks: int, num_experts: int, max_in_flight: int) -> int:
        """Bytes of memory that every rank gives to all for calls of fixed shape, zero at first."""
        ...

    def make_static(self, calls: CapturedCalls, *, mailboxes: Sequence[int], regions: Sequence[int]) -> StaticCalls:
        """The calls of fixed shape of a rank, beside its others.

        Arguments:
            calls: of `make`.
            mailboxes: addresses of everybody's `mailbox_bytes`, by rank.
            regions: addresses of everybody's memory that rows lie in.
        """
        ...

"""Throughput calls of fixed shape that a CUDA graph can hold: counts first, then rows straight to their places.

    T num_tokens   Tmax most of them   K num_topk   E num_experts   E_local experts here   R num_ranks   H hidden

Every block has room for `num_rows` rows, known to all, so nobody is asked for memory: counts alone say where each row
goes at its rank, and whether everything fits; cards say where the blocks are. A rank may write to a peer's block as
soon as it has the peer's card, for the peer's stream sends it behind everything that has used the block before.

A combine reads rows where they lie, so it ends when everybody has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured import CapturedExchange
from moecomm.kernels.triton.captured_announce import NOWHERE, announce, card_bytes, find_bad
from moecomm.kernels.triton.captured_answers import Answered, answered_in, answered_words, keep_answered
from moecomm.kernels.triton.captured_calls import InFlight
from moecomm.kernels.triton.captured_cards import plan_announced
from moecomm.kernels.triton.captured_combine import Outputs, copy_outputs, pull_sums, wait_for_ticket
from moecomm.kernels.triton.captured_groups import Groups
from moecomm.kernels.triton.captured_ready import READY_BYTES, find_places, send_places
from moecomm.kernels.triton.captured_send import end_send
from moecomm.kernels.triton.captured_state import Control, Operation, windows_for
from moecomm.kernels.triton.captured_static_blocks import Places, StaticBatch, StaticBlock, make_static_block
from moecomm.kernels.triton.captured_zeros import zero_rows
from moecomm.kernels.triton.compile_case import LISTED_RANKS, NUMBERS_OF_RANKS, CompileCase
from moecomm.kernels.triton.counts import count_by_expert, count_by_rank
from moecomm.kernels.triton.flat import pull_flat_unless_failed, push_flat_metadata
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.plans import route_by_expert, route_by_rank
from moecomm.kernels.triton.push import push_rows
from moecomm.kernels.triton.runtime import launch, num_blocks
from moecomm.kernels.triton.values import pull_values_unless_failed

__all__ = ["StaticExchange", "compile_cases", "static_mailbox_bytes"]

_ROUTES = 512


@triton.jit(do_not_specialize=["num_routes"], do_not_specialize_on_alignment=["planned", "routes", "status"])
def settle_routes_kernel(
    planned: tl.tensor, routes: tl.tensor, num_routes: tl.int64, status: tl.tensor, ROUTES: tl.constexpr
) -> None:
    """Makes planned routes the block's; once a call has failed, they become nowhere instead, and nothing is pushed."""
    position = tl.program_id(0).to(tl.int64) * ROUTES + tl.arange(0, ROUTES)
    is_route = position < num_routes
    num_settled = unless_failed(status, tl.cast(num_routes, tl.int64))
    route = tl.load(planned + position, mask=is_route, other=-1)
    tl.store(routes + position, route, mask=position < num_settled)
    tl.store(planned + position, tl.full((ROUTES,), -1, tl.int64), mask=is_route & (position >= num_settled))


@triton.jit(
    do_not_specialize=["lane", "num_ranks"],
    do_not_specialize_on_alignment=["begun", "ticket", "arrivals", "boards", "status"],
)
def begin_call_kernel(
    begun: tl.tensor,
    ticket: tl.tensor,
    arrivals: tl.tensor,
    boards: tl.tensor,
    lane: tl.int64,
    num_ranks: tl.int32,
    status: tl.tensor,
    RANKS: tl.constexpr,
) -> None:
    """One program: signals what the kernels before it have stored, as a call of its own."""
    number = tl.load(begun) + 1
    end_send(arrivals, boards, unless_failed(status, num_ranks), lane, begun, ticket, number, RANKS)


def static_mailbox_bytes(*, num_ranks: int, num_experts: int, max_in_flight: int) -> int:
    """Bytes that every rank gives to all for cards, beginning at a multiple of 64."""
    return windows_for(max_in_flight) * num_ranks * (card_bytes(num_experts, num_ranks) + READY_BYTES)


@final
class StaticExchange:
    """Throughput calls of one rank, expert_major or flat, in blocks and outputs that all ranks address.

    Arguments:
        exchange: the rank's; its `check` tells what goes wrong here, too.
        mailboxes: by rank, the address here of that rank's `static_mailbox_bytes`.
        regions: by rank, the address here of the memory that its blocks and outputs lie in, multiples of 16.
    """

    def __init__(self, exchange: CapturedExchange, mailboxes: Sequence[int], regions: Sequence[int]) -> None:
        control = exchange.control
        self._device = control.boards.device
        for name, places, divisor in (("mailboxes", mailboxes, 64), ("regions", regions, 16)):
            if len(places) != control.num_ranks or any(place % divisor for place in places):
                raise ValueError(f"{name} is {places}; wanted {control.num_ranks} addresses, multiples of {divisor}")
        self._exchange = exchange
        self._dispatches = InFlight("dispatch", exchange.max_in_flight)
        self._combines = InFlight("combine", exchange.max_in_flight)
        ready = control.num_windows * control.num_ranks * card_bytes(exchange.experts[0].numel(), control.num_ranks)
        self._mailboxes, self._ready_mailboxes = self._table(mailboxes), self._table([at + ready for at in mailboxes])
        self._mailbox, self._ready_mailbox = mailboxes[control.rank], mailboxes[control.rank] + ready
        self._regions, self._region = self._table(regions), regions[control.rank]
        self._first_bad, self._unchanged = self._table([NOWHERE]), self._table([0])
        num_experts, ranks = exchange.experts[0].numel(), torch.arange(control.num_ranks, dtype=torch.int32)
        self._by_expert = Groups(*exchange.experts, 0)
        self._by_rank = Groups(ranks.to(self._device), torch.zeros_like(ranks, device=self._device), num_experts)

    def _table(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def block(
        self, form: Form, rows_at: int, values_at: int, max_tokens: int, *, ids_at: int | None = None
    ) -> StaticBlock:
        """A place for the rows of a dispatch; made before a graph is captured. Its offset may differ between ranks.

        Arguments:
            form: of the calls that fill it, the same on every rank; `capacity` is 0 (flat: and `alignment` 1).
            rows_at: offset in my region of `[num_rows, H]`, all zero, a multiple of 16.
            values_at: the same of weights `[num_rows]`, flat: `[num_rows, K]`; unused where none travel.
            max_tokens: most T of this rank.
            ids_at: flat: the same of local ids `[num_rows, K]` int32; None: the layout is expert_major. Of a flat block
                nothing needs to be zero.

        Raises:
            ValueError: the form is of a slab, flat rows are aligned, or an offset is no multiple of 16.
        """
        exchange, is_flat = self._exchange, ids_at is not None
        if form.capacity:
            raise ValueError(f"form has slabs of {form.capacity} rows; a static receive is expert_major or flat")
        if is_flat and form.alignment != 1:
            raise ValueError(f"form aligns experts to {form.alignment} rows; flat rows are not grouped by expert")
        places = Places(rows_at, values_at, ids_at or 0)
        if rows_at % 16 or (form.value_bytes and values_at % 16) or places.ids % 16:
            raise ValueError(f"rows_at is {rows_at}, values_at {values_at}, ids_at {ids_at}; wanted multiples of 16")
        exchange.max_topk = max(exchange.max_topk, form.num_topk)
        groups = self._by_rank if is_flat else self._by_expert
        _, num_ranks, num_experts, _ = exchange.sizes
        how = (self._region, max_tokens, (num_ranks, num_experts), exchange.tokens_per_expert)
        return make_static_block(form, places, groups, *how, is_flat=is_flat)

    # -- dispatch ------------------------------------------------------------------------------------------------------

    def announce(
        self,
        x: Tensor,
        topk_idx: Tensor,
        block: StaticBlock,
        *,
        signature: int,
        topk_weights: Tensor | None = None,
        changed: Tensor | None = None,
    ) -> None:
        """Counts, and tells every rank; never waits. x, topk_idx and topk_weights must not change until `push` is done.

        See `CapturedExchange.send` for the arguments, and for what is in the block after `arrive`.

        Arguments:
            signature: what ranks must agree on, as a number of 31 bits.
            changed: one int64: whether all ranks shall stop, for a recompute has routed otherwise; None: it has not.

        Raises:
            ValueError: an argument has another shape than the block's form says.
            TooManyInFlight: too many calls have begun and are not completed.
        """
        exchange, placed = self._exchange, block.placed
        exchange.check_batch(x, topk_idx, placed.form, topk_weights, block.planned.shape[0])
        self._dispatches.begin(placed)
        placed.num_tokens = block.answered.num_tokens = topk_idx.shape[0]
        expert_rank, _ = exchange.experts
        num_experts, num_ranks = expert_rank.numel(), exchange.control.num_ranks
        by_expert = count_by_expert(topk_idx, num_experts, block.totals[:num_experts])
        by_rank = count_by_rank(topk_idx, expert_rank, num_ranks, block.totals[num_experts:])
        find_bad(topk_idx, num_experts, self._first_bad)
        announce(
            *(exchange.control, exchange.announcements, block.announced, block.totals, topk_idx, self._first_bad),
            *(self._unchanged if changed is None else changed, self._mailboxes, signature, block.places),
        )
        before = (by_rank if block.is_flat else by_expert).before
        block.batch = StaticBatch(x, topk_idx, topk_weights, before, signature)

    def push(self, block: StaticBlock) -> None:
        """Waits on the device for all counts, plans, and writes every row to its place."""
        batch, block.batch = block.batch, None
        if batch is None:
            raise ValueError("block: no dispatch has been announced whose rows could be pushed")
        exchange, (x, ids, weights, before, signature) = self._exchange, batch
        control, placed, num_tokens = exchange.control, block.placed, ids.shape[0]
        plan_announced(
            *(control, exchange.announcements.slot, block.announced, self._mailbox, signature),
            *(exchange.experts, block.groups, placed.form, (self._regions, block.addresses)),
            *(block.bases, block.scratch, placed.arrived),
        )
        planned, (expert_rank, expert_local) = block.planned[:num_tokens], exchange.experts
        route = route_by_rank if block.is_flat else route_by_expert
        route(ids, expert_rank, block.bases, before, planned)
        launch(
            settle_routes_kernel,
            num_blocks(planned.numel(), _ROUTES),
            ids.device,
            *(planned, placed.routes, planned.numel(), control.status),
            ROUTES=_ROUTES,
        )
        rows, values, local_ids = block.addresses
        push_rows(x, planned, rows)
        if block.is_flat:
            where = None if weights is None else values
            push_flat_metadata(ids, weights, planned, expert_rank, expert_local, local_ids, where)
        elif weights is not None:
            push_rows(weights.view(-1, 1), planned.view(-1, 1), values)
        zero_rows(control.status, placed.arrived.spans, placed.block)
        _begin_call(control, exchange.pushes, block.pushed)

    def arrive(self, block: StaticBlock) -> None:
        """Waits on the device until all rows are there."""
        self._dispatches.end(block.placed)
        wait_for_ticket(self._exchange.control, self._exchange.pushes.slot, block.pushed)

    # -- combine -------------------------------------------------------------------------------------------------------

    def answered_words(self, block: StaticBlock, num_tokens: int) -> int:
        """See `StaticCalls.answered_words`."""
        return answered_words(block.answered, num_tokens)

    def answered(self, block: StaticBlock, memory: Tensor, num_tokens: int) -> Answered:
        """See `StaticCalls.answered`."""
        return answered_in(block.answered, memory, num_tokens)

    def keep(self, block: StaticBlock, answered: Answered) -> None:
        """Copies what has arrived in a block to what combines want of it."""
        keep_answered(block.answered, answered, self._exchange.control.status)

    def send_rows(
        self,
        y: Tensor,
        answered: Answered,
        *,
        place: int,
        signature: int,
        values: Tensor | None = None,
        values_at: int = 0,
        changed: Tensor | None = None,
    ) -> None:
        """Tells every rank where my rows are, and the numbers beside them; never waits.

        Arguments:
            y: contiguous rows in the order of those that arrived, any dtype; those that no route names are not read.
            answered: what the rows answer.
            place: offset of the rows in my region, a multiple of 16. Where y lies elsewhere, it is copied there.
            signature: as in `announce`.
            values: `[N]` (flat: `[N, K]`) contiguous, of 4 or 8 bytes each; None: none come home.
            values_at: as `place`, for them.
            changed: as in `announce`.

        Raises:
            ValueError: y or values has another shape, or is not contiguous.
            TooManyInFlight: too many calls have begun and are not completed.
        """
        control, readiness = self._exchange.control, self._exchange.readiness
        planes = [("y", y, y.shape[-1] * y.element_size(), place)]
        if values is not None:
            planes.append(("values", values, values[:1].numel() * values.element_size(), values_at))
        for name, plane, row_bytes, at in planes:
            if not plane.is_contiguous() or row_bytes * answered.num_rows != plane.nbytes or at % 16:
                raise ValueError(
                    f"{name} is {list(plane.shape)} with strides {plane.stride()}, its place {at}; wanted "
                    f"{answered.num_rows} rows, a multiple of 16"
                )
        self._combines.begin(answered)
        for _, plane, row_bytes, at in planes:
            target = self._region + at
            if plane.nbytes and plane.data_ptr() != target:
                rows = plane.data_ptr(), row_bytes
                copy_outputs(control, readiness, rows, answered.first_rows, answered.lengths, target)
        send_places(
            *(control, readiness, answered.combined, (place, values_at), self._ready_mailboxes, signature),
            self._unchanged if changed is None else changed,
        )

    def sum_rows(
        self,
        answered: Answered,
        out: Tensor,
        *,
        signature: int,
        topk_weights: Tensor | None = None,
        home: Tensor | None = None,
        topk_idx: Tensor | None = None,
    ) -> None:
        """Waits on the device until all rows are ready, and sums each token's, as `CapturedExchange.sum_rows` does.

        Arguments:
            answered, signature: as given to `send_rows`.
            out: `[T, H]` contiguous, overwritten; H may be 0.
            topk_weights: as there.
            home: `[T, K]` contiguous, overwritten with the number of each route, 0 where there is none; None: none
                come home.
            topk_idx: flat, with `home`: `[T, K]` of the dispatch.
        """
        exchange = self._exchange
        exchange.check_sums((answered.num_tokens, answered.num_topk), out, topk_weights)
        control, outputs = exchange.control, answered.outputs
        find_places(
            *(control, exchange.readiness.slot, answered.combined, self._ready_mailbox, signature),
            *(self._regions, outputs),
        )
        routes = answered.routes[: answered.num_tokens]
        if out.shape[1]:
            rows = Outputs(outputs[0], 0, 16, 0)
            pull_sums(control._replace(num_windows=1), answered.combined, out, routes, rows, topk_weights)
        if home is not None and topk_idx is None:
            pull_values_unless_failed(home, routes, outputs[1], control.status)
        elif home is not None and topk_idx is not None:
            pull_flat_unless_failed(home, topk_idx, routes, exchange.experts[0], outputs[1], control.status)
        _begin_call(control, exchange.releases, answered.released)

    def release(self, answered: Answered) -> None:
        """Waits on the device until everybody has read: rows may change then."""
        self._combines.end(answered)
        wait_for_ticket(self._exchange.control, self._exchange.releases.slot, answered.released)


def _begin_call(control: Control, operation: Operation, ticket: Tensor) -> None:
    launch(
        begin_call_kernel,
        1,
        ticket.device,
        *(
            operation.begun,
            ticket,
            operation.arrivals,
            control.boards,
            operation.slot * control.num_ranks + control.rank,
        ),
        *(control.num_ranks, control.status),
        RANKS=triton.next_power_of_2(control.num_ranks),
        num_warps=1,
    )


def compile_cases() -> list[CompileCase]:
    """The routes; signals."""
    words = dict.fromkeys(("begun", "ticket", "boards", "status", "planned", "routes"), "*i64")
    types = {**words, "arrivals": "*i32", "num_ranks": "i32", "ROUTES": "constexpr", "RANKS": "constexpr"}
    cases = [
        CompileCase(
            name="settle_routes",
            kernel=settle_routes_kernel,
            signature={name: types.get(name, "i64") for name in settle_routes_kernel.arg_names},
            constexprs={"ROUTES": _ROUTES},
        )
    ]
    for ranks in NUMBERS_OF_RANKS:
        cases.append(
            CompileCase(
                name=f"begin_call {ranks} ranks",
                kernel=begin_call_kernel,
                signature={name: types.get(name, "i64") for name in begin_call_kernel.arg_names},
                constexprs={"RANKS": ranks},
                num_warps=1,
                is_listed=ranks in LISTED_RANKS,
            )
        )
    return cases

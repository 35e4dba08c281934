"""Throughput dispatch into fixed blocks that a CUDA graph can hold: counts first, then rows straight to their places.

    T num_tokens   Tmax most of them   K num_topk   E num_experts   E_local experts here   R num_ranks   H hidden

Every block has room for `num_rows` rows, known to all, so nobody is asked for memory: counts alone say where each row
goes at its rank, and whether everything fits. A rank may write to a peer's block as soon as it has the peer's card, for
the peer's stream sends it behind everything that has used the block before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured import CapturedExchange
from moecomm.kernels.triton.captured_announce import NOWHERE, announce, card_bytes, find_bad, plan_announced
from moecomm.kernels.triton.captured_blocks import Placed, make_arrived, make_scratch, signature_of
from moecomm.kernels.triton.captured_calls import InFlight
from moecomm.kernels.triton.captured_combine import wait_for_ticket
from moecomm.kernels.triton.captured_plan import Scratch
from moecomm.kernels.triton.captured_send import end_send
from moecomm.kernels.triton.captured_state import Control, Operation, windows_for
from moecomm.kernels.triton.captured_zeros import Block, zero_rows
from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.counts import IDS, count_by_expert, count_by_rank
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.plans import plan_experts_kernel
from moecomm.kernels.triton.push import push_rows
from moecomm.kernels.triton.runtime import launch, num_blocks

__all__ = ["StaticBatch", "StaticBlock", "StaticDispatch", "compile_cases", "static_mailbox_bytes"]

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
    return windows_for(max_in_flight) * num_ranks * card_bytes(num_experts, num_ranks)


@dataclasses.dataclass
class StaticBlock:
    """Everything that belongs to the rows of one dispatch, until the next into the same block.

    Attributes:
        placed: the rows.
        addresses, values: `[R]` int64, where this block is at each rank; values None: no weights travel.
        announced, pushed: one int64 each: tickets.
        signature: of cards.
        planned: `[Tmax, K]` int64.
        bases: `[E]` int64.
        totals: `[E + R]` int32: my counts.
        scratch: for planning.
    """

    placed: Placed
    addresses: Tensor
    values: Tensor | None
    announced: Tensor
    pushed: Tensor
    signature: int
    planned: Tensor
    bases: Tensor
    totals: Tensor
    scratch: Scratch


class StaticBatch(NamedTuple):
    """What one rank sends: block, rows, ids, weights; and `[B, E]` int32 counts before each block of ids."""

    block: StaticBlock
    rows: Tensor
    ids: Tensor
    weights: Tensor | None
    before: Tensor


@final
class StaticDispatch:
    """Throughput dispatch of one rank in the layout expert_major. `exchange.combine(y, block.placed, out)` answers it.

    Arguments:
        exchange: the rank's; its `check` tells what goes wrong here, too.
        mailboxes: by rank, the address here of that rank's `static_mailbox_bytes`.
    """

    def __init__(self, exchange: CapturedExchange, mailboxes: Sequence[int]) -> None:
        control = exchange.control
        device = control.boards.device
        if len(mailboxes) != control.num_ranks:
            raise ValueError(f"mailboxes has {len(mailboxes)} addresses; there are {control.num_ranks} ranks")
        self._exchange = exchange
        self._calls = InFlight("dispatch", exchange.max_in_flight)
        self._mailboxes = torch.tensor(mailboxes, dtype=torch.int64, device=device)
        self._mailbox = mailboxes[control.rank]
        self._first_bad = torch.full((1,), NOWHERE, dtype=torch.int64, device=device)

    def block(self, form: Form, rows: Sequence[int], values: Sequence[int] | None = None) -> StaticBlock:
        """A place for the rows of a dispatch, at the same time on every rank; made before a graph is captured.

        Arguments:
            form: of the calls that fill it, the same on every rank; `capacity` is 0.
            rows: by rank, the address here of that rank's `[num_rows, H]`, all zero, a multiple of 16.
            values: the same of weights `[num_rows]`; None where none travel.

        Raises:
            ValueError: the form is of a slab, or the addresses are not one for each rank.
        """
        exchange = self._exchange
        max_tokens, num_ranks, num_experts, num_local = exchange.sizes
        rank, device = exchange.control.rank, self._mailboxes.device
        if form.capacity:
            raise ValueError(f"form has slabs of {form.capacity} rows; a static receive is expert_major")
        if (values is None) != (form.value_bytes == 0):
            raise ValueError(f"values is {values}; form has weights of {form.value_bytes} bytes")
        for name, places in (("rows", rows), ("values", values if values is not None else rows)):
            if len(places) != num_ranks or any(place % 16 for place in places):
                raise ValueError(f"{name} is {places}; wanted {num_ranks} addresses, multiples of 16")
        exchange.max_topk = max(exchange.max_topk, form.num_topk)

        def table(addresses: Sequence[int]) -> Tensor:
            return torch.tensor(addresses, dtype=torch.int64, device=device)

        def routes() -> Tensor:
            return torch.full((max_tokens, form.num_topk), -1, dtype=torch.int64, device=device)

        arrived = make_arrived(num_ranks, num_experts, num_local, device)
        block = Block(rows[rank], values[rank] if values else 0, form.row_bytes, form.value_bytes)
        return StaticBlock(
            placed=Placed(
                form, block, arrived._replace(tokens_per_expert=exchange.tokens_per_expert), routes(), table([0])
            ),
            addresses=table(rows),
            values=None if values is None else table(values),
            announced=table([0]),
            pushed=table([0]),
            signature=signature_of(form, max_tokens),
            planned=routes(),
            bases=torch.zeros(num_experts, dtype=torch.int64, device=device),
            totals=torch.zeros(num_experts + num_ranks, dtype=torch.int32, device=device),
            scratch=make_scratch(num_ranks, num_experts, device),
        )

    def dispatch(self, x: Tensor, topk_idx: Tensor, block: StaticBlock, *, topk_weights: Tensor | None = None) -> None:
        """All phases of a dispatch; see `CapturedExchange.send` for the arguments, and for what is in the block then.

        Raises:
            ValueError: an argument has another shape than the block's form says.
            TooManyInFlight: too many calls have begun and are not completed.
        """
        batch = self.announce(x, topk_idx, block, topk_weights=topk_weights)
        self.push(batch)
        self.arrive(block)

    def announce(
        self, x: Tensor, topk_idx: Tensor, block: StaticBlock, *, topk_weights: Tensor | None = None
    ) -> StaticBatch:
        """Counts, and tells every rank; never waits. x, topk_idx and topk_weights must not change until `arrive`."""
        exchange, placed = self._exchange, block.placed
        exchange.check_batch(x, topk_idx, placed.form, topk_weights)
        self._calls.begin(placed)
        placed.num_tokens = topk_idx.shape[0]
        expert_rank, _ = exchange.experts
        num_experts, num_ranks = expert_rank.numel(), exchange.control.num_ranks
        before = count_by_expert(topk_idx, num_experts, block.totals[:num_experts]).before
        count_by_rank(topk_idx, expert_rank, num_ranks, block.totals[num_experts:])
        find_bad(topk_idx, num_experts, self._first_bad)
        announce(
            *(exchange.control, exchange.announcements, block.announced, block.totals, topk_idx, self._first_bad),
            *(self._mailboxes, block.signature),
        )
        return StaticBatch(block, x, topk_idx, topk_weights, before)

    def push(self, batch: StaticBatch) -> None:
        """Waits on the device for all counts, plans, and writes every row to its place."""
        exchange, (block, x, ids, weights, before) = self._exchange, batch
        control, placed, num_tokens = exchange.control, block.placed, ids.shape[0]
        plan_announced(
            *(control, exchange.announcements.slot, block.announced, self._mailbox, block.signature),
            *(exchange.experts, placed.form, block.bases, block.scratch, placed.arrived),
        )
        planned, device = block.planned[:num_tokens], ids.device
        expert_rank, _ = exchange.experts
        launch(
            plan_experts_kernel,
            before.shape[0],
            device,
            *(ids, ids.numel(), expert_rank, expert_rank.numel(), block.bases, before, planned),
            IDS=IDS,
        )
        launch(
            settle_routes_kernel,
            num_blocks(planned.numel(), _ROUTES),
            device,
            *(planned, placed.routes, planned.numel(), control.status),
            ROUTES=_ROUTES,
        )
        push_rows(x, planned, block.addresses)
        if weights is not None and block.values is not None:
            push_rows(weights.view(-1, 1), planned.view(-1, 1), block.values)
        zero_rows(control.status, placed.arrived.spans, placed.block)
        _begin_call(control, exchange.pushes, block.pushed)

    def arrive(self, block: StaticBlock) -> None:
        """Waits on the device until all rows are there."""
        self._calls.end(block.placed)
        wait_for_ticket(self._exchange.control, self._exchange.pushes.slot, block.pushed)


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
    """The routes; signals to some ranks and to many."""
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
    for ranks in (8, 128):
        cases.append(
            CompileCase(
                name=f"begin_call {ranks} ranks",
                kernel=begin_call_kernel,
                signature={name: types.get(name, "i64") for name in begin_call_kernel.arg_names},
                constexprs={"RANKS": ranks},
                num_warps=1,
            )
        )
    return cases

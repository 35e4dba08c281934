"""A low-latency dispatch and combine between virtual ranks, each with a stream of its own on one device.

T tokens of a rank   K num_topk   H hidden   E experts   R ranks

The floor is one signal round trip between two streams (dispatch's hop and combine's), measured here with the same
signal and wait kernels, and the bytes that an exchange cannot do without at the rate of a device copy. Three forms:

    as a graph      calls that a CUDA graph holds, one graph per rank, replayed: ids and counts stay on the device
    as called       send_eager, receive_eager into slabs, combine_rows: what a call does today, the host's waits for
                    ids and counts included
    rows, signals   the same rows through windows to slabs and home, and the same signals, with all routes known: what
                    is left when the host no longer waits

Of the last two no kernel that waits has more than one program, and the others never wait: so all that a wait depends on
can run beside it however many ranks there are. A graph waits in its middle, so each rank's stream needs a hardware
queue of its own (`CUDA_DEVICE_MAX_CONNECTIONS`, which run.py sets).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from answers import poisoned, wrong_bits
from context import Context
from graphs import GraphPairs
from report import compared
from sizes import low_latency_bytes
from timing import Timing
from torch import Tensor

from moecomm.kernels.eager import Form, Home, Sorted, message_bytes
from moecomm.kernels.triton.eager import TritonEagerKernels
from moecomm.kernels.triton.eager_messages import row_sources
from moecomm.kernels.triton.plans import plan_by_expert, plan_by_rank
from moecomm.kernels.triton.push import push_address_rows, push_rows
from moecomm.kernels.triton.rows import TritonRowKernels
from moecomm.kernels.triton.signals import make_status, raise_if_behind, signal, signal_all, wait
from moecomm.placement import Placement
from moecomm.testing import uniform

__all__ = ["Exchange", "round_trip", "run"]

_TIMEOUT_NS = 5_000_000_000
_DISPATCH, _COMBINE = 0, 1  # slots


def round_trip(context: Context) -> Timing:
    """From one stream to another and back: a signal, a wait, a signal, a wait, each a kernel."""
    rounds = context.sizes.signal_rounds
    boards = torch.zeros(2, 2, dtype=torch.int64, device=context.device)
    # Each waits for its peer alone: its own lane is ready for ever.
    boards.fill_diagonal_(1 << 60)
    table = boards.data_ptr() + torch.arange(2, device=context.device) * 16
    places = table.tolist()
    status = [make_status(2, context.device) for _ in range(2)]
    seen = 0

    def step() -> None:
        nonlocal seen

        def ping(rank: int) -> None:
            if rank == 0:
                signal(table, 0, 0, peer=1)

        def pong(count: int, rank: int) -> None:
            if rank == 1:
                wait(places[1], 0, count, status=status[1], timeout_ns=_TIMEOUT_NS)
                signal(table, 1, 0, peer=0)

        def back(count: int, rank: int) -> None:
            if rank == 0:
                wait(places[0], 0, count, status=status[0], timeout_ns=_TIMEOUT_NS)

        phases: list[Callable[[int], object]] = []
        for _ in range(rounds):
            seen += 1
            phases += [ping, partial(pong, seen), partial(back, seen)]
        context.timer.on_streams(phases, 2)

    timing = context.timer.measure(step, seconds=context.case_seconds)
    for each in status:
        raise_if_behind(each, "signal round trip")
    return Timing(timing.median_us / rounds, timing.p90_us / rounds, timing.repetitions)


@dataclass
class _Windows:
    """Messages, `[R, R, bytes]`: of each destination, by source."""

    memory: Tensor
    value_offset: int  # where rows begin in a message without weights

    def of_source(self, rank: int) -> list[int]:
        return [self.memory[peer, rank].data_ptr() for peer in range(self.memory.shape[0])]

    def at(self, rank: int) -> list[int]:
        return [self.memory[rank, peer].data_ptr() for peer in range(self.memory.shape[0])]


class Exchange:
    """All that the ranks keep between calls, and the phases of a pair in its two forms."""

    def __init__(self, context: Context) -> None:
        sizes, model, device = context.sizes, context.sizes.exchange, context.device
        self.context, self.num_ranks, self.tokens = context, sizes.num_ranks, sizes.decode_tokens
        everyone = range(self.num_ranks)
        placement = Placement(model.num_experts, self.num_ranks)
        self.expert_rank = placement.expert_rank.to(device)
        generator = torch.Generator(device).manual_seed(context.seed)
        shape = (self.tokens, model.hidden)
        self.x = [torch.randn(shape, generator=generator, device=device).bfloat16() for _ in everyone]
        self.ids = [
            uniform(self.tokens, model.num_experts, model.num_topk, seed=context.seed + rank).to(device, torch.int32)
            for rank in everyone
        ]
        weights = (self.tokens, model.num_topk)
        self.weights = [torch.randn(weights, generator=generator, device=device) for _ in everyone]
        self.out = [poisoned(*shape, dtype=torch.bfloat16, device=device) for _ in everyone]
        self.row_bytes = model.hidden * 2
        num_bytes = -(-message_bytes(self.tokens, model.num_topk, self.row_bytes, 0) // 64) * 64
        ids_bytes = message_bytes(self.tokens, model.num_topk, 0, 0)
        self.windows = _Windows(
            poisoned(self.num_ranks, self.num_ranks, num_bytes, dtype=torch.uint8, device=device), ids_bytes
        )
        self.capacity = self.num_ranks * self.tokens
        self.num_local = [len(placement.local_experts(rank)) for rank in everyone]
        self.slabs = [
            torch.zeros(local * self.capacity, model.hidden, dtype=torch.bfloat16, device=device)
            for local in self.num_local
        ]
        self.slab_table = torch.tensor([slab.data_ptr() for slab in self.slabs], device=device)
        self.form = Form(model.num_topk, self.row_bytes, 0, self.capacity, 1, self.capacity)
        expert_local = placement.expert_local.to(device)
        self.homes = [
            Home(rank, self.expert_rank, expert_local, torch.zeros(local, dtype=torch.int64, device=device))
            for rank, local in zip(everyone, self.num_local, strict=True)
        ]
        self.used = [torch.zeros(max(1, local), dtype=torch.int64, device=device) for local in self.num_local]
        self.sorted: dict[int, Sorted] = {}
        boards = torch.zeros(self.num_ranks, 2, self.num_ranks, dtype=torch.int64, device=device)
        self.boards = boards.data_ptr() + torch.arange(self.num_ranks, device=device) * (2 * self.num_ranks * 8)
        self.places = self.boards.tolist()
        self.memory_of_boards = boards
        self.status = [make_status(self.num_ranks, device) for _ in everyone]
        self.num_calls = 0
        self.eager, self.rows = TritonEagerKernels(), TritonRowKernels()
        self._plan(expert_local)

    def _plan(self, expert_local: Tensor) -> None:
        """Routes of the second form: into windows, from windows into slabs."""
        device, everyone = self.context.device, range(self.num_ranks)
        nothing = torch.zeros(self.num_ranks, dtype=torch.int64, device=device)
        self.to_windows = [plan_by_rank(ids, self.expert_rank, nothing) for ids in self.ids]
        ids = torch.cat(self.ids)
        bounds = torch.arange(self.num_ranks + 1, device=device) * self.tokens
        routes = plan_by_expert(ids, self.expert_rank, expert_local.long() * self.capacity)
        self.to_slabs = [torch.where(routes >> 40 == rank, routes, -1) for rank in everyone]
        self.home_routes = list(routes.view(self.num_ranks, self.tokens, -1).unbind(0))
        self.window_tables, self.sources = [], []
        for rank in everyone:
            rows = torch.tensor(self.windows.of_source(rank), device=device) + self.windows.value_offset
            self.window_tables.append(rows)
            first = torch.tensor(self.windows.at(rank), device=device) + self.windows.value_offset
            self.sources.append(row_sources(ids, bounds, self.expert_rank, rank, first, self.row_bytes))

    def call(self) -> None:
        """A pair as the kernels of low-latency mode make it."""
        self.num_calls += 1
        self.context.timer.on_streams([self._send, self._receive, self._combine], self.num_ranks)

    def move(self) -> None:
        """The same rows and signals, routes known."""
        self.num_calls += 1
        self.context.timer.on_streams([self._push, self._sort, self._reduce], self.num_ranks)

    def wrong(self) -> int:
        """Elements of the result that are not the weighted sum of a token's own row; poisons them for the next."""
        for rank, status in enumerate(self.status):
            raise_if_behind(status, f"low-latency pair, rank {rank}")
        wrong = 0
        for out, x, weights in zip(self.out, self.x, self.weights, strict=True):
            total = torch.zeros_like(x, dtype=torch.float32)
            for weight in weights.unbind(1):
                total += weight[:, None] * x.float()
            wrong += wrong_bits(out, total.to(out.dtype))
            out.fill_(torch.nan)
        return wrong

    def _wait(self, slot: int, rank: int) -> None:
        wait(self.places[rank], slot, self.num_calls, status=self.status[rank], timeout_ns=_TIMEOUT_NS)

    def _send(self, rank: int) -> None:
        self.eager.send_eager(self.x[rank], self.ids[rank], None, self.expert_rank, self.windows.of_source(rank))
        signal_all(self.boards, rank, _DISPATCH)

    def _receive(self, rank: int) -> None:
        self._wait(_DISPATCH, rank)
        tokens = [self.tokens] * self.num_ranks
        rows = self.slabs[rank].data_ptr()
        self.sorted[rank] = self.eager.receive_eager(
            self.homes[rank], self.form, self.windows.at(rank), tokens, rows, 0, self.used[rank]
        )
        signal_all(self.boards, rank, _COMBINE)

    def _combine(self, rank: int) -> None:
        self._wait(_COMBINE, rank)
        routes = self.sorted[rank].routes
        self.rows.combine_rows(self.out[rank], routes, self.slab_table, weights=self.weights[rank])

    def _push(self, rank: int) -> None:
        push_rows(self.x[rank], self.to_windows[rank], self.window_tables[rank])
        signal_all(self.boards, rank, _DISPATCH)

    def _sort(self, rank: int) -> None:
        self._wait(_DISPATCH, rank)
        push_address_rows(self.sources[rank], 16, self.row_bytes, self.to_slabs[rank], self.slab_table)
        signal_all(self.boards, rank, _COMBINE)

    def _reduce(self, rank: int) -> None:
        self._wait(_COMBINE, rank)
        self.rows.combine_rows(self.out[rank], self.home_routes[rank], self.slab_table, weights=self.weights[rank])


def run(context: Context) -> None:
    """The signal, then the pair in both forms over the floor."""
    sizes, model, seconds = context.sizes, context.sizes.exchange, context.case_seconds
    shape = f"{sizes.num_ranks} x {sizes.decode_tokens} x {model.hidden} bf16, top-{model.num_topk}"

    def case() -> None:
        trip = round_trip(context)
        context.add(compared(context.part, "signal round trip", "2 streams, kernel to kernel", trip))
        tokens = sizes.num_ranks * sizes.decode_tokens
        num_bytes = low_latency_bytes(tokens, tokens * model.num_topk, model.hidden * 2)
        copy = context.timer.copy(num_bytes, seconds=seconds)

        def measure(what: str, step: Callable[[], None], wrong_elements: Callable[[], int], *, waits: bool) -> None:
            step()
            wrong = wrong_elements()
            timing = context.timer.measure(step, seconds=seconds, waits=waits)
            wrong += wrong_elements()
            context.add(
                compared(
                    context.part,
                    what,
                    shape,
                    timing,
                    bound=f"round trip + bytes at copy rate ({trip.median_us:.1f} + {copy.median_us:.1f} us)",
                    bound_us=trip.median_us + copy.median_us,
                    goal=2.0,
                    goal_is="at most",
                    num_bytes=num_bytes,
                    wrong=wrong,
                )
            )

        def graphs() -> None:
            pairs = GraphPairs(context)
            pairs.capture()
            measure("pair, as a graph", pairs.step, pairs.wrong, waits=False)

        context.attempt("pair, as a graph", shape, graphs)
        exchange = Exchange(context)
        for what, step, waits in (
            ("pair, as called", exchange.call, True),
            ("pair, rows and signals", exchange.move, False),
        ):
            for slab in exchange.slabs:
                slab.fill_(torch.nan)
            measure(what, step, exchange.wrong, waits=waits)

    context.attempt("pair", shape, case)

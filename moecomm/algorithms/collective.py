"""Algorithm `collective`: the same exchange through `torch.distributed` all-to-all. Baseline, last resort, and a second
opinion in tests; needs no shared memory.

One all-gather of cards, counts and refusals, then one all-to-all per plane of rows. Everything happens when the call is
waited for, in the order of the calls, since collectives must come in the same order on every rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from moecomm.algorithms import reports
from moecomm.algorithms.base import Arrival, Returned, Session
from moecomm.algorithms.calls import Call, Phase
from moecomm.algorithms.collective_mode import CollectiveMode
from moecomm.algorithms.collective_rows import RowExchange, as_bytes, join_planes
from moecomm.algorithms.eager_sizes import EagerSizes
from moecomm.algorithms.per_domain import reduce_per_domain
from moecomm.algorithms.plan import block_layout, plan_exchange
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation, describe, words_of
from moecomm.codecs.base import RowFormat
from moecomm.devices.registry import find_device
from moecomm.errors import (
    CallMismatch,
    CommunicatorClosed,
    MemoryLimitExceeded,
    PeerFailed,
    TransportError,
    TransportUnavailable,
)
from moecomm.groups import Group, TorchGroup
from moecomm.placement import Placement

__all__ = ["Collective"]

_CARD_WORDS = 14
_TEXT_BYTES = 960
_REMEDY = "Construct the Communicator with a torch.distributed group of backend 'gloo' (or 'cpu:gloo,...')."


_PHASES = (Phase("exchange", None, lambda exchange: exchange()),)


class Collective(Session):
    """The exchange over a `torch.distributed` group, with that group's timeout. Construction and calls are collective.

    Arguments:
        group: a TorchGroup whose backend carries CPU tensors.
        placement: which rank hosts which expert.
        sizes: fixed shapes of low-latency calls, which are the same exchange here.
        max_in_flight: calls that may be begun and not waited for.
        memory_limit: bytes that one dispatch may bring to this rank.
    """

    name: ClassVar[str] = "collective"
    device = find_device(None)

    def __init__(
        self, group: Group, placement: Placement, sizes: EagerSizes, *, max_in_flight: int, memory_limit: int
    ) -> None:
        reason = self.refusal(group)
        if reason is not None:
            raise TransportUnavailable(self.name, reason, _REMEDY)
        assert isinstance(group, TorchGroup)
        self.algorithms = {"throughput": CollectiveMode(self, None), "low_latency": CollectiveMode(self, sizes)}
        self.tokens_per_expert = torch.zeros(len(placement.local_experts(group.rank)), dtype=torch.int64)
        self._group = group
        self._placement = placement
        self.kernels = self.device.row_kernels()
        self._max_in_flight = max_in_flight
        self._memory_limits: list[int] = group.all_gather(memory_limit)
        self._outstanding: deque[Call] = deque()
        self._next_sequence = 0
        self._num_announcements = 0
        self._num_counts = placement.num_experts + placement.num_ranks

    @staticmethod
    def refusal(group: Group) -> str | None:
        """Why this group cannot be used, or None."""
        if not isinstance(group, TorchGroup):
            return f"it needs a torch.distributed process group, this is a group of kind {group.name!r}."
        backends = str(dist.get_backend_config(group.process_group))
        if "gloo" not in backends and "mpi" not in backends:
            return f"the process group's backend {backends} does not carry CPU tensors."
        return None

    def begin_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> Call:
        operation = Operation.DISPATCH if routing.routes is None else Operation.CACHED_DISPATCH
        call = Call(operation, words_of(routing, row_format, topk_weights), _PHASES, recording=routing.recording)
        return self._begin(call, lambda: self._dispatch(call, x, routing, row_format, topk_weights))

    def begin_combine(
        self,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        per_host: bool,
    ) -> Call:
        words = words_of(routing, row_format, values, weighted=topk_weights is not None, per_host=per_host)
        call = Call(Operation.COMBINE, words, _PHASES, recording=routing.recording)
        return self._begin(call, lambda: self._combine(call, y, routing, row_format, topk_weights, values, per_host))

    def _begin(self, call: Call, exchange: Callable[[], None]) -> Call:
        self.check_room(call.operation)
        call.sequence = self._next_sequence
        self._next_sequence += 1
        call.job = exchange
        self._outstanding.append(call)
        return call

    def check_room(self, operation: Operation) -> None:
        if len(self._outstanding) >= self._max_in_flight:
            title, in_flight = f"{operation.title} #{self._next_sequence}", tuple(self._outstanding)
            raise reports.too_many(title, in_flight, len(in_flight), self._max_in_flight)

    def make_room(self) -> None:
        while len(self._outstanding) >= self._max_in_flight:
            self._run_oldest()

    def refuse(self, operation: Operation, error: Exception) -> None:
        while self._outstanding:
            self._run_oldest()
        self._next_sequence += 1
        self._gather_cards(np.zeros(_CARD_WORDS, dtype=np.int64), np.zeros(self._num_counts, dtype=np.int32), error)

    def finish(self, call: Call) -> Any:
        while not call.settled:
            self._run_oldest()
        return call.outcome()

    def step(self, call: Call) -> None:
        if not call.settled:
            self._run_oldest()

    def poll(self, call: Call) -> bool:
        return call.settled

    def _run_oldest(self) -> None:
        call = self._outstanding.popleft()
        try:
            call.phases[0].run(call.job)
        except RuntimeError as error:
            # What the process group reports when a peer is gone or too late.
            call.fail(TransportError(f"{call.title}: {error}", operation=call.title, peers=()))
        except Exception as error:  # noqa: BLE001 - kept for whoever waits for the call
            call.fail(error)
        except BaseException:
            call.error = TransportError(f"{call.title} was interrupted", operation=call.title, peers=())
            call.settle()
            raise
        call.settle()

    # -- the exchange ------------------------------------------------------------------------------------------------

    def _gather_cards(
        self, card: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], error: Exception | None
    ) -> np.ndarray[Any, Any]:
        """`[R, bytes]`: everybody's card, counts, and reason for refusing."""
        text = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:_TEXT_BYTES]
        mine = np.zeros(_CARD_WORDS * 8 + _TEXT_BYTES + self._num_counts * 4, dtype=np.uint8)
        mine[: _CARD_WORDS * 8].view(np.int64)[:] = card
        mine[_CARD_WORDS * 8 :][: len(text)] = np.frombuffer(text, dtype=np.uint8)
        mine[_CARD_WORDS * 8 + _TEXT_BYTES :].view(np.int32)[:] = counts
        everybody = torch.empty((self._group.size, mine.size), dtype=torch.uint8)
        dist.all_gather(list(everybody.unbind()), torch.from_numpy(mine), group=self._group.process_group)
        return everybody.numpy()

    def _agree(self, call: Call, counts: np.ndarray[Any, Any], need: int) -> np.ndarray[Any, Any]:
        """Compares the call with everybody's; gives `[R, E + R]` int32 counts."""
        card = np.array((call.sequence, call.operation, *call.words, need, call.recording), dtype=np.int64)
        card = np.pad(card, (0, _CARD_WORDS - card.size))
        everybody = self._gather_cards(card, counts, None)
        for rank, message in enumerate(everybody):
            text = message[_CARD_WORDS * 8 :][:_TEXT_BYTES].tobytes().rstrip(b"\0").decode(errors="replace")
            if text:
                reason = f"{call.title}: rank {rank} gave up: {text}"
                raise PeerFailed(reason, operation=call.title, peers=(rank,))
            theirs = message[: _CARD_WORDS * 8].view(np.int64)
            call.recorded |= bool(theirs[12])
            if (theirs[:11] != card[:11]).any():
                raise CallMismatch(
                    f"call #{call.sequence} differs between ranks: rank {self._group.rank} calls "
                    f"{describe(call.operation, call.words)}, rank {rank} calls "
                    f"{describe(int(theirs[1]), tuple(theirs[2:11].tolist()))}; every rank must make the "
                    "same calls in the same order",
                    operation=call.title,
                    peers=(rank,),
                )
        return np.ascontiguousarray(everybody[:, _CARD_WORDS * 8 + _TEXT_BYTES :]).view(np.int32)

    def _complete(self, call: Call, routing: Routing) -> Routing:
        """Exchanges the counts, unless they are known, and routes."""
        counts = np.zeros(self._num_counts, dtype=np.int32)
        if routing.counts is not None:
            self._agree(call, counts, 0)
            return routing
        placement = self._placement
        try:
            fingerprint = self.count_routes(routing.topk_idx, placement, torch.from_numpy(counts))
        except ValueError as error:
            self._gather_cards(np.zeros(_CARD_WORDS, dtype=np.int64), counts, error)
            raise
        everybody = self._agree(call, counts, 0)
        self._num_announcements += 1
        form = (routing.layout, routing.expert_alignment, routing.capacity)
        try:
            plan = plan_exchange(everybody, placement, self._group.rank, *form, routing.mode)
        except ValueError as error:
            raise type(error)(f"{call.title}: {error}") from None
        flat = routing.layout == "flat"
        plan_routes = self.kernels.plan_flat if flat else self.kernels.plan_expert_major
        return Routing(
            topk_idx=routing.topk_idx.to(torch.int32, copy=True),
            layout=routing.layout,
            expert_alignment=routing.expert_alignment,
            routes=plan_routes(routing.topk_idx, placement.expert_rank, torch.from_numpy(plan.bases)),
            counts=torch.from_numpy(everybody),
            capacity=routing.capacity,
            origin=call.sequence,
            fingerprint=fingerprint,
            mode=routing.mode,
        )

    def _rows(self, routing: Routing) -> RowExchange:
        assert routing.routes is not None and routing.counts is not None  # noqa: PT018
        return RowExchange(
            self._group,
            routing.routes,
            routing.counts.numpy(),
            self._placement,
            self._group.rank,
            routing.layout,
            routing.expert_alignment,
            routing.capacity,
        )

    def _dispatch(
        self,
        call: Call,
        x: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        topk_weights: torch.Tensor | None,
    ) -> None:
        routing = self._complete(call, routing)
        assert routing.counts is not None
        plan = plan_exchange(
            routing.counts.numpy(),
            self._placement,
            self._group.rank,
            routing.layout,
            routing.expert_alignment,
            routing.capacity,
        )
        self._check_memory(call, plan.rows_per_rank, row_format)
        rows = self._rows(routing)
        planes = [rows.send(as_bytes(plane)[rows.tokens()]) for plane in row_format.encode(x)]
        buffer, offsets = join_planes(planes, rows.num_rows)
        weights, local_idx = self._send_metadata(rows, routing, topk_weights)
        self.count_tokens(plan.num_tokens_per_expert)
        call.result = Arrival(
            x=row_format.decode(buffer, offsets, rows.num_rows),
            topk_weights=weights,
            topk_idx=local_idx,
            num_tokens_per_expert=torch.from_numpy(plan.num_tokens_per_expert),
            offsets=None if routing.layout == "slab" else torch.from_numpy(plan.offsets),
            routing=routing,
        )

    def _send_metadata(
        self, rows: RowExchange, routing: Routing, topk_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The weights that arrive, and (flat) the local expert ids."""
        if routing.layout != "flat":
            if topk_weights is None:
                return None, None
            sent = as_bytes(topk_weights.reshape(-1, 1))[rows.slots()]
            return rows.send(sent).view(topk_weights.dtype).reshape(-1), None
        chosen = routing.topk_idx[rows.tokens()].long()
        there = (chosen >= 0) & (self._placement.expert_rank[chosen] == rows.destinations()[:, None])
        local = torch.where(there, self._placement.expert_local[chosen], -1)
        local_idx = rows.send(as_bytes(local), blank=0xFF).view(torch.int32)
        if topk_weights is None:
            return None, local_idx
        kept = torch.where(there, topk_weights[rows.tokens()], 0)
        return rows.send(as_bytes(kept)).view(topk_weights.dtype), local_idx

    def _combine(
        self,
        call: Call,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        per_host: bool,
    ) -> None:
        self._agree(call, np.zeros(self._num_counts, dtype=np.int32), 0)
        rows = self._rows(routing)
        home = [rows.send_back(as_bytes(plane)) for plane in row_format.encode(y.flatten(0, -2))]
        addresses = [[plane.data_ptr() + first * plane.shape[1] for first in rows.first_home()] for plane in home]
        if per_host:
            out = reduce_per_domain(row_format, rows.home_routes, addresses, topk_weights, self.topology)
        else:
            num_tokens = routing.topk_idx.shape[0]
            out = row_format.reduce(num_tokens, rows.home_routes, addresses, topk_weights)
        returned = None
        if values is not None:
            back = rows.send_back(as_bytes(values.reshape(rows.num_rows, math.prod(values.shape[1:])))).view(
                values.dtype
            )
            returned = self._place_values(rows, routing, back)
        call.result = Returned(out, returned)

    def _place_values(self, rows: RowExchange, routing: Routing, back: torch.Tensor) -> torch.Tensor:
        """`[T, K]`: the values that came back, each at its route."""
        out = back.new_zeros(routing.topk_idx.shape)
        if routing.layout != "flat":
            out.reshape(-1)[rows.slots()] = back.reshape(-1)
            return out
        chosen = routing.topk_idx[rows.tokens()].long()
        there = (chosen >= 0) & (self._placement.expert_rank[chosen] == rows.destinations()[:, None])
        return out.index_add(0, rows.tokens(), torch.where(there, back, 0))

    def _check_memory(self, call: Call, rows_per_rank: list[int], row_format: RowFormat) -> None:
        for rank, (num_rows, limit) in enumerate(zip(rows_per_rank, self._memory_limits, strict=True)):
            need = block_layout(num_rows, row_format.plane_bytes).nbytes
            if need > limit:
                raise MemoryLimitExceeded(
                    f"{call.title}: rank {rank} needs {need} bytes of receive memory, more than its memory_limit of "
                    f"{limit} bytes; nothing was received. Use smaller batches or a smaller capacity, or give the "
                    "Communicator a larger memory_limit"
                )

    # -- the rest of the contract --------------------------------------------------------------------------------------

    def waiting_times(self) -> tuple[list[float], list[float]]:
        return [0.0] * self._group.size, [0.0] * self._group.size

    def distrust(self, x: torch.Tensor) -> None:
        """Nothing is remembered of memory."""

    def expose(self, num_rows: int, row_format: RowFormat, *, is_fixed: bool) -> torch.Tensor:
        return torch.empty((num_rows, row_format.hidden), dtype=row_format.dtype)

    def statistics(self) -> dict[str, int]:
        return {
            "calls": self._next_sequence,
            "announcements": self._num_announcements,
            "memory_limit": self._memory_limits[self._group.rank],
        }

    def trim(self) -> int:
        return 0

    def close(self) -> None:
        while self._outstanding:
            call = self._outstanding.popleft()
            call.fail(CommunicatorClosed(f"{call.title} was in flight when the communicator was closed"))
            call.settle()

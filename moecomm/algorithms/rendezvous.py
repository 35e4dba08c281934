"""Algorithm `rendezvous` (throughput): sizes first, then each row is written once, straight to its final place.

dispatch   announce  my counts go to every peer
           grant     all counts known: set receive memory aside and tell the peers where
           push      all places known: write my rows there, in source order
           arrive    everybody has written: the rows are views of receive memory
dispatch with a handle: the first two are one, for no counts are exchanged
combine    ready     say where the experts' rows are (they stay where they are if peers can read them there)
           pull      everybody is ready: read my tokens' rows and sum them
           release   everybody has read: the rows may change again
"""

from __future__ import annotations

from typing import Any

import torch

from moecomm.algorithms.base import Algorithm
from moecomm.algorithms.calls import NUM_LANES, Call
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.mailbox import Mailbox
from moecomm.algorithms.receive_memory import ReceiveMemory
from moecomm.algorithms.rendezvous_combine import Combine
from moecomm.algorithms.rendezvous_dispatch import Dispatch
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.sequencer import Sequencer
from moecomm.algorithms.signature import Operation
from moecomm.codecs.base import RowFormat
from moecomm.kernels.registry import kernels_for
from moecomm.placement import Placement
from moecomm.transports.base import Transport

__all__ = ["Rendezvous"]


class Rendezvous(Algorithm):
    """The throughput exchange over a transport whose peers' memory can be addressed. Construction is collective.

    Arguments:
        transport: reaches the peers; must offer `num_slots` counters.
        placement: which rank hosts which expert.
        max_in_flight: calls that may be begun and not waited for.
        memory_limit: bytes of receive memory alive at once; may differ between ranks.
        timeout: seconds that one wait may last.
    """

    name = "rendezvous"
    num_slots = NUM_LANES

    def __init__(
        self, transport: Transport, placement: Placement, *, max_in_flight: int, memory_limit: int, timeout: float
    ) -> None:
        if not transport.capabilities.addressable:
            raise ValueError(f"transport: rendezvous needs addressable peers, {transport.name} has none")
        num_counts = placement.num_experts + placement.num_ranks
        mailbox = Mailbox(transport, num_counts, num_slots=2 * max_in_flight)
        self._transport = transport
        self._memory = ReceiveMemory(transport, memory_limit, max(transport.group.all_gather(memory_limit)))
        self._sequencer = Sequencer(transport, mailbox, max_in_flight, timeout)
        self._exchange = Exchange(transport, kernels_for("cpu"), placement, mailbox, self._memory, self._sequencer)

    def begin_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> Call:
        return self._begin(Dispatch(self._exchange, x, routing, row_format, topk_weights).call)

    def begin_combine(
        self,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
    ) -> Call:
        combine = Combine(self._exchange, y, routing, row_format, topk_weights=topk_weights, values=values)
        return self._begin(combine.call)

    def _begin(self, call: Call) -> Call:
        self._sequencer.begin(call)
        return call

    def refuse(self, operation: Operation, error: Exception) -> None:
        self._sequencer.refuse(operation, error)

    def make_room(self) -> None:
        self._sequencer.make_room()

    def finish(self, call: Call) -> Any:
        return self._sequencer.finish(call)

    def step(self, call: Call) -> None:
        self._sequencer.step(call)

    def poll(self, call: Call) -> bool:
        return self._sequencer.poll(call)

    def expose(self, num_rows: int, row_format: RowFormat) -> torch.Tensor:
        nbytes = num_rows * row_format.row_bytes
        self._sequencer.release_quarantine()
        block = self._memory.allocate(nbytes)
        if block is None:
            me = self._transport.describe_peer(self._transport.rank)
            raise self._memory.exceeded("combine_buffer", me, nbytes, self._memory.limit)
        return row_format.decode(block, (0,), num_rows)

    def statistics(self) -> dict[str, int]:
        usage = self._memory.usage()
        return {
            "announcements": self._sequencer.num_cards_with_counts,
            "receive_bytes_alive": usage.live_bytes,
            "receive_bytes_peak": usage.peak_bytes,
            "receive_bytes_touched": usage.high_water,
            "receive_blocks_alive": usage.live_blocks,
            "memory_limit": usage.limit,
        }

    def trim(self) -> int:
        self._sequencer.release_quarantine()
        return self._memory.trim()

    def close(self) -> None:
        self._transport.close()

"""The session over a transport whose peers' memory can be addressed: what its algorithms and their calls share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moecomm.algorithms.base import Algorithm, Session
from moecomm.algorithms.calls import Call
from moecomm.algorithms.mailbox import Mailbox
from moecomm.algorithms.receive_memory import ReceiveMemory
from moecomm.algorithms.sequencer import Sequencer
from moecomm.algorithms.signature import Operation
from moecomm.codecs.base import RowFormat
from moecomm.errors import MemoryLimitExceeded
from moecomm.kernels.registry import kernels_for
from moecomm.placement import Placement
from moecomm.transports.base import Transport

__all__ = ["Exchange"]


class Exchange(Session):
    """The calls of one communicator on one rank. Construction is collective.

    Arguments:
        transport: reaches the peers; must offer `NUM_LANES` counters.
        placement: which rank hosts which expert.
        max_in_flight: calls that may be begun and not waited for.
        memory_limit: bytes of receive memory alive at once; may differ between ranks.
        timeout: seconds that one wait may last.
    """

    def __init__(
        self, transport: Transport, placement: Placement, *, max_in_flight: int, memory_limit: int, timeout: float
    ) -> None:
        if not transport.capabilities.addressable:
            raise ValueError(f"transport: {transport.name} cannot address its peers' memory")
        self.transport = transport
        self.placement = placement
        self.kernels = kernels_for("cpu")
        self.rank = transport.rank
        num_counts = placement.num_experts + placement.num_ranks
        self.mailbox = Mailbox(transport, num_counts, num_slots=2 * max_in_flight)
        self.memory = ReceiveMemory(transport, memory_limit, max(transport.group.all_gather(memory_limit)))
        self.sequencer = Sequencer(transport, self.mailbox, max_in_flight, timeout)
        self.algorithms: Mapping[str, Algorithm] = {}
        """Set by whoever makes them: they need the session first."""

    # -- for the algorithms ------------------------------------------------------------------------------------------

    def bases(self) -> list[int]:
        """Where everybody's receive memory begins in my address space, by rank."""
        bases = []
        for rank in range(self.transport.num_ranks):
            address = self.transport.peer(self.memory.region, rank)
            assert address is not None, "peers are addressable"
            bases.append(address)
        return bases

    def exceeded(self, call: Call, rank: int, need: int, limit: int) -> MemoryLimitExceeded:
        """The error that all ranks raise when `rank` lacks memory."""
        return self.memory.exceeded(call.title, self.transport.describe_peer(rank), need, limit)

    def begin(self, call: Call) -> Call:
        """Numbers a call and runs its first phase."""
        self.sequencer.begin(call)
        return call

    # -- for the communicator ----------------------------------------------------------------------------------------

    def refuse(self, operation: Operation, error: Exception) -> None:
        self.sequencer.refuse(operation, error)

    def make_room(self) -> None:
        self.sequencer.make_room()

    def finish(self, call: Call) -> Any:
        return self.sequencer.finish(call)

    def step(self, call: Call) -> None:
        self.sequencer.step(call)

    def poll(self, call: Call) -> bool:
        return self.sequencer.poll(call)

    def expose(self, num_rows: int, row_format: RowFormat) -> torch.Tensor:
        nbytes = num_rows * row_format.row_bytes
        self.sequencer.release_quarantine()
        block = self.memory.allocate(nbytes)
        if block is None:
            raise self.memory.exceeded(
                "combine_buffer", self.transport.describe_peer(self.rank), nbytes, self.memory.limit
            )
        return row_format.decode(block, (0,), num_rows)

    def statistics(self) -> dict[str, int]:
        usage = self.memory.usage()
        return {
            "announcements": self.sequencer.num_cards_with_counts,
            "receive_bytes_alive": usage.live_bytes,
            "receive_bytes_peak": usage.peak_bytes,
            "receive_bytes_touched": usage.high_water,
            "receive_blocks_alive": usage.live_blocks,
            "memory_limit": usage.limit,
        }

    def trim(self) -> int:
        self.sequencer.release_quarantine()
        return self.memory.trim()

    def close(self) -> None:
        self.transport.close()

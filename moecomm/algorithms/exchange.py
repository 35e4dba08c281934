"""What the calls of one communicator share: transport, kernels, placement, messages, receive memory, order."""

from __future__ import annotations

import dataclasses

from moecomm.algorithms.calls import Call
from moecomm.algorithms.mailbox import Mailbox
from moecomm.algorithms.receive_memory import ReceiveMemory
from moecomm.algorithms.sequencer import Sequencer
from moecomm.errors import MemoryLimitExceeded
from moecomm.kernels.base import RowKernels
from moecomm.placement import Placement
from moecomm.transports.base import Transport

__all__ = ["Exchange"]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What the calls of one communicator share on one rank."""

    transport: Transport
    kernels: RowKernels
    placement: Placement
    mailbox: Mailbox
    memory: ReceiveMemory
    sequencer: Sequencer

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    def bases(self) -> list[int]:
        """Where everybody's receive memory begins in my address space, by rank."""
        bases = []
        for rank in range(self.transport.num_ranks):
            address = self.transport.peer(self.memory.region, rank)
            assert address is not None, "rendezvous runs over addressable peers"
            bases.append(address)
        return bases

    def exceeded(self, call: Call, rank: int, need: int, limit: int) -> MemoryLimitExceeded:
        """The error that all ranks raise when `rank` lacks memory."""
        return self.memory.exceeded(call.title, self.transport.describe_peer(rank), need, limit)

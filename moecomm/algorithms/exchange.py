"""What the calls of one communicator share: transport, kernels, placement, messages, receive memory, order."""

from __future__ import annotations

import dataclasses

import torch

from moecomm.algorithms.base import Routing
from moecomm.algorithms.calls import Call, Signature
from moecomm.algorithms.mailbox import Mailbox
from moecomm.algorithms.receive_memory import ReceiveMemory
from moecomm.algorithms.sequencer import Sequencer
from moecomm.codecs.base import RowFormat
from moecomm.errors import MemoryLimitExceeded
from moecomm.kernels.base import RowKernels
from moecomm.placement import Placement
from moecomm.transports.base import Transport

__all__ = ["Exchange", "signature_of"]


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


def signature_of(routing: Routing, row_format: RowFormat, extra: torch.Tensor | None) -> Signature:
    """What the ranks of a call must agree on.

    Arguments:
        routing: of the call.
        row_format: of its rows.
        extra: weights or values that travel beside the rows, or None.
    """
    return Signature(
        layout=routing.layout,
        expert_alignment=routing.expert_alignment,
        format=row_format.words,
        num_topk=routing.topk_idx.shape[1],
        weights=int(extra is not None),
        origin=-1 if routing.stamp is None else int(routing.stamp[0]),
    )

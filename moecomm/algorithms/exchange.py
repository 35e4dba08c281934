"""The session over a transport: what its algorithms and their calls share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moecomm.algorithms import reports
from moecomm.algorithms.base import Algorithm, Session
from moecomm.algorithms.calls import Call
from moecomm.algorithms.device_calls import DeviceCalls, DeviceJob
from moecomm.algorithms.device_sequencer import make_queue, make_sequencer
from moecomm.algorithms.far_rows import FarRows, Reach
from moecomm.algorithms.fixed_blocks import FixedBlocks
from moecomm.algorithms.hops import Hops
from moecomm.algorithms.mailbox import Mailbox
from moecomm.algorithms.receive_memory import ReceiveMemory
from moecomm.algorithms.signature import Operation
from moecomm.codecs.base import RowFormat
from moecomm.devices.base import Device
from moecomm.devices.queue import OrderedQueue
from moecomm.errors import MemoryLimitExceeded
from moecomm.kernels.captured import CapturedCalls
from moecomm.kernels.far_runs import FarRun, Memory
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
        fixed_bytes: address space of each rank for blocks of fixed shape.
        hops: what crosses between domains.
        device: where tensors are.

    Attributes:
        bases: where everybody's receive memory begins in my address space, by rank; 0 where it has no address.
        reach: who can address whom.
        hops: what crosses between domains.
        queue: the device's work, in its order.
        smallest_limit: the smallest memory_limit of any rank.
        device_calls: the calls that devices make among themselves; None: there are none. Set by whoever makes them.
        captured: the kernels that make those.
        expert_rank, expert_local: `[E]` int32 on the device: rank of each expert, and its index there.
    """

    hops: Hops
    device_calls: DeviceCalls | None = None
    captured: CapturedCalls | None = None

    def __init__(
        self,
        transport: Transport,
        placement: Placement,
        *,
        max_in_flight: int,
        memory_limit: int,
        timeout: float,
        fixed_bytes: int,
        hops: Hops,
        device: Device,
    ) -> None:
        self.transport = transport
        self.placement = placement
        self.hops = hops
        self.device = device
        self.kernels = device.row_kernels()
        self.expert_rank = placement.expert_rank.to(device.torch_device)
        self.expert_local = placement.expert_local.to(device.torch_device)
        self.rank = transport.rank
        self.queue = make_queue(transport, device, timeout)
        limits = transport.group.all_gather(memory_limit)
        self.smallest_limit = min(limits)
        self.memory = ReceiveMemory(transport, device, self.queue, memory_limit, max(limits), fixed_bytes)
        self.reach = Reach(transport, self.memory.region)
        num_counts = placement.num_experts + placement.num_ranks
        # Two by domain, of which there are at most as many as ranks.
        num_crossings = 0 if device.is_host or self.reach.is_complete else 2 * placement.num_ranks
        self.mailbox = Mailbox(transport, num_counts, 2 * max_in_flight, num_crossings)
        self.bases = [transport.peer(self.memory.region, rank) or 0 for rank in range(transport.num_ranks)]
        num_local = len(placement.local_experts(self.rank))
        self.fixed_blocks = FixedBlocks(self.memory, num_local)
        self.tokens_per_expert = torch.zeros(num_local, dtype=torch.int64)
        self._arrived = self.tokens_per_expert.numpy()  # the same memory
        self.sequencer = make_sequencer(self.queue, transport, self.mailbox, max_in_flight, timeout)
        self.algorithms: Mapping[str, Algorithm] = {}
        """Set by whoever makes them: they need the session first."""

    # -- for the algorithms ------------------------------------------------------------------------------------------

    def exceeded(self, call: Call, rank: int, need: int, limit: int) -> MemoryLimitExceeded:
        """The error that all ranks raise when `rank` lacks memory."""
        call.is_agreed_failure = True
        return self.memory.exceeded(call.title, self.transport.describe_peer(rank), need, limit)

    def offsets(self, call: Call, num_planes: int, bases: Sequence[int] = ()) -> list[list[int]]:
        """What all ranks say in a call of fixed shape: their offsets, by plane and rank; `bases`, by rank, are added.

        Raises:
            CallMismatch, PeerFailed: as `Sequencer.cards`.
            MemoryLimitExceeded: on all ranks, if one has no space for its part.
        """
        agreed = self.mailbox.agreed(call.sequence, num_planes, bases)
        self.sequencer.check_notices(call)
        if agreed is not None:
            offsets, call.recorded = agreed
            return offsets
        rank, card = next((rank, card) for rank, card in enumerate(self.sequencer.cards(call)) if card.refused)
        call.is_agreed_failure = True
        raise self.memory.exceeded_fixed(call.title, self.transport.describe_peer(rank), card.need, card.limit)

    def far_routes(self, rows: FarRows, topk_idx: torch.Tensor) -> torch.Tensor:
        """`FarRows.routes` on the device; to be called by its work."""
        bases = self.queue.upload(torch.from_numpy(rows.bases))
        return rows.routes(self.kernels, topk_idx, self.expert_rank, bases)

    def put(self, source: int, runs: Sequence[FarRun], *, beside: bool = False) -> None:
        """Puts runs into far ranks' receive memory; they are there for whoever waits for my next signal to all.

        Arguments:
            source: address that the runs count from; on a device, in my receive memory.
            beside: see `OrderedQueue.put`; a host has nothing to do meanwhile.
        """
        if isinstance(self.queue, OrderedQueue):
            self.queue.put(*self._from_region(source, runs), beside=beside)
            return
        self.hops.between += sum(run.nbytes for run in runs)
        for rank, target, at, nbytes in runs:
            self.transport.put(self.memory.region, target, source + at, nbytes, rank)

    def put_beside(self, rank: int, source: int, runs: Sequence[FarRun], told: tuple[int, int] | None = None) -> None:
        """The same on a device, to one rank and behind what runs beside for it; see `OrderedQueue.put_beside`."""
        assert isinstance(self.queue, OrderedQueue)
        self.queue.put_beside(rank, *self._from_region(source, runs), told)

    def _from_region(self, source: int, runs: Sequence[FarRun]) -> tuple[Memory, list[FarRun]]:
        """My receive memory, and runs whose sources are offsets in it."""
        region = self.memory.region
        self.hops.between += sum(run.nbytes for run in runs)
        begin = source - region.address
        return Memory(region.address, region.nbytes), [run._replace(source=begin + run.source) for run in runs]

    def count_tokens(self, num_tokens_per_expert: npt.NDArray[np.int32]) -> None:
        self._arrived += num_tokens_per_expert

    def count_routes(self, topk_idx: torch.Tensor, placement: Placement, counts: torch.Tensor) -> int:
        return self.queue.count_routes(self.kernels, topk_idx, self.expert_rank, placement.num_ranks, counts)

    def begin_by_device(self, job: DeviceJob) -> Call:
        """Begins a call that only devices count, behind all work of the calls before it that hosts count.

        Otherwise a device could wait for a peer's that waits for what this one does later.
        """
        calls = self.device_calls
        assert calls is not None
        self.sequencer.finish_all()
        while any(call.job.placed is job.placed for call in calls.in_flight):
            calls.finish_oldest()
        return calls.begin(job.call)

    # -- for the communicator ----------------------------------------------------------------------------------------

    def refuse(self, operation: Operation, error: Exception) -> None:
        self.sequencer.refuse(operation, error)

    def refuse_by_device(self, operation: Operation, error: Exception) -> None:
        self._by_device.refuse(operation, error)

    def check_room(self, operation: Operation) -> None:
        self.sequencer.check_room(operation)
        calls = self.device_calls
        if calls is not None and self._is_full(calls):
            in_flight, sequencer = (*self.sequencer.in_flight, *calls.in_flight), self.sequencer
            num_begun = len(calls.in_flight) + sequencer.num_in_flight
            raise reports.too_many(operation.title, in_flight, num_begun, sequencer.max_in_flight)

    def make_room(self) -> None:
        calls = self.device_calls
        while calls is not None and calls.in_flight and self._is_full(calls):
            calls.finish_oldest()
        self.sequencer.make_room()

    def _is_full(self, calls: DeviceCalls) -> bool:
        return len(calls.in_flight) + self.sequencer.num_in_flight >= self.sequencer.max_in_flight

    def finish(self, call: Call) -> Any:
        return (self._by_device if call.by_device else self.sequencer).finish(call)

    def step(self, call: Call) -> None:
        (self._by_device if call.by_device else self.sequencer).step(call)

    def poll(self, call: Call) -> bool:
        return (self._by_device if call.by_device else self.sequencer).poll(call)

    @property
    def _by_device(self) -> DeviceCalls:
        assert self.device_calls is not None
        return self.device_calls

    def arrived_tokens(self) -> torch.Tensor:
        captured = self.captured
        if captured is None:
            return self.tokens_per_expert
        return self.tokens_per_expert + self._by_device.ask(lambda: captured.tokens_per_expert.cpu())

    def check(self) -> None:
        if self.device_calls is not None:
            self.device_calls.check()

    def describe_wires(self) -> list[str]:
        return self.transport.describe_wires()

    def waiting_times(self) -> tuple[list[float], list[float]]:
        return self.transport.waiting_times()

    def expose(self, num_rows: int, row_format: RowFormat, *, is_fixed: bool) -> torch.Tensor:
        nbytes = num_rows * row_format.row_bytes
        if isinstance(self.queue, OrderedQueue) and self.queue.is_capturing():
            raise ValueError("combine_buffer: a capture makes no memory; make the buffer before it, and keep it")
        self.sequencer.release_quarantine()
        block = self.memory.allocate_leaving(nbytes) if is_fixed else self.memory.allocate(nbytes)
        me = self.transport.describe_peer(self.rank)
        if block is None and is_fixed:
            raise self.memory.exceeded_fixed("combine_buffer", me, nbytes, self.memory.fixed_limit)
        if block is None:
            raise self.memory.exceeded("combine_buffer", me, nbytes, self.memory.limit)
        self.queue.claim_for_caller(block)
        return row_format.decode(self.queue.tensors_in(None, block), (0,), num_rows)

    def distrust(self, x: torch.Tensor) -> None:
        offset = self.memory.offset_of(x)
        if offset is not None:
            self.fixed_blocks.distrust(offset)

    def statistics(self) -> dict[str, int]:
        usage = self.memory.usage()
        return {
            "calls": self.sequencer.num_calls + (self.device_calls.num_calls if self.device_calls else 0),
            "announcements": self.sequencer.num_cards_with_counts,
            "receive_bytes_alive": usage.live_bytes,
            "receive_bytes_peak": usage.peak_bytes,
            "receive_bytes_touched": usage.touched_bytes,
            "receive_blocks_alive": usage.live_blocks,
            "memory_limit": usage.limit,
            "fixed_blocks_alive": self.memory.fixed_blocks(),
            "copies": self.memory.num_copies,
            "bytes_between_hosts": self.hops.between,
            "bytes_forwarded": self.hops.forwarded,
        }

    def trim(self) -> int:
        self.sequencer.release_quarantine()
        self.memory.reclaim()
        return self.memory.trim()

    def close(self) -> None:
        if self.device_calls is not None:
            self.device_calls.abandon()
        self.sequencer.abandon()
        self.queue.close()
        self.memory.keep_nothing()
        self.algorithms = {}  # they hold the session, so it would take the garbage collector to let go of the memory
        # Memory is not cleared: peers may still be reading the rows of a low-latency combine that is finished here.
        self.memory.close()
        self.transport.close()

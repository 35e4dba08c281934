"""Algorithm `captured` (low latency on a device): as `eager`, by kernels alone, so that a graph can hold the calls.

dispatch   send      ids, weights and rows to everybody's window, a signal
           receive   wait for all signals, count, plan, rows to their places
combine    send      rows to where peers read them, a signal
           receive   wait for all signals, read my tokens' rows and sum them

No number that changes between calls is the host's, nobody waits for a host, and no message goes from host to host. What
the host must know all the same (autograd records the call, or a compiler has traced it) goes the way of `eager`.

Where some ranks' memory has no address here, kernels put messages and rows to them, and calls that the host must know
of are refused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moecomm import _C
from moecomm.algorithms.captured_blocks import BlockPool, Lease
from moecomm.algorithms.captured_calls import CapturedCombine, CapturedDispatch
from moecomm.algorithms.device_algorithm import DeviceAlgorithm
from moecomm.algorithms.device_calls import DeviceCalls
from moecomm.algorithms.device_sequencer import DeviceSequencer
from moecomm.algorithms.eager import Eager
from moecomm.algorithms.eager_sizes import EagerForm, EagerSizes
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation
from moecomm.codecs.base import RowFormat
from moecomm.devices.base import AsynchronousDevice
from moecomm.devices.queue import OrderedQueue
from moecomm.kernels.captured import CapturedCalls, CapturedMemory, FarMemory
from moecomm.transports.base import Region

__all__ = ["Captured"]

_VALUE_BYTES = 8
_WIDTHS = (8, 4, 2)  # of the widest number, as memory allows
_FAR_AND_HOSTED = (
    "between domains kernels alone make low-latency calls, and this one is recorded by autograd, or traced; make it "
    "under torch.no_grad(), or use mode='throughput'"
)


class Captured(DeviceAlgorithm):
    """The low-latency exchange of a device. Construction is collective.

    Arguments:
        exchange: what calls share; it is given `device_calls`, and what makes them.
        sizes: the fixed shapes.
        max_in_flight: calls that may be begun and not waited for.
        timeout: seconds that one wait on the device may last.

    Attributes:
        queue: of the exchange.
        device: of the exchange.
        placement: which rank hosts which expert.
        kernels: make the calls.
        pool: blocks for what arrives, here and in throughput calls of fixed shape.
    """

    name = "captured"
    dispatching, combining = Operation.EAGER_DISPATCH, Operation.EAGER_COMBINE

    def __init__(self, exchange: Exchange, sizes: EagerSizes, max_in_flight: int, timeout: float) -> None:
        device, queue = exchange.device, exchange.queue
        assert isinstance(device, AsynchronousDevice)
        assert isinstance(queue, OrderedQueue)
        self.exchange = exchange
        self.device = device
        self.queue = queue
        self.placement = exchange.placement
        self._has_far = not exchange.reach.is_complete
        self._sizes, needed, total = self._fitting(sizes, max_in_flight)
        most = exchange.smallest_limit // 4
        if total > most:
            # All exists at once there, and who never makes such a call should not pay for it.
            self.refusal = (
                f"mode 'low_latency' would take {total} bytes of {device.kind} memory for windows of "
                f"max_tokens_per_rank={sizes.max_tokens_per_rank} tokens, and may take {most}, a quarter of the "
                "memory_limit; construct the Communicator with a smaller max_tokens_per_rank or a larger memory_limit"
            )
            needed = needed._replace(message=0, windows=0, output=0, outputs=0, landing=0, landings=0)
        self._output_bytes = needed.output
        self.kernels = self._make_kernels(needed, max_in_flight, timeout)
        exchange.device_calls = DeviceCalls(queue, self.kernels, exchange.transport, timeout)
        exchange.captured = self.kernels
        assert isinstance(exchange.sequencer, DeviceSequencer)
        exchange.sequencer.before_begin = exchange.device_calls.finish_long
        self.pool = BlockPool(exchange, queue)
        exchange.memory.reclaim = self.pool.release
        if not self.refusal and not self._has_far:
            self.hosted = Eager(exchange, exchange.topology, self._sizes, max_in_flight)

    def _fitting(self, sizes: EagerSizes, max_in_flight: int) -> tuple[EagerSizes, CapturedMemory, int]:
        """Sizes for the widest numbers for which there is memory, what kernels need for them, and bytes in all."""
        exchange = self.exchange
        num_ranks = exchange.transport.num_ranks
        for widest in _WIDTHS:
            found = sizes.narrowed(widest)
            needed = self.device.captured_kernels().memory(
                num_ranks=num_ranks,
                max_in_flight=max_in_flight,
                max_tokens_per_rank=found.max_tokens_per_rank,
                num_topk=found.max_topk,
                row_bytes=found.row_bytes,
                value_bytes=_VALUE_BYTES,
                num_rows=found.output_rows,
            )
            total = needed.windows + needed.outputs
            if self._has_far:
                total += needed.windows + needed.landings
            else:
                total += 2 * max_in_flight * num_ranks * found.window_bytes
            if total <= exchange.smallest_limit // 4:
                break
        return found, needed, total

    def _make_kernels(self, needed: CapturedMemory, max_in_flight: int, timeout: float) -> CapturedCalls:
        exchange, transport = self.exchange, self.exchange.transport
        ranks = range(transport.num_ranks)

        def allocated(nbytes: int) -> Region | None:
            return transport.allocate_on(self.device, nbytes) if nbytes else None

        def everybodys(region: Region | None) -> list[int]:
            return [0 if region is None else transport.peer(region, rank) or 0 for rank in ranks]

        board = transport.allocate_on(self.device, needed.board)
        windows, outputs = everybodys(allocated(needed.windows)), everybodys(allocated(needed.outputs))
        far = None
        if self._has_far and not self.refusal:
            packed, landings = (transport.allocate_on(self.device, n) for n in (needed.windows, needed.landings))
            wire = transport.make_wire(board, self.device)
            far = FarMemory(wire, packed.address, landings.address, needed.landing)
        make = functools.partial(
            self.device.captured_kernels().make,
            exchange.rank,
            boards=everybodys(board),
            windows=windows,
            outputs=outputs,
            message_bytes=needed.message,
            output_bytes=needed.output,
            expert_rank=exchange.expert_rank,
            expert_local=exchange.expert_local,
            max_tokens_per_rank=self._sizes.max_tokens_per_rank,
            max_in_flight=max_in_flight,
            timeout_ns=int(timeout * 1e9),
            describe=lambda rank: f"the device of {transport.describe_peer(rank)}",
            far=far,
        )
        return self.queue.ask(make)

    # -- what calls share --------------------------------------------------------------------------------------------

    def form(self, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None) -> EagerForm:
        """What a dispatch brings here."""
        value_bytes = 0 if topk_weights is None else topk_weights.element_size()
        num_topk = routing.topk_idx.shape[1]
        return self._sizes.form(
            routing.layout, routing.capacity, routing.expert_alignment, row_format, num_topk, value_bytes
        )

    def lease(self, form: EagerForm) -> Lease:
        """A block for a dispatch that is about to begin; see `BlockPool.lease`."""

        def make(memory: _C.Block) -> Any:
            values = memory.address + form.values_at if form.kernel.value_bytes else 0
            return self.kernels.block(form.kernel, memory.address, values)

        return self.pool.lease((form.kernel, form.shape), form.block.nbytes, make, "low-latency dispatch")

    # -- calls -------------------------------------------------------------------------------------------------------

    def check_size(self, num_tokens: int) -> None:
        if self.refusal:
            raise ValueError(self.refusal)
        self._sizes.check(num_tokens)

    def check_rows(self, layout: str, capacity: int, row_format: RowFormat) -> None:
        row_bytes, most = row_format.row_bytes, self._sizes.row_bytes
        if row_bytes > most:
            raise ValueError(
                f"rows of {row_format.dtype} have {row_bytes} bytes; a quarter of the memory_limit has windows for "
                f"rows of {most} bytes; construct the Communicator with a smaller max_tokens_per_rank or a larger "
                "memory_limit"
            )
        rows = capacity * self._sizes.max_local_experts if layout == "slab" else capacity
        if rows * row_bytes > self._output_bytes:
            raise ValueError(
                f"{rows} rows of {row_bytes} bytes are received, and combine can send {self._output_bytes} bytes; give "
                "a smaller expert_alignment"
            )

    def capacity(self, layout: str, expert_alignment: int) -> int:
        return self._sizes.rows(layout, expert_alignment)

    def is_by_device(self, routing: Routing | None, *, is_hosted: bool, recording: bool, is_fixed: bool) -> bool:
        if self._has_far:  # nobody else makes calls, so refusals are these calls' as well
            return True
        return not (is_hosted or recording) and (routing is None or routing.on_device is not None)

    def _check_alone(self, routing: Routing, values: torch.Tensor | None = None) -> None:
        """Raises ValueError for calls in which hosts take part, where they cannot."""
        is_known = routing.routes is None or routing.on_device is not None  # an operator's handle is the hosts'
        if self._has_far and (routing.is_hosted or routing.recording or values is not None or not is_known):
            raise ValueError(_FAR_AND_HOSTED)

    def make_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> CapturedDispatch:
        self._check_alone(routing)
        return CapturedDispatch(self, x, routing, row_format, topk_weights)

    def make_combine(
        self,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,  # never: hosts take part then, if they can
        per_host: bool,  # on a device, in one domain: the same
    ) -> CapturedCombine:
        self._check_alone(routing, values)
        if self._has_far and per_host:
            raise ValueError(
                "reduce: 'per_host' sums over rails; the rows of a low-latency call come home one by one; use 'exact', "
                "or mode='throughput'"
            )
        self.exchange.memory.num_copies += 1
        assert routing.on_device is not None
        return CapturedCombine(self, y, routing.on_device, routing, row_format, topk_weights)

"""Low-latency dispatch and combine that a CUDA graph can hold: nothing that changes between calls is the host's.

    T num_tokens   K num_topk   E num_experts   E_local experts here   R num_ranks   H hidden   N rows of the block

Every method only launches kernels on the current stream, in memory that was made before; docs/gpu-low-latency.md tells
how the ranks keep in step. What goes wrong stops the later kernels and stays on the device until `check` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from moecomm.kernels.base import weights_dtype
from moecomm.kernels.captured import CapturedMemory
from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured_blocks import CapturedBlock, Placed, make_block
from moecomm.kernels.triton.captured_calls import InFlight
from moecomm.kernels.triton.captured_combine import Outputs, pull_sums, send_outputs, wait_for_ticket
from moecomm.kernels.triton.captured_messages import count_messages, message_layout
from moecomm.kernels.triton.captured_plan import plan_messages
from moecomm.kernels.triton.captured_rows import place_rows, route_messages
from moecomm.kernels.triton.captured_send import Batch, send_messages
from moecomm.kernels.triton.captured_state import (
    NUM_SLOTS,
    check_control,
    failure_of,
    make_control,
    windows_for,
)
from moecomm.kernels.triton.captured_zeros import zero_rows
from moecomm.kernels.triton.runtime import alignment_of, check_device
from moecomm.kernels.triton.signals import board_bytes

__all__ = ["CapturedExchange", "captured_memory"]


def captured_memory(
    *,
    num_ranks: int,
    max_in_flight: int,
    max_tokens_per_rank: int,
    num_topk: int,
    row_bytes: int,
    value_bytes: int,
    num_rows: int,
) -> CapturedMemory:
    """See `moecomm.kernels.captured.CapturedKernels.memory`."""
    message = message_layout(max_tokens_per_rank, num_topk, row_bytes, value_bytes).nbytes
    output = -(-num_rows * row_bytes // 64) * 64
    num_windows = windows_for(max_in_flight)
    return CapturedMemory(
        board_bytes(num_ranks, NUM_SLOTS), message, num_windows * num_ranks * message, output, num_windows * output
    )


@final
class CapturedExchange:
    """Low-latency calls of one rank. All ranks make the same calls in the same order, on one stream each.

    Arguments:
        rank: mine.
        boards, windows, outputs: by rank, the addresses here of that rank's memory, see `CapturedMemory`.
        message_bytes, output_bytes: `CapturedMemory.message` and `.output`, the same on every rank.
        expert_rank, expert_local: `[E]` int32: rank of each expert, and its index there.
        max_tokens_per_rank: most T.
        max_in_flight: calls of each operation that may be begun and not completed.
        timeout_ns: a wait fails after so many nanoseconds.
        describe: names a rank in messages.

    Attributes:
        tokens_per_expert: `[E_local]` int64: what has arrived in all calls.
        max_in_flight: as given.
        control, announcements, pushes, readiness, releases, experts, sizes, max_topk: for `StaticExchange`: state on
            the device, its operations, `expert_rank` and `expert_local`, (Tmax, R, E, E_local), most K so far.
    """

    def __init__(
        self,
        rank: int,
        *,
        boards: Sequence[int],
        windows: Sequence[int],
        outputs: Sequence[int],
        message_bytes: int,
        output_bytes: int,
        expert_rank: Tensor,
        expert_local: Tensor,
        max_tokens_per_rank: int,
        max_in_flight: int = 1,
        timeout_ns: int = 100_000_000_000,
        describe: Callable[[int], str] = lambda rank: f"rank {rank}",
    ) -> None:
        device = check_device("expert_rank", expert_rank)
        if not len(boards) == len(windows) == len(outputs) or not 0 <= rank < len(boards):
            raise ValueError(
                f"rank is {rank}; boards, windows and outputs have {len(boards)}, {len(windows)} and {len(outputs)} "
                "addresses, which must be one for each rank"
            )
        if max_in_flight < 1 or max_tokens_per_rank < 0 or timeout_ns < 0:
            raise ValueError(
                f"max_in_flight is {max_in_flight}, max_tokens_per_rank {max_tokens_per_rank}, timeout_ns {timeout_ns}"
            )
        self.experts = expert_rank.contiguous(), expert_local.contiguous()
        num_local = int((expert_rank == rank).sum())
        self.sizes = max_tokens_per_rank, len(boards), expert_rank.numel(), num_local
        self.control, operations = make_control(rank, list(boards), device, timeout_ns, windows_for(max_in_flight))
        self._dispatch, self._combine, self.announcements, self.pushes, self.readiness, self.releases = operations
        self._mine = windows[rank], message_bytes
        self._peers = torch.tensor(windows, dtype=torch.int64, device=device), alignment_of(*windows)
        self._outputs = self._make_outputs(outputs, output_bytes)
        self.max_in_flight = max_in_flight
        self._dispatches, self._combines = InFlight("dispatch", max_in_flight), InFlight("combine", max_in_flight)
        self.max_topk = 1
        self._describe = describe
        self.tokens_per_expert = torch.zeros(num_local, dtype=torch.int64, device=device)

    def block(self, form: Form, rows: int, values: int = 0) -> CapturedBlock:
        """A place for the rows of a dispatch; made before a graph is captured, for the graph keeps its addresses.

        Arguments:
            form: of the calls that fill it, the same on every rank.
            rows: address of `[E_local, capacity, H]` (slab) or `[num_rows, H]` (expert_major), all zero.
            values: address of the weights, in the same order, all zero; 0 = weights that travel are not kept.

        Raises:
            ValueError: messages of this form are larger than `message_bytes`.
        """
        return make_block(self.control.rank, form, rows, values, self._mine, self.sizes, self.tokens_per_expert)

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, block: CapturedBlock, *, topk_weights: Tensor | None = None
    ) -> None:
        """`send` and `receive`."""
        self.send(x, topk_idx, block, topk_weights=topk_weights)
        self.receive(block)

    def send(self, x: Tensor, topk_idx: Tensor, block: CapturedBlock, *, topk_weights: Tensor | None = None) -> None:
        """Sends rows; never waits.

        Arguments:
            x: `[T, H]`, last dimension contiguous.
            topk_idx: `[T, K]` int32 or int64 contiguous, -1 = no expert. Other ids that are none stop all ranks.
            block: whose form x, topk_idx and topk_weights must have.
            topk_weights: `[T, K]` contiguous, of `form.value_bytes` each; None if that is 0.

        Raises:
            ValueError: an argument has another shape than the block's form says.
            TooManyInFlight: another one must be completed before, see `InFlight`.
        """
        self.check_batch(x, topk_idx, block.placed.form, topk_weights, self.sizes[0])
        self._dispatches.begin(block.placed)
        block.placed.num_tokens = topk_idx.shape[0]
        batch = Batch(x, topk_idx, topk_weights)
        self.max_topk = max(self.max_topk, block.placed.form.num_topk)
        send_messages(
            *(self.control, self._dispatch, block.dispatched, batch, self.experts[0]),
            *(block.windows, self._peers, block.layout, block.signature),
        )

    def receive(self, block: CapturedBlock) -> None:
        """Waits on the device for what all ranks have sent and fills the block; rows that no route fills are zero.

        Then `block.placed` tells what has arrived and where it is.
        """
        self._dispatches.end(block.placed)
        control, ticket, (expert_rank, _) = self.control, block.dispatched, self.experts
        slot = self._dispatch.slot
        count_messages(control, slot, ticket, block.windows, expert_rank, block.signature, block.found)
        placed = block.placed
        plan_messages(control, slot, ticket, block.found, self.experts, placed.form, block.scratch, placed.arrived)
        route_messages(
            *(control, ticket, block.windows, block.layout, block.found, expert_rank, block.scratch.starts),
            *(block.routes, placed.block),
        )
        place_rows(control, ticket, block.windows, block.layout, block.found.tokens, block.routes, placed.block)
        zero_rows(control.status, placed.arrived.spans, placed.block)

    def outputs_at(self, addresses: Sequence[int]) -> Outputs:
        """Rows that lie where peers read them already, at these addresses by rank, and need no copy.

        They may change again once this rank has received a dispatch that it sent after the combine had been completed.
        """
        return self._make_outputs(addresses, 0)

    def _make_outputs(self, addresses: Sequence[int], nbytes: int) -> Outputs:
        by_window = [[base + window * nbytes for base in addresses] for window in range(self.control.num_windows)]
        table = torch.tensor(by_window, dtype=torch.int64, device=self.experts[0].device)
        return Outputs(table, nbytes, alignment_of(*addresses), addresses[self.control.rank])

    def combine(
        self,
        y: Tensor,
        placed: Placed,
        out: Tensor,
        *,
        topk_weights: Tensor | None = None,
        outputs: Outputs | None = None,
    ) -> None:
        """`send_rows` and `sum_rows`."""
        self.send_rows(y, placed, outputs=outputs)
        self.sum_rows(placed, out, topk_weights=topk_weights, outputs=outputs)

    def send_rows(self, y: Tensor, placed: Placed, *, outputs: Outputs | None = None) -> None:
        """Lets peers read rows; never waits.

        Arguments:
            y: contiguous rows in the order of those that arrived, any dtype; those that no route names are not read.
            placed: what the rows answer.
            outputs: from `outputs_at`, y lies there; None: y is copied.

        Raises:
            ValueError: y does not fit into `output_bytes`, is not contiguous or not where `outputs` says.
            TooManyInFlight: another one must be completed before, see `InFlight`.
        """
        where = outputs or self._outputs
        if not y.is_contiguous() or y.shape[-1] * y.element_size() * self._num_rows(placed) != y.nbytes:
            raise ValueError(f"y is {list(y.shape)} with strides {y.stride()}; wanted {self._num_rows(placed)} rows")
        if outputs is None and y.nbytes > where.nbytes:
            raise ValueError(f"y has {y.nbytes} bytes; output_bytes is {where.nbytes}")
        if outputs is not None and y.nbytes and y.data_ptr() != where.mine:
            raise ValueError(f"y is at {y.data_ptr():#x}; outputs says {where.mine:#x}")
        self._combines.begin(placed)
        rows = y.data_ptr(), y.shape[-1] * y.element_size()
        arrived = placed.arrived
        send_outputs(
            *(self.control, self._combine, placed.combined, rows),
            *(arrived.first_rows, arrived.num_tokens_per_expert, where),
        )

    def sum_rows(
        self, placed: Placed, out: Tensor, *, topk_weights: Tensor | None = None, outputs: Outputs | None = None
    ) -> None:
        """Waits on the device until all rows are ready and sums each token's in ascending k, as `combine_rows` does.

        Arguments:
            placed: whose routes are followed.
            out: `[T, H]` contiguous, overwritten; T of that dispatch, dtype and H of the rows.
            topk_weights: `[T, K]` contiguous fp32 (fp64 beside fp64 rows), applied here; None: a plain sum.
            outputs: as given to `send_rows`.
        """
        self.check_sums((placed.num_tokens, placed.form.num_topk), out, topk_weights)
        self._combines.end(placed)
        wait_for_ticket(self.control, self._combine.slot, placed.combined)
        routes = placed.routes[: placed.num_tokens]
        pull_sums(self.control, placed.combined, out, routes, outputs or self._outputs, topk_weights)

    def check_sums(self, shape: tuple[int, int], out: Tensor, topk_weights: Tensor | None) -> None:
        """Raises ValueError if these are not arguments of `sum_rows`; `shape` is T, K."""
        if out.dim() != 2 or out.shape[0] != shape[0] or not out.is_contiguous():
            raise ValueError(f"out is {list(out.shape)} with strides {out.stride()}; wanted contiguous [{shape[0]}, H]")
        wide = weights_dtype(out.dtype)
        if topk_weights is not None and (tuple(topk_weights.shape) != shape or topk_weights.dtype is not wide):
            raise ValueError(
                f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}; wanted {wide} {list(shape)}"
            )

    @property
    def status(self) -> Tensor:
        """`[4 + R]` int64: its first word is 0 unless something has gone wrong."""
        return self.control.status

    def failure(self) -> Exception | None:
        """What `check` would raise; it is not forgotten. Waits for the work given so far."""
        return failure_of(self.control, num_topk=self.max_topk, describe=self._describe)

    def check(self) -> None:
        """Waits for the work given so far and raises what has stopped it; nothing was written since, on any rank.

        Raises:
            PeerTimeout: a peer did not come; what is behind it cannot be repaired.
            CapacityExceeded: rows of a dispatch did not fit; every rank raises it and may go on.
            ValueError: a rank gave an id that is none; every rank raises it and may go on.
            CallMismatch: ranks made calls of different forms; likewise.
        """
        check_control(self.control, num_topk=self.max_topk, describe=self._describe)

    def _num_rows(self, placed: Placed) -> int:
        return self.sizes[3] * placed.form.capacity if placed.form.capacity else placed.form.num_rows

    def check_batch(self, x: Tensor, topk_idx: Tensor, form: Form, weights: Tensor | None, most: int) -> None:
        """Raises ValueError if these are not arguments of a dispatch of this form, of at most so many tokens."""
        num_tokens = topk_idx.shape[0]
        if topk_idx.shape != (num_tokens, form.num_topk) or topk_idx.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"topk_idx is {topk_idx.dtype} {list(topk_idx.shape)}; wanted int32 or int64 [T, {form.num_topk}]"
            )
        if num_tokens > most:
            raise ValueError(f"topk_idx has {num_tokens} tokens; there is room for {most}")
        if x.dim() != 2 or x.shape[0] != num_tokens or x.shape[1] * x.element_size() != form.row_bytes:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; wanted {num_tokens} rows of {form.row_bytes} bytes")
        if not topk_idx.is_contiguous() or (x.stride(1) != 1 and x.numel() > x.shape[0]):
            raise ValueError(f"topk_idx has strides {topk_idx.stride()}, x {x.stride()}; the last must be contiguous")
        value_bytes = 0 if weights is None else weights.element_size()
        if value_bytes != form.value_bytes:
            raise ValueError(
                f"topk_weights has values of {value_bytes} bytes; the block's form says {form.value_bytes}"
            )
        if weights is not None and (weights.shape != topk_idx.shape or not weights.is_contiguous()):
            raise ValueError(f"topk_weights is {list(weights.shape)}; wanted contiguous {list(topk_idx.shape)}")

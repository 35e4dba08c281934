"""The Communicator: dispatch sends each token's row to the ranks of its experts, combine brings the outputs home.

T tokens on this rank   H hidden   K top-k   E experts over all ranks   R ranks   N rows received
"""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch

from moecomm.algorithms.base import Returned
from moecomm.algorithms.eager_sizes import EagerSizes
from moecomm.algorithms.plan import Layout
from moecomm.algorithms.registry import make_session
from moecomm.checks import check_sizes
from moecomm.codecs.registry import make_codec
from moecomm.exchanger import Exchanger
from moecomm.groups import as_group
from moecomm.handle import Handle, Received, form_of, received_of
from moecomm.placement import Placement
from moecomm.work import Work

__all__ = ["Communicator", "WaitingTimes"]

_log = logging.getLogger("moecomm.communicator")
_DEFAULT_LAYOUT: dict[str, Layout] = {"throughput": "expert_major", "low_latency": "slab"}


class WaitingTimes(NamedTuple):
    """Seconds that one rank's waits have lasted, by the rank waited for.

    Attributes:
        total: `[R]` float32: over all waits.
        longest: `[R]` float32: in one wait.
    """

    total: torch.Tensor
    longest: torch.Tensor


class Communicator:
    """Dispatch and combine between the ranks of one expert-parallel group. Construction and calls are collective.

    Arguments:
        group: ProcessGroup, one-dimensional DeviceMesh, `moecomm.Group`, or None: the default group, or one rank where
            `torch.distributed` is not initialised.
        num_experts: E, at least 1; expert e lives on the rank that `placement` says (contiguous blocks).
        hidden: H, numbers per row, at least 1.
        num_topk: largest K, 1 to 64.
        max_tokens_per_rank: largest T of a low-latency call; throughput calls take any T.
        transport: `auto`, `local`, `shm`, or `collective` (through `torch.distributed`; a baseline).
        codec: number format of rows on the wire; `none`.
        max_in_flight: calls that may be begun and not waited for, 1 to 8.
        timeout: how long one wait for the peers may last.
        memory_limit: bytes of receive memory that may be alive at once on this rank; None = the machine's memory.
            Nothing is reserved but address space.

    Attributes:
        rank, num_ranks: in the group.
        num_experts, hidden, num_topk, max_tokens_per_rank, max_in_flight: as given.
        placement: which rank hosts which expert.
        transport_name: the transport in use.
        id: number of this communicator in this process.

    Raises:
        ValueError, TypeError: a bad argument, with its value.
        TransportUnavailable: no transport reaches all ranks; with reasons and remedies.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        num_experts: int,
        hidden: int,
        num_topk: int,
        max_tokens_per_rank: int = 4096,
        transport: str = "auto",
        codec: str = "none",
        max_in_flight: int = 2,
        timeout: timedelta = timedelta(seconds=100),
        memory_limit: int | None = None,
    ) -> None:
        self._closed = True  # until construction has succeeded
        check_sizes(
            num_experts=(num_experts, None),
            hidden=(hidden, None),
            num_topk=(num_topk, 64),
            max_tokens_per_rank=(max_tokens_per_rank, None),
            max_in_flight=(max_in_flight, 8),
            memory_limit=(1 if memory_limit is None else memory_limit, None),
        )
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta, got {type(timeout).__name__}")
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.group = as_group(group)
        self.rank = self.group.rank
        self.num_ranks = self.group.size
        self.num_experts = num_experts
        self.hidden = hidden
        self.num_topk = num_topk
        self.max_tokens_per_rank = max_tokens_per_rank
        self.max_in_flight = max_in_flight
        self.placement = Placement(num_experts, self.num_ranks)
        sizes = EagerSizes(
            num_ranks=self.num_ranks,
            max_local_experts=-(-num_experts // self.num_ranks),
            max_tokens_per_rank=max_tokens_per_rank,
            max_topk=num_topk,
            hidden=hidden,
        )
        session, self.transport_name = make_session(
            self.group,
            self.placement,
            transport=transport,
            max_in_flight=max_in_flight,
            memory_limit=memory_limit,
            timeout=timeout.total_seconds(),
            sizes=sizes,
            agreed={
                "num_experts": num_experts,
                "hidden": hidden,
                "num_topk": num_topk,
                "max_tokens_per_rank": max_tokens_per_rank,
                "codec": codec,
            },
        )
        self._exchanger = Exchanger(
            session, make_codec(codec), self.placement, rank=self.rank, hidden=hidden, max_topk=num_topk
        )
        self.id = self._exchanger.id
        self._closed = False
        _log.info(
            "communicator %d: rank %d of %d, algorithms %s over %s, codec %s, %d experts, hidden %d, top-%d",
            *(
                self.id,
                self.rank,
                self.num_ranks,
                "/".join(a.name for a in session.algorithms.values()),
                self.transport_name,
                codec,
            ),
            *(num_experts, hidden, num_topk),
        )

    # -- what the user calls ---------------------------------------------------------------------------------------

    @property
    def local_experts(self) -> range:
        """Global ids of the experts that live here, in local order."""
        return self.placement.local_experts(self.rank)

    @property
    def num_local_experts(self) -> int:
        """E_local: experts that live here."""
        return len(self.local_experts)

    @property
    def stats(self) -> dict[str, int]:
        """Counters: `announcements` (count exchanges so far), receive memory alive, at its peak, ever touched."""
        return self._exchanger.session.statistics()

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """`[E_local]` int64: routes that arrived for each local expert, over all dispatches so far; kept up to date."""
        return self._exchanger.session.tokens_per_expert

    @property
    def waiting_times(self) -> WaitingTimes:
        """How long this rank has waited for each rank, to find slow ones."""
        return WaitingTimes(*map(torch.tensor, self._exchanger.session.waiting_times()))

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        mode: str = "throughput",
        layout: Layout | None = None,
        expert_alignment: int = 1,
        handle: Handle | None = None,
    ) -> Received:
        """Sends each token's row to the ranks of its experts. Collective; differentiable in `x` and `topk_weights`.

        Arguments:
            x: `[T, H]`, any T (0 included, unequal between ranks); any float dtype, or uint8, int8, float8, int16,
                int32, int64 rows, which pass through as they are.
            topk_idx: `[T, K]` int32 or int64, global expert ids; -1 = no expert, anywhere. An expert named twice by
                one token gets two rows. None exactly if `handle` is given.
            topk_weights: `[T, K]` floating point or None: travel with the rows, in float32 (float64 beside float64
                rows); not read where `topk_idx` is -1. Given on all ranks or on none.
            mode: `throughput`: sizes are exchanged first, memory is what arrives, any T. `low_latency`: one hop and
                shapes that depend only on the communicator's arguments, for T up to `max_tokens_per_rank`.
            layout: `expert_major` (default of throughput): one row per route, by local expert, source rank, source
                token, k; low latency: followed by zero rows up to a fixed N. `slab` (low latency only, and its
                default): the same rows in one slab per local expert. `flat` (throughput only): one row per token and
                rank, by source rank, source token.
            expert_alignment: expert_major: each local expert's rows are padded with zero rows to a multiple of it.
            handle: of an earlier dispatch: same routing, layout and alignment again, without exchanging counts.

        Returns:
            What arrived here; see `Received`.

        Raises:
            ValueError, TypeError: a bad argument; the peers learn that this rank refused the call.
            MemoryLimitExceeded: some rank would receive too much; raised on all ranks, before anything is sent.
            CallMismatch, PeerTimeout, PeerLost, PeerFailed: the ranks did not all make the same call in time.
        """
        layout = layout or _DEFAULT_LAYOUT.get(mode, "expert_major")
        if torch.compiler.is_compiling() or _requires_grad(x, topk_weights):
            return self._dispatch_op(x, topk_idx, topk_weights, mode, layout, expert_alignment, handle, call=-1)
        exchanger = self._exchanger
        call = exchanger.begin_dispatch(
            x, topk_idx, topk_weights, mode, layout, expert_alignment, handle, make_room=True
        )
        return exchanger.received(exchanger.finish(call))

    def dispatch_async(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        mode: str = "throughput",
        layout: Layout | None = None,
        expert_alignment: int = 1,
        handle: Handle | None = None,
    ) -> Work[Received]:
        """Begins a `dispatch`; `work.wait()` gives what it returns. `x` must not change before.

        Raises:
            TooManyInFlight: `max_in_flight` calls are outstanding already.
            As `dispatch`; errors of the exchange come from `wait`.
        """
        layout = layout or _DEFAULT_LAYOUT.get(mode, "expert_major")
        exchanger = self._exchanger
        call = exchanger.begin_dispatch(x, topk_idx, topk_weights, mode, layout, expert_alignment, handle)
        if not _requires_grad(x, topk_weights):
            return Work(exchanger.session, call, lambda: exchanger.received(exchanger.finish(call)))
        arguments = (x, topk_idx, topk_weights, mode, layout, expert_alignment, handle)
        token = exchanger.keep(call)
        return Work(exchanger.session, call, lambda: self._dispatch_op(*arguments, call=token))

    def combine(self, y: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None) -> torch.Tensor:
        """Brings the experts' rows home and sums them per token. Collective; differentiable in both tensors.

        A token's routes are added in ascending k (flat: its ranks' rows in ascending rank), in float32 (float64 for
        float64), each product and sum rounded by itself, and the sum rounded once to the dtype of `y`: the same bits
        over every transport and any number of ranks.

        Arguments:
            y: `[N, H]` (slab: `[E_local, capacity, H]`): row n is the expert's output for row n of `received.x`;
                padding rows are not read. float64, float32, bfloat16 or float16. What lies in memory of
                `combine_buffer` (or is `received.x` itself) is not copied.
            handle: of the dispatch.
            topk_weights: `[T, K]` floating point: the sum is of weight * row; None: of the rows. expert_major only.
                Not read where `topk_idx` is -1, where its gradient is 0.

        Returns:
            `[T, H]`, dtype of `y`; zero for a token without routes.

        Raises:
            As `dispatch`.
        """
        y = _rows_of(y, handle)
        if torch.compiler.is_compiling() or _requires_grad(y, topk_weights):
            return self._combine_op(y, handle, topk_weights, call=-1)
        exchanger = self._exchanger
        returned: Returned = exchanger.finish(exchanger.begin_combine(y, handle, topk_weights, make_room=True))
        return returned.x

    def combine_async(
        self, y: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None
    ) -> Work[torch.Tensor]:
        """Begins a `combine`; `work.wait()` gives what it returns. `y` must not change before.

        Raises:
            TooManyInFlight: `max_in_flight` calls are outstanding already.
            As `combine`; errors of the exchange come from `wait`.
        """
        y = _rows_of(y, handle)
        exchanger = self._exchanger
        call = exchanger.begin_combine(y, handle, topk_weights)
        if not _requires_grad(y, topk_weights):
            return Work(exchanger.session, call, lambda: exchanger.finish(call).x)
        token = exchanger.keep(call)
        return Work(exchanger.session, call, lambda: self._combine_op(y, handle, topk_weights, call=token))

    def combine_buffer(self, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the experts' outputs that peers can read where it is, so that `combine` copies nothing.

        Arguments:
            handle: of the dispatch.
            dtype: of the rows.

        Returns:
            `[N, H]` (slab: `[E_local, capacity, H]`), uninitialised; its memory returns when the last tensor on it
            dies. In low-latency mode peers may read it until this rank has made `2 * max_in_flight` further calls.

        Raises:
            MemoryLimitExceeded: there is no memory for it.
        """
        rows = self._exchanger.combine_buffer(handle, dtype)
        return rows.view(-1, handle.capacity, self.hidden) if handle.layout == "slab" else rows

    def trim(self) -> int:
        """Gives receive memory that is not in use back to the system; returns the bytes. Not collective."""
        return self._exchanger.trim()

    def close(self) -> None:
        """Says goodbye to the peers. Idempotent, not collective, needs no peer; tensors received stay valid."""
        if not self._closed:
            self._closed = True
            self._exchanger.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"{self!r} was not closed; use it as a context manager", ResourceWarning, stacklevel=2)
            self.close()

    def __repr__(self) -> str:
        return (
            f"Communicator(rank={self.rank}, num_ranks={self.num_ranks}, num_experts={self.num_experts}, "
            f"hidden={self.hidden}, num_topk={self.num_topk}, transport={self.transport_name!r})"
        )

    # -- through the torch operators: for autograd and torch.compile -------------------------------------------------

    def _dispatch_op(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        mode: str,
        layout: Layout,
        expert_alignment: int,
        handle: Handle | None,
        *,
        call: int,
    ) -> Received:
        ops = torch.ops.moecomm
        if handle is None:
            outputs = ops.dispatch(x, topk_idx, topk_weights, self.id, mode, layout, expert_alignment, call)
            received, weights, local_idx, num_tokens_per_expert, offsets, routes, idx, counts, stamp = outputs
            capacity = self._exchanger.capacity(mode, layout, expert_alignment)
            num_rows = received.shape[0]
            handle = Handle(routes, idx, counts, stamp, layout, expert_alignment, num_rows, self.id, capacity)
        else:
            outputs = ops.dispatch_cached(x, topk_weights, *_spread(handle), self.id, handle.num_rows, call)
            received, weights, local_idx, num_tokens_per_expert, offsets = outputs
        return received_of(
            received,
            None if topk_weights is None else weights,
            local_idx if handle.layout == "flat" else None,
            num_tokens_per_expert,
            offsets,
            handle,
        )

    def _combine_op(
        self, y: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None, *, call: int
    ) -> torch.Tensor:
        out: torch.Tensor
        out, _ = torch.ops.moecomm.combine(y, topk_weights, None, *_spread(handle), self.id, call)
        return out


def _spread(handle: Handle) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, str, int]:
    """A handle as the operators take it."""
    form = form_of(handle.layout, handle.capacity)
    return handle.routes, handle.topk_idx, handle.counts, handle.stamp, form, handle.expert_alignment


def _rows_of(y: torch.Tensor, handle: Handle) -> torch.Tensor:
    """`[E_local, capacity, H]` as `[N, H]`; anything else as it is, to be checked."""
    if isinstance(y, torch.Tensor) and y.dim() == 3 and isinstance(handle, Handle) and handle.layout == "slab":
        return y.flatten(0, 1) if y.shape[1] == handle.capacity else y
    return y


def _requires_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)

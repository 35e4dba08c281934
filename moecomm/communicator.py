"""The Communicator: dispatch sends each token's row to the ranks of its experts, combine brings the outputs home.

T tokens on this rank   H hidden   K top-k   E experts over all ranks   R ranks   N rows received
"""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch

from moecomm import functional
from moecomm.algorithms.base import Arrival, Returned
from moecomm.algorithms.calls import Call
from moecomm.algorithms.eager_sizes import EagerSizes
from moecomm.algorithms.hops import Way
from moecomm.algorithms.plan import Layout
from moecomm.algorithms.registry import make_session
from moecomm.checks import check_sizes
from moecomm.codecs.registry import make_codec
from moecomm.devices.base import Device
from moecomm.devices.registry import find_device
from moecomm.exchanger import Exchanger
from moecomm.gradients import is_recording, is_traced, record_combine, record_dispatch
from moecomm.groups import as_group
from moecomm.handle import Handle, Received, received_of, rows_of
from moecomm.placement import Placement
from moecomm.status import Status
from moecomm.topology import Topology
from moecomm.work import Work

__all__ = ["Communicator"]

Reduce = Literal["exact", "per_host"]

_log = logging.getLogger("moecomm.communicator")


class Communicator(Status):
    """Dispatch and combine between the ranks of one expert-parallel group. Construction and calls are collective.

    Arguments:
        group: ProcessGroup, one-dimensional DeviceMesh, `moecomm.Group`, or None: the default group, or one rank where
            `torch.distributed` is not initialised.
        num_experts: E, at least 1; expert e lives on the rank that `placement` says (contiguous blocks).
        hidden: H, numbers per row, at least 1.
        num_topk: largest K, 1 to 64.
        max_tokens_per_rank: largest T of a low-latency call; throughput calls take any T.
        transport: `auto`, `local`, `shm`, `nvlink` and `nvshmem` (CUDA), `shm+ucx`, `ucx`, or `collective` (through
            `torch.distributed`; a baseline).
        topology: where the ranks are: hosts, domains, rails; None: as found. Equal on all ranks. Ranks of one domain
            must address each other's memory; ranks of different domains may, so any grid can be tried on one host.
        algorithm: how calls cross between domains: `hierarchical` (a token once per domain, to a rank there: throughput
            passes it on, low latency reads it there), `direct` (to each of its ranks), or `auto`: what moves fewer
            bytes, in throughput mode call by call. CUDA tensors have it over `nvshmem`; else they go `direct`.
        codec: number format of rows on the wire; `none`.
        max_in_flight: calls that may be begun and not waited for, 1 to 8.
        timeout: how long one wait for the peers may last.
        memory_limit: bytes of receive memory that may be alive at once on this rank. CPU: None = the machine's memory;
            only address space is reserved. CUDA: allocated at once; None = a third of the free memory, over its ranks.
        device: of all tensors: a torch device, its name (`cuda`: the current one), or None = the CPU.

    Attributes:
        rank, num_ranks: in the group.
        num_experts, hidden, num_topk, max_tokens_per_rank, max_in_flight: as given.
        placement: which rank hosts which expert.
        transport_name: the transport in use.
        topology: as given, or found: hosts by the identity of their kernel, domains by whom the transport in use can
            address (`collective`: whom any transport could). `print(comm.topology)` draws it.
        device: the torch device of its tensors.
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
        topology: Topology | None = None,
        algorithm: Way = "auto",
        codec: str = "none",
        max_in_flight: int = 2,
        timeout: timedelta = timedelta(seconds=100),
        memory_limit: int | None = None,
        device: torch.device | str | Device | None = None,
    ) -> None:
        self._closed = True  # until construction has succeeded
        check_sizes(
            num_experts=(num_experts, None),
            hidden=(hidden, None),
            num_topk=(num_topk, 64),
            max_tokens_per_rank=(max_tokens_per_rank, None),
            max_in_flight=(max_in_flight, 8),
            memory_limit=(1 if memory_limit is None else memory_limit, 2**62),
        )
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta, got {type(timeout).__name__}")
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, got {timeout}")
        found = find_device(device)
        self.device = found.torch_device
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
            num_local_experts=self.num_local_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            max_topk=num_topk,
            hidden=hidden,
        )
        session, self.transport_name = make_session(
            self.group,
            self.placement,
            transport=transport,
            topology=topology,
            way=algorithm,
            max_in_flight=max_in_flight,
            memory_limit=memory_limit,
            timeout=timeout.total_seconds(),
            sizes=sizes,
            device=found,
            agreed={
                "num_experts": num_experts,
                "hidden": hidden,
                "num_topk": num_topk,
                "max_tokens_per_rank": max_tokens_per_rank,
                "codec": codec,
            },
        )
        self.topology = session.topology
        try:
            made = make_codec(codec, session.kernels)
            self._exchanger = Exchanger(session, made, self.placement, rank=self.rank, hidden=hidden, max_topk=num_topk)
        except BaseException:
            session.close()
            raise
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

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        mode: str = "throughput",
        layout: Layout | None = None,
        expert_alignment: int = 1,
        capacity: int | None = None,
        handle: Handle | None = None,
    ) -> Received:
        """Sends each token's row to the ranks of its experts. Collective; differentiable in `x` and `topk_weights`.

        Backward is collective, too: if autograd records the call on one rank, it does on all; where kernels alone
        make it, inputs must require gradients on all ranks or on none. A recompute under (non-reentrant) activation
        checkpointing must find the routing of the forward; reentrant checkpointing cannot be checked.

        Arguments:
            x: `[T, H]`, any T (0 included, unequal between ranks); any float dtype, or uint8, int8, float8, int16,
                int32, int64 rows, which pass through as they are.
            topk_idx: `[T, K]` int32 or int64, global expert ids; -1 = no expert, anywhere. An expert named twice by
                one token gets two rows. None exactly if `handle` is given.
            topk_weights: `[T, K]` floating point or None: travel with the rows, in float32 (float64 beside float64
                rows); not read where `topk_idx` is -1. Given on all ranks or on none.
            mode: `throughput`: sizes are exchanged first, memory is what arrives, any T. `low_latency`: one hop and
                shapes that depend only on the communicator's arguments, for T up to `max_tokens_per_rank`. Between
                domains of GPUs autograd cannot record it.
            layout: `expert_major` (default of throughput): one row per route, by local expert, source rank, source
                token, k; low latency: followed by zero rows up to a fixed N. `slab` (low latency only, and its
                default): the same rows in one slab per local expert. `flat` (throughput only): one row per token and
                rank, by source rank, source token.
            expert_alignment: expert_major: each local expert's rows are padded with zero rows to a multiple of it.
            capacity: throughput only: N, whatever arrives, for shapes that do not change; what arrives is followed by
                zero rows, of id -1 and weight 0. Equal on all ranks. None: what arrives (expert_alignment included).
                CUDA tensors, where all ranks address each other's memory: by kernels alone, with the backward, so that
                a CUDA graph can hold them; what does not fit, ids that are none, and a recompute that routes otherwise,
                the device finds, and `check` raises.
            handle: of an earlier dispatch: same routing, layout, alignment and capacity again, without exchanging
                counts (but where kernels alone make it); `mode`, `layout` and `expert_alignment` are not read then.

        Returns:
            What arrived here; see `Received`.

        Raises:
            ValueError, TypeError: a bad argument; the peers learn that this rank refused the call.
            MemoryLimitExceeded: some rank would receive too much; raised on all ranks, nothing is received.
            CapacityExceeded: more rows for some rank than `capacity`; likewise.
            RoutingChanged: a recompute routes otherwise than the forward; the other ranks raise PeerFailed.
            CallMismatch, PeerTimeout, PeerLost, PeerFailed: the ranks did not all make the same call in time.
        """
        layout = layout or ("slab" if mode == "low_latency" else "expert_major")
        if is_traced():
            options = (mode, layout, expert_alignment, capacity, handle)
            return functional.dispatch(self._exchanger, x, topk_idx, topk_weights, *options)
        recording = is_recording(x, topk_weights)
        call = self._exchanger.begin_dispatch(
            *(x, topk_idx, topk_weights, mode, layout, expert_alignment, capacity, handle),
            make_room=True,
            recording=recording,
        )
        return self._received(call, x, topk_weights)

    def dispatch_async(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        mode: str = "throughput",
        layout: Layout | None = None,
        expert_alignment: int = 1,
        capacity: int | None = None,
        handle: Handle | None = None,
    ) -> Work[Received]:
        """Begins a `dispatch`; `work.wait()` gives what it returns. `x` must not change before.

        Raises:
            TooManyInFlight: `max_in_flight` calls are outstanding already.
            As `dispatch`; errors of the exchange come from `wait`.
        """
        layout = layout or ("slab" if mode == "low_latency" else "expert_major")
        if is_traced():
            options = (mode, layout, expert_alignment, capacity, handle)
            return Work.done_with(functional.dispatch(self._exchanger, x, topk_idx, topk_weights, *options))
        recording = is_recording(x, topk_weights)
        call = self._exchanger.begin_dispatch(
            *(x, topk_idx, topk_weights, mode, layout, expert_alignment, capacity, handle),
            recording=recording,
        )
        return Work(self._exchanger.session, call, lambda: self._received(call, x, topk_weights))

    def combine(
        self, y: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None, *, reduce: Reduce = "exact"
    ) -> torch.Tensor:
        """Brings the experts' rows home and sums them per token. Collective; differentiable in both tensors.

        A token's routes are added in ascending k (flat: its ranks' rows in ascending rank), in float32 (float64 for
        float64), each product and sum rounded by itself, and the sum rounded once to the dtype of `y`: the same bits
        over every transport and any number of ranks.

        Arguments:
            y: `[N, H]` (slab: `[E_local, capacity, H]`): row n is the expert's output for row n of `received.x`;
                padding rows are not read. float64, float32, bfloat16 or float16. What lies in memory of
                `combine_buffer` (or is `received.x` itself) is not copied; in low-latency mode peers may read it until
                this rank has made `2 * max_in_flight` further calls, and it must not be written to before.
            handle: of the dispatch.
            topk_weights: `[T, K]` floating point: the sum is of weight * row; None: of the rows. expert_major only. On
                all ranks or on none. Not read where `topk_idx` is -1, where its gradient is 0.
            reduce: `exact`: the order above. `per_host`: between hosts, a token's rows of each domain (see `topology`)
                are summed there like that, rounded to the dtype of `y`, and these sums are added at home in ascending
                domain, in float32 (float64), rounded once: one row per token and domain crosses the link. The same
                bits each time, but not those of another topology. Equal on all ranks. CUDA tensors: `exact` only, where
                a given topology has several domains that address each other's memory, and in low-latency mode.

        Returns:
            `[T, H]`, dtype of `y`; zero for a token without routes.

        Raises:
            As `dispatch`.
        """
        if is_traced():
            return functional.combine(rows_of(y, handle), handle, topk_weights, reduce)
        recording = is_recording(y, topk_weights)
        y = rows_of(y, handle) if recording else y
        call = self._exchanger.begin_combine(
            y, handle, topk_weights, make_room=True, recording=recording, reduce=reduce
        )
        return self._combined(call, y, handle, topk_weights)

    def combine_async(
        self, y: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None, *, reduce: Reduce = "exact"
    ) -> Work[torch.Tensor]:
        """Begins a `combine`; `work.wait()` gives what it returns. `y` must not change before.

        Raises:
            TooManyInFlight: `max_in_flight` calls are outstanding already.
            As `combine`; errors of the exchange come from `wait`.
        """
        if is_traced():
            return Work.done_with(functional.combine(rows_of(y, handle), handle, topk_weights, reduce))
        recording = is_recording(y, topk_weights)
        y = rows_of(y, handle) if recording else y
        call = self._exchanger.begin_combine(y, handle, topk_weights, recording=recording, reduce=reduce)
        return Work(self._exchanger.session, call, lambda: self._combined(call, y, handle, topk_weights))

    def combine_buffer(self, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the experts' outputs that peers can read where it is, so that `combine` copies nothing.

        Arguments:
            handle: of the dispatch.
            dtype: of the rows.

        Returns:
            `[N, H]` (slab: `[E_local, capacity, H]`), uninitialised; its memory returns when the last tensor on it
            dies, and in low-latency mode not before peers can no longer read it.

        Raises:
            MemoryLimitExceeded: there is no memory for it.
            ValueError: a graph is being captured, which would write to memory that has gone to others.
        """
        rows = self._exchanger.combine_buffer(handle, dtype)
        return rows.view(-1, handle.capacity, self.hidden) if handle.layout == "slab" else rows

    def trim(self) -> int:
        """Gives receive memory that is not in use back to the system; returns the bytes. Not collective.

        What peers may write to over RDMA is asked back from them, and goes with a later call.
        """
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
        if not getattr(self, "_closed", True) and not self._exchanger.is_forked:
            self.close()  # first: a warning may be an error
            warnings.warn(f"{self!r} was not closed; use it as a context manager", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return (
            f"Communicator(rank={self.rank}, num_ranks={self.num_ranks}, num_experts={self.num_experts}, "
            f"hidden={self.hidden}, num_topk={self.num_topk}, transport={self.transport_name!r})"
        )

    # -- what a call gives -------------------------------------------------------------------------------------------

    def _received(self, call: Call, x: torch.Tensor, topk_weights: torch.Tensor | None) -> Received:
        arrival: Arrival = self._exchanger.finish(call)
        handle = self._exchanger.handle(arrival)
        rows, weights = arrival.x, arrival.topk_weights
        if call.recorded:
            self._exchanger.remember(handle)
            rows, weights = record_dispatch(x, topk_weights, *arrival.flat(), handle)
        return received_of(rows, weights, arrival.topk_idx, arrival.num_tokens_per_expert, arrival.offsets, handle)

    def _combined(self, call: Call, y: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None) -> torch.Tensor:
        returned: Returned = self._exchanger.finish(call)
        if not call.recorded:
            return returned.x
        sums, _ = record_combine(rows_of(y, handle), topk_weights, None, returned.x, None, handle)
        return sums

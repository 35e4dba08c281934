"""Below autograd: checks a call's arguments and hands it to the algorithms. What `Communicator` and the torch operators
share; found by its id, because operators can only be given numbers.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any

import torch

from moecomm.algorithms.base import Algorithm, Arrival, Returned, Session
from moecomm.algorithms.calls import Call
from moecomm.algorithms.plan import Layout
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation
from moecomm.checks import Found, check_capacity, check_combine, check_dispatch, check_handle, check_layout, look_of
from moecomm.codecs.base import Codec, RowFormat
from moecomm.errors import CommunicatorClosed, RoutingChanged
from moecomm.forks import forks
from moecomm.handle import Handle
from moecomm.kernels.base import weights_dtype
from moecomm.placement import Placement
from moecomm.recompute import RoutingLog, compared, is_recomputing

__all__ = ["Exchanger", "find_exchanger"]

_ids = itertools.count()
_live: weakref.WeakValueDictionary[int, Exchanger] = weakref.WeakValueDictionary()


def find_exchanger(exchanger_id: int) -> Exchanger:
    """The exchanger with this id.

    Raises:
        CommunicatorClosed: if it is no longer there.
    """
    found = _live.get(exchanger_id)
    if found is None:
        raise CommunicatorClosed(f"communicator {exchanger_id} was closed before the call")
    return found


class Exchanger:
    """The calls of one communicator, without autograd.

    Arguments:
        session: carries them.
        codec: number format of rows on the wire.
        placement: which rank hosts which expert.
        rank: mine.
        hidden: H.
        max_topk: largest K.

    Attributes:
        id: number of the communicator in this process.
        num_local_experts: E_local.
        sizes: R, E, E_local, and how many words a stamp has beyond its first two.
    """

    def __init__(
        self, session: Session, codec: Codec, placement: Placement, *, rank: int, hidden: int, max_topk: int
    ) -> None:
        self.session = session
        self.num_local_experts = len(placement.local_experts(rank))
        sizes = placement.num_ranks, placement.num_experts, self.num_local_experts
        self.sizes = (*sizes, session.num_crossings)
        self.id = next(_ids)
        self._kernels = session.kernels
        self._device = session.device.torch_device
        is_far = session.topology.num_domains > 1
        self._is_exact_only = is_far and not session.device.is_host and not session.num_crossings
        self._codec = codec
        self._hidden = hidden
        self._limits: dict[str, Any] = {"hidden": hidden, "max_topk": max_topk, "device": self._device}
        self._placement = placement
        self._dispatches: Found[tuple[Algorithm, int, RowFormat]] = Found()
        self._combines: Found[tuple[Algorithm, RowFormat]] = Found()
        self._log = RoutingLog()
        self._closed = False
        self._pid = os.getpid()
        self._num_forks = forks.count
        forks.watch()
        _live[self.id] = self

    def capacity(self, mode: str, layout: str, expert_alignment: int) -> int:
        """Rows of a dispatch whose shape is always fixed (slab: per expert); 0 = as many as arrive."""
        algorithm = self.session.algorithms.get(mode)
        return 0 if algorithm is None else algorithm.capacity(layout, expert_alignment)

    def begin_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        mode: str,
        layout: Layout,
        expert_alignment: int,
        capacity: int | None,
        handle: Handle | None,
        *,
        make_room: bool = False,
        recording: bool = False,
        is_hosted: bool = False,
    ) -> Call:
        """Checks the arguments of `Communicator.dispatch` and begins it.

        Arguments:
            make_room: if need be, first finish the oldest call in flight.
            recording: autograd records what the call gives.
            is_hosted: it is an operator's, whose handle is on the host, and autograd may record that.
        """
        self._admit(Operation.DISPATCH, make_room)
        try:
            if handle is None:
                options = (mode, layout, expert_alignment, type(expert_alignment), capacity, type(capacity))
                looks = (options, look_of(x), look_of(topk_idx), look_of(topk_weights))
                try:
                    found = self._dispatches.get(looks)
                except TypeError:  # an option cannot be hashed, and the checks say which
                    found = None
                if found is None:
                    check_layout(layout, expert_alignment, mode, capacity)
                    check_dispatch(x, topk_idx, topk_weights, **self._limits)
                    found = self._dispatches.keep(looks, self._terms(x, mode, layout, expert_alignment, capacity))
                algorithm, num_rows, row_format = found
                assert topk_idx is not None
                topk_idx = topk_idx if topk_idx.is_contiguous() else topk_idx.contiguous()
                form = (topk_idx, layout, expert_alignment)
                routing = Routing(*form, capacity=num_rows, recording=recording, is_hosted=is_hosted, mode=mode)
                if (recording or is_hosted) and is_recomputing():
                    who = {"is_hosted": is_hosted, "recording": recording, "is_fixed": capacity is not None}
                    if not algorithm.is_by_device(None, **who):  # else the device finds out, in the backward
                        self._check_recompute(topk_idx)
            else:
                if topk_idx is not None:
                    raise ValueError("topk_idx must be None when a handle is given: the handle holds the routing")
                algorithm, routing, row_format = self._known(handle, x, topk_weights, self._hidden, recording)
                if capacity is not None:
                    check_capacity(capacity, handle)
            x = x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()
            weights = None if topk_weights is None else _kept(topk_weights, x.dtype)
        except Exception as error:
            who = {"is_hosted": is_hosted, "recording": recording, "is_fixed": capacity is not None}
            self._refuse(Operation.DISPATCH, error, mode, handle, **who)
            raise
        return algorithm.begin_dispatch(x, routing, row_format, weights)

    def _terms(
        self, x: torch.Tensor, mode: str, layout: Layout, expert_alignment: int, capacity: int | None
    ) -> tuple[Algorithm, int, RowFormat]:
        """Who carries a dispatch, how many rows its shape has (0 = as many as arrive), and how its rows are written."""
        algorithm = self.session.algorithms[mode]
        algorithm.check_size(x.shape[0])
        num_rows = algorithm.capacity(layout, expert_alignment) if capacity is None else capacity
        row_format = self._codec.row_format(self._hidden, x.dtype)
        algorithm.check_rows(layout, num_rows, row_format)
        return algorithm, num_rows, row_format

    def _refuse(
        self,
        operation: Operation,
        error: Exception,
        mode: str,
        handle: Any,
        *,
        is_hosted: bool = False,
        recording: bool = False,
        is_fixed: bool = False,
    ) -> None:
        """Lets the peers know that this rank does not make a call."""
        routing = handle.routing if isinstance(handle, Handle) else None
        known_mode = mode if routing is None else handle.mode
        algorithm = self.session.algorithms.get(known_mode) if isinstance(known_mode, str) else None
        who = {"is_hosted": is_hosted, "recording": recording, "is_fixed": is_fixed}
        by_device = algorithm is not None and algorithm.is_by_device(routing, **who)
        (self.session.refuse_by_device if by_device else self.session.refuse)(operation, error)

    def _admit(self, operation: Operation, make_room: bool) -> None:
        """Before the arguments are looked at, which may be wrong on one rank only: is there room for a call?"""
        if self._closed or forks.count != self._num_forks:
            self._check_open()
        if make_room:
            self.session.make_room()
        else:
            self.session.check_room(operation)

    def _known(
        self, handle: Handle, x: torch.Tensor, topk_weights: torch.Tensor | None, hidden: int, recording: bool
    ) -> tuple[Algorithm, Routing, RowFormat]:
        """Who carries what goes the way of a handle, the way, and how rows are written; all checked."""
        check_handle(handle, self.id)
        limits = self._limits | {"hidden": hidden}
        check_dispatch(x, handle.topk_idx, topk_weights, **limits, num_tokens=handle.num_tokens)
        algorithm, row_format = self.session.algorithms[handle.mode], self._codec.row_format(hidden, x.dtype)
        algorithm.check_rows(handle.layout, handle.capacity, row_format)
        return algorithm, _routing(handle, recording), row_format

    def begin_combine(
        self,
        y: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        *,
        values: torch.Tensor | None = None,
        make_room: bool = False,
        recording: bool = False,
        may_change: bool = False,
        reduce: str = "exact",
    ) -> Call:
        """Checks the arguments of `Communicator.combine` and begins it.

        Arguments:
            reduce: as in `Communicator.combine`.
            values: `[N]` (flat: `[N, K]`), also brought home, route by route; with them `y` may be `[N, 0]`.
            make_room, recording: as in `begin_dispatch`.
            may_change: `y` may be written to as soon as the call is finished here.
        """
        self._admit(Operation.COMBINE, make_room)
        try:
            check_handle(handle, self.id)
            per_host = reduce == "per_host"
            if not per_host and reduce != "exact":
                raise ValueError(f"reduce: unknown {reduce!r}; available: exact, per_host")
            if per_host and self._is_exact_only:
                raise ValueError(
                    f"reduce: 'per_host' sums where the rows are; those on {self._device.type} whose domains address "
                    "each other's memory are read one by one; use 'exact'"
                )
            routing = handle.routing
            form = (routing.mode, handle.num_rows, routing.layout, routing.capacity, routing.topk_idx.shape)
            looks = (form, look_of(y), look_of(topk_weights), values is None)
            found = self._combines.get(looks)
            if found is None:
                hidden = self._width(y, values)
                check_combine(y, topk_weights, handle=handle, hidden=hidden, device=self._device)
                terms = (self.session.algorithms[handle.mode], self._codec.row_format(hidden, y.dtype))
                terms[0].check_rows(handle.layout, handle.capacity, terms[1])
                found = self._combines.keep(looks, terms)
            algorithm, row_format = found
            y = y if y.is_contiguous() else y.contiguous()
            topk_weights = None if topk_weights is None else _kept(topk_weights, y.dtype)
            values = None if values is None else _kept(values, y.dtype)
        except Exception as error:
            self._refuse(Operation.COMBINE, error, "throughput", handle, recording=recording or values is not None)
            raise
        return algorithm.begin_combine(
            y,
            _routing(handle, recording),
            row_format,
            topk_weights=topk_weights,
            values=values,
            may_change=may_change,
            per_host=per_host,
        )

    def _width(self, rows: torch.Tensor, values: torch.Tensor | None) -> int:
        """The columns that rows must have: H, or none where only values travel."""
        return 0 if values is not None and rows.dim() == 2 and rows.shape[1] == 0 else self._hidden

    def finish(self, call: Call) -> Any:
        """Carries a call to its end and gives its result or raises its error."""
        return self.session.finish(call)

    def combine(
        self,
        y: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        *,
        values: torch.Tensor | None = None,
        may_change: bool = False,
        reduce: str = "exact",
    ) -> Returned:
        """`begin_combine` and `finish` in one."""
        call = self.begin_combine(
            y, handle, topk_weights, values=values, make_room=True, may_change=may_change, reduce=reduce
        )
        returned: Returned = self.finish(call)
        return returned

    def dispatch_again(self, x: torch.Tensor, topk_weights: torch.Tensor | None, handle: Handle) -> Arrival:
        """A dispatch with a known routing; with weights `x` may be `[T, 0]`."""
        self._admit(Operation.CACHED_DISPATCH, make_room=True)
        try:
            hidden = self._width(x, topk_weights)
            algorithm, routing, row_format = self._known(handle, x, topk_weights, hidden, recording=False)
            x = x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()
            weights = None if topk_weights is None else _kept(topk_weights, x.dtype)
        except Exception as error:
            self._refuse(Operation.CACHED_DISPATCH, error, "throughput", handle)
            raise
        call = algorithm.begin_dispatch(x, routing, row_format, weights)
        arrival: Arrival = self.finish(call)
        return arrival

    def weighted_adjoint(
        self, grad: torch.Tensor, y: torch.Tensor, topk_weights: torch.Tensor, handle: Handle
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the rows `[N, H]` and the weights `[T, K]` of a weighted combine.

        The gradients of its sums and the weights meet the experts' outputs where those are; one value per route comes
        home.
        """
        arrival = self.dispatch_again(grad, topk_weights, handle)
        rows, weights = arrival.flat()
        assert weights is not None
        grad_y, products = self._kernels.scale_dot(rows, y.contiguous(), weights)
        returned = self.combine(products.new_empty((handle.num_rows, 0)), handle, values=products)
        assert returned.values is not None
        return grad_y, returned.values

    def handle(self, arrival: Arrival) -> Handle:
        """The handle of what arrived."""
        shape = arrival.x.shape
        return Handle(arrival.routing, shape[0] if len(shape) == 2 else shape[0] * shape[1], self.id)

    # -- recompute under activation checkpointing --------------------------------------------------------------------

    def remember(self, handle: Handle) -> None:
        """Notes the routing of a dispatch that a recompute may repeat, if the host knows it."""
        if not handle.is_on_device:
            self._log.add(handle.stamp.tolist()[1])

    def _check_recompute(self, topk_idx: torch.Tensor) -> None:
        """Raises RoutingChanged if no forward has routed like this."""
        placement = self._placement
        counts = torch.empty(placement.num_experts + placement.num_ranks, dtype=torch.int32)
        self._log.check(self.session.count_routes(topk_idx, placement, counts))

    def confirm(self, handle: Handle, recomputed: torch.Tensor, operation: Operation) -> Handle:
        """`recompute.compared`; where it raises, the peers learn that this rank gave up on the operation."""
        try:
            return compared(handle, recomputed)
        except RoutingChanged as error:
            self.give_up(handle, operation, error)
            raise

    def give_up(self, handle: Handle, operation: Operation, error: Exception) -> None:
        """Lets the peers know that this rank does not make a call of a backward."""
        self._refuse(operation, error, handle.mode, handle)

    def combine_buffer(self, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
        """See `Communicator.combine_buffer`."""
        self._check_open()
        check_handle(handle, self.id)
        return self.session.expose(
            handle.num_rows, self._codec.row_format(self._hidden, dtype), is_fixed=handle.mode == "low_latency"
        )

    def check(self) -> None:
        """See `Communicator.check`."""
        self._check_open()
        self.session.check()

    def trim(self) -> int:
        """See `Communicator.trim`."""
        self._check_open()
        return self.session.trim()

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        _live.pop(self.id, None)
        # A forked child shares memory with its parent's peers; its goodbye would be taken for the parent's.
        if not self.is_forked:
            self.session.close()

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a child process of the one that constructed it."""
        return forks.count != self._num_forks

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicatorClosed(f"communicator {self.id} was closed before the call")
        if self.is_forked:
            raise CommunicatorClosed(
                f"communicator {self.id} belongs to process {self._pid}, from which this one was forked; what it has "
                "received may be read here, but only the process that constructed it can make calls"
            )


def _routing(handle: Handle, recording: bool) -> Routing:
    return handle.routing._replace(recording=True) if recording else handle.routing


def _kept(topk_weights: torch.Tensor, rows: torch.dtype) -> torch.Tensor:
    """Weights as they are kept beside rows of this dtype: contiguous float32 (float64)."""
    dtype = weights_dtype(rows)
    if topk_weights.dtype is dtype and topk_weights.is_contiguous():
        return topk_weights
    return topk_weights.to(dtype).contiguous()

"""Below autograd: checks a call's arguments and hands it to the algorithms. What `Communicator` and the torch operators
share; found by its id, because operators can only be given numbers.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from moecomm.algorithms.base import Arrival, Returned, Session
from moecomm.algorithms.calls import Call
from moecomm.algorithms.plan import Layout
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation
from moecomm.checks import check_combine, check_dispatch, check_handle, check_layout
from moecomm.codecs.base import Codec
from moecomm.errors import CommunicatorClosed, RoutingChanged
from moecomm.handle import Handle, Received, received_of
from moecomm.kernels.base import weights_dtype
from moecomm.placement import Placement

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
        counts_shape: `(R, E + R)`, of a handle's counts.
    """

    def __init__(
        self, session: Session, codec: Codec, placement: Placement, *, rank: int, hidden: int, max_topk: int
    ) -> None:
        self.session = session
        self.num_local_experts = len(placement.local_experts(rank))
        self.counts_shape = (placement.num_ranks, placement.num_experts + placement.num_ranks)
        self.id = next(_ids)
        self._codec = codec
        self._hidden = hidden
        self._max_topk = max_topk
        self._kept_calls: dict[int, Call] = {}
        self._closed = False
        _live[self.id] = self

    def capacity(self, mode: str, layout: str, expert_alignment: int) -> int:
        """Rows of a dispatch of fixed shape (slab: per expert); 0 = as many as arrive."""
        return self.session.algorithms[mode].capacity(layout, expert_alignment)

    def begin_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        mode: str,
        layout: Layout,
        expert_alignment: int,
        handle: Handle | None,
        make_room: bool = False,
    ) -> Call:
        """Checks the arguments of `Communicator.dispatch` and begins it; `make_room`: if need be, first finishes the
        oldest call in flight."""
        self._check_open()
        if make_room:
            self.session.make_room()
        try:
            if handle is None:
                check_layout(layout, expert_alignment, mode)
                check_dispatch(x, topk_idx, topk_weights, hidden=self._hidden, max_topk=self._max_topk)
                assert topk_idx is not None
                algorithm = self.session.algorithms[mode]
                algorithm.check_size(x.shape[0])
                capacity = algorithm.capacity(layout, expert_alignment)
                routing = Routing(topk_idx, layout, expert_alignment, capacity=capacity)
            else:
                if topk_idx is not None:
                    raise ValueError("topk_idx must be None when a handle is given: the handle holds the routing")
                check_handle(handle, self.id)
                num_tokens = handle.num_tokens
                check_dispatch(
                    x,
                    handle.topk_idx,
                    topk_weights,
                    hidden=self._hidden,
                    max_topk=self._max_topk,
                    num_tokens=num_tokens,
                )
                algorithm = self.session.algorithms[handle.mode]
                routing = _routing(handle)
            row_format = self._codec.row_format(self._hidden, x.dtype)
        except (ValueError, TypeError) as error:
            self.session.refuse(Operation.DISPATCH, error)
            raise
        if x.stride(-1) != 1:
            x = x.contiguous()
        return algorithm.begin_dispatch(x, routing, row_format, _kept(topk_weights, x.dtype))

    def begin_combine(
        self, y: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None, make_room: bool = False
    ) -> Call:
        """Checks the arguments of `Communicator.combine` and begins it."""
        return self._begin_combine(y, handle, topk_weights, values=None, make_room=make_room)

    def _begin_combine(
        self,
        y: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None,
        *,
        values: torch.Tensor | None,
        make_room: bool,
    ) -> Call:
        self._check_open()
        if make_room:
            self.session.make_room()
        try:
            check_handle(handle, self.id)
            check_combine(
                y,
                topk_weights,
                num_rows=handle.num_rows,
                hidden=self._hidden,
                routes=handle.routes,
                layout=handle.layout,
            )
            row_format = self._codec.row_format(self._hidden, y.dtype)
        except (ValueError, TypeError) as error:
            self.session.refuse(Operation.COMBINE, error)
            raise
        weights = _kept(topk_weights, y.dtype)
        return self.session.algorithms[handle.mode].begin_combine(
            y.contiguous(), _routing(handle), row_format, topk_weights=weights, values=values
        )

    def combine_with_values(self, y: torch.Tensor, values: torch.Tensor, handle: Handle) -> Returned:
        """A combine without weights that also brings one value per received row (flat: K per row) home."""
        values = values.to(weights_dtype(y.dtype)).contiguous()
        returned: Returned = self.finish(self._begin_combine(y, handle, None, values=values, make_room=True))
        return returned

    def return_values(self, values: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Brings one value per received row home: `[N]` to `[T, K]`, 0 where there is no route. No rows travel."""
        self._check_open()
        self.session.make_room()
        rows = values.new_empty((handle.num_rows, 0))
        row_format = self._codec.row_format(0, values.dtype)
        call = self.session.algorithms[handle.mode].begin_combine(
            rows, _routing(handle), row_format, topk_weights=None, values=values
        )
        returned: Returned = self.finish(call)
        assert returned.values is not None
        return returned.values

    def finish(self, call: Call) -> Any:
        """Carries a call to its end and gives its result or raises its error."""
        return self.session.finish(call)

    def keep(self, call: Call) -> int:
        """Keeps a begun call for an operator, which can only be given the number that this returns."""
        self._kept_calls[call.sequence] = call
        return call.sequence

    def take(self, token: int) -> Call:
        """The call kept under this number."""
        return self._kept_calls.pop(token)

    def received(self, arrival: Arrival) -> Received:
        """What a dispatch brought, as the user gets it."""
        routing = arrival.routing
        assert routing.routes is not None and routing.counts is not None and routing.stamp is not None  # noqa: PT018
        handle = Handle(
            routing.routes,
            routing.topk_idx,
            routing.counts,
            routing.stamp,
            routing.layout,
            routing.expert_alignment,
            arrival.x.shape[0],
            self.id,
            routing.capacity,
            routing.origin,
        )
        return received_of(
            arrival.x, arrival.topk_weights, arrival.topk_idx, arrival.num_tokens_per_expert, arrival.offsets, handle
        )

    def check_same_routing(self, expected: torch.Tensor, handle: Handle) -> None:
        """Compares the routing that backward sees with the forward's.

        Raises:
            RoutingChanged: if they differ. The peers learn that this rank gave up.
        """
        if int(expected[1]) == int(handle.stamp[1]):
            return
        error = RoutingChanged(
            f"the routing of dispatch #{int(expected[0])} changed between forward and recompute (dispatch "
            f"#{int(handle.stamp[0])}): topk_idx differs, so gradients would be wrong. Keep the router outside the "
            "checkpointed region, or make it deterministic (dropout, jitter, a bias updated in between)"
        )
        self.session.refuse(Operation.COMBINE, error)
        raise error

    def combine_buffer(self, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
        """See `Communicator.combine_buffer`."""
        self._check_open()
        check_handle(handle, self.id)
        return self.session.expose(
            handle.num_rows, self._codec.row_format(self._hidden, dtype), is_fixed=handle.capacity > 0
        )

    def trim(self) -> int:
        """See `Communicator.trim`."""
        self._check_open()
        return self.session.trim()

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        _live.pop(self.id, None)
        self._kept_calls.clear()
        self.session.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicatorClosed(f"communicator {self.id} was closed before the call")


def _routing(handle: Handle) -> Routing:
    return Routing(
        handle.topk_idx,
        handle.layout,
        handle.expert_alignment,
        handle.routes,
        handle.counts,
        handle.stamp,
        handle.capacity,
        handle.origin,
    )


def _kept(topk_weights: torch.Tensor | None, rows: torch.dtype) -> torch.Tensor | None:
    """Weights as they are kept beside rows of this dtype: contiguous float32 (float64)."""
    return None if topk_weights is None else topk_weights.to(weights_dtype(rows)).contiguous()

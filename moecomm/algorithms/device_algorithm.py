"""Who makes the calls of an algorithm of a device: kernels alone, or where the host must know, another algorithm."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

import torch

from moecomm.algorithms.base import Algorithm
from moecomm.algorithms.calls import Call
from moecomm.algorithms.device_calls import DeviceJob
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation
from moecomm.codecs.base import RowFormat

__all__ = ["DeviceAlgorithm"]


class DeviceAlgorithm(Algorithm):
    """An algorithm whose calls kernels make alone, unless the host must know what comes of them.

    Attributes:
        dispatching, combining: what its calls are, in messages to the peers.
        exchange: what calls share.
        hosted: makes the calls that the host must know of.
    """

    dispatching: ClassVar[Operation]
    combining: ClassVar[Operation]
    exchange: Exchange
    hosted: Algorithm

    @abc.abstractmethod
    def make_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> DeviceJob:
        """A dispatch by kernels, for which everything is set aside; see `begin_dispatch`."""

    @abc.abstractmethod
    def make_combine(
        self,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        per_host: bool,
    ) -> DeviceJob:
        """A combine by kernels, for which everything is set aside; see `begin_combine`."""

    def begin_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> Call:
        known = None if routing.routes is None else routing
        who = {"is_hosted": routing.is_hosted, "recording": routing.recording}
        if not self.is_by_device(known, **who, is_fixed=routing.capacity > 0):
            return self.hosted.begin_dispatch(x, routing.known_to_host(), row_format, topk_weights)
        return self._begin(self.dispatching, lambda: self.make_dispatch(x, routing, row_format, topk_weights))

    def begin_combine(
        self,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        may_change: bool,
        per_host: bool = False,
    ) -> Call:
        who = {"is_hosted": routing.is_hosted, "recording": routing.recording or values is not None}
        if not self.is_by_device(routing, **who, is_fixed=False):
            return self.hosted.begin_combine(
                y,
                routing.known_to_host(),
                row_format,
                topk_weights=topk_weights,
                values=values,
                may_change=may_change,
                per_host=per_host,
            )

        def make() -> DeviceJob:
            return self.make_combine(
                y, routing, row_format, topk_weights=topk_weights, values=values, per_host=per_host
            )

        return self._begin(self.combining, make)

    def _begin(self, operation: Operation, make: Callable[[], DeviceJob]) -> Call:
        try:
            job = make()
        except Exception as error:  # there is no memory for what arrives, or for a copy
            self.exchange.refuse_by_device(operation, error)
            raise
        return self.exchange.begin_by_device(job)

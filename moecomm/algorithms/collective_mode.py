"""The two modes of the collective exchange."""

from __future__ import annotations

from typing import Protocol

import torch

from moecomm.algorithms.base import Algorithm
from moecomm.algorithms.calls import Call
from moecomm.algorithms.eager_sizes import EagerSizes
from moecomm.algorithms.routing import Routing
from moecomm.codecs.base import RowFormat

__all__ = ["CollectiveMode"]


class CollectiveCalls(Protocol):
    """What begins the calls of both modes."""

    def begin_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> Call:
        """As `Algorithm.begin_dispatch`."""
        ...

    def begin_combine(
        self,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        per_host: bool,
    ) -> Call:
        """As `Algorithm.begin_combine`."""
        ...


class CollectiveMode(Algorithm):
    """A mode of the collective exchange; the modes differ only in the shape of what arrives."""

    name = "collective"

    def __init__(self, session: CollectiveCalls, sizes: EagerSizes | None) -> None:
        self._session = session
        self._sizes = sizes

    def check_size(self, num_tokens: int) -> None:
        if self._sizes is not None:
            self._sizes.check(num_tokens)

    def capacity(self, layout: str, expert_alignment: int) -> int:
        return 0 if self._sizes is None else self._sizes.rows(layout, expert_alignment)

    def begin_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> Call:
        return self._session.begin_dispatch(x, routing, row_format, topk_weights)

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
        return self._session.begin_combine(
            y, routing, row_format, topk_weights=topk_weights, values=values, per_host=per_host
        )

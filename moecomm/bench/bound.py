"""The memory bound: the same rows moved by the plainest loops, with no routing, by the same processes at once.

    dispatch   every row of x is read once and written K times, one copy after the other, with streaming stores
    combine    every row that comes back is read once, in order, and one row per token is written

A dispatch that had nothing to decide and nobody to wait for would take as long as the first, a combine as the second.
With masked routes the copies per row are fewer, so the first is made of whole copies of x and a rest.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from moecomm import _C
from moecomm.bench.workload import Workload

__all__ = ["MemoryBound"]


@final
class MemoryBound:
    """The plain loops for one case.

    Arguments:
        workload: the rows; this rank moves as many as it has routes.
    """

    def __init__(self, workload: Workload) -> None:
        self._x = workload.inputs.x
        num_tokens, hidden = self._x.shape
        self._row_bytes = hidden * self._x.element_size()
        self._copies, self._rest = divmod(workload.payload.routed, num_tokens)
        # Zeros, so that the pages are there before anything is timed.
        self._rows = torch.zeros(workload.payload.routed, hidden, dtype=self._x.dtype)
        self._out = torch.zeros_like(self._x)

    def dispatch(self) -> Tensor:
        """Read each row of x once, write it as often as there are routes."""
        num_tokens = self._x.shape[0]
        target, source = self._rows.data_ptr(), self._x.data_ptr()
        _C.stream_scatter(target, source, self._rest, self._row_bytes, self._copies + 1)
        done = self._rest * self._row_bytes
        _C.stream_scatter(
            target + done * (self._copies + 1), source + done, num_tokens - self._rest, self._row_bytes, self._copies
        )
        return self._rows

    def combine(self) -> Tensor:
        """Read all rows, write one per token (copies of one that stays in the cache: no further reading)."""
        _C.stream_read(self._rows.data_ptr(), self._rows.nbytes)
        _C.stream_scatter(self._out.data_ptr(), self._x.data_ptr(), 1, self._row_bytes, self._out.shape[0])
        return self._out

"""Sums made at home in a combine between domains: tokens one after the other, as far as what rails answer has come.

What is left to do when the last answer comes is then no more than what it belongs to.

T tokens   H hidden   P slots of `routes`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moecomm.algorithms.rail_requests import Requests
from moecomm.algorithms.rails import tensor_at
from moecomm.codecs.base import RowFormat

__all__ = ["HomeSums"]


class HomeSums:
    """The sums of one rank's tokens.

    Arguments:
        requests: what was asked for; see `Requests` for the routes.
        near_routes: `[n, P]` int64 of the entries `requests.near`, into my own domain; None: there are none.
        row_format: of rows, one plane, and of answers.
        addresses: per plane and rank the address of row 0.
        answers: address of the first answer.
        topk_weights: `[T, K]`, applied at home to what rails have not weighed, or None.
    """

    def __init__(
        self,
        requests: Requests,
        near_routes: torch.Tensor | None,
        row_format: RowFormat,
        addresses: Sequence[Sequence[int]],
        answers: int,
        topk_weights: torch.Tensor | None,
    ) -> None:
        self._requests = requests
        self._near_routes = near_routes
        self._row_format = row_format
        self._addresses = addresses
        self._weights = topk_weights
        self._near_weights: torch.Tensor | None = None
        near_tokens, num_tokens = torch.empty(0, dtype=torch.int64), requests.routes.shape[0]
        if requests.near is not None:
            near_tokens, self._weights = requests.near.tokens, None  # what is added up at the end has been weighed
            self._near_weights = None if topk_weights is None else topk_weights[near_tokens]
        hidden, dtype = row_format.hidden, row_format.dtype
        self._near = torch.empty(len(near_tokens), hidden, dtype=dtype)
        self._out = torch.empty(num_tokens, hidden, dtype=dtype)
        self._answers = tensor_at(answers, dtype, (requests.num_rows, hidden))
        self._all_addresses = [[*where, answers, self._near.data_ptr()] for where in addresses]
        self._near_tokens = near_tokens.numpy()
        self._finished_tokens = requests.finished[0].numpy()
        self._num_summed = self._num_near = self._num_finished = 0

    def advance(self, num_answered: Sequence[int]) -> None:
        """Adds up the tokens for which all is here.

        Arguments:
            num_answered: of each of the requests' `entries`, how many, from the first on, have been answered.
        """
        end = self._out.shape[0]
        for one, num in zip(self._requests.entries, num_answered, strict=True):
            if num < len(one.tokens):
                end = min(end, int(one.tokens[num]))
        if end > self._num_summed:
            self._sum(self._num_summed, end)
            self._num_summed = end

    def finish(self) -> torch.Tensor:
        """Adds up what is left, for which all must be here; gives `[T, H]`, zero where a token has no route."""
        self.advance([len(one.tokens) for one in self._requests.entries])
        return self._out

    def _sum(self, begin: int, end: int) -> None:
        """Adds up the tokens from `begin` to `end`."""
        requests, reduce = self._requests, self._row_format.reduce
        if self._near_routes is not None:
            first, self._num_near = self._num_near, int(self._near_tokens.searchsorted(end))
            near = slice(first, self._num_near)
            weights = None if self._near_weights is None else self._near_weights[near]
            reduce(self._num_near - first, self._near_routes[near], self._addresses, weights, self._near[near])
        weights = None if self._weights is None else self._weights[begin:end]
        reduce(end - begin, requests.routes[begin:end], self._all_addresses, weights, self._out[begin:end])
        first, self._num_finished = self._num_finished, int(self._finished_tokens.searchsorted(end))
        if first < self._num_finished:
            tokens, answers = (one[first : self._num_finished] for one in requests.finished)
            self._out[tokens] = self._answers[answers]

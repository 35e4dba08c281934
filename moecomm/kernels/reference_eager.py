"""Low-latency kernels in plain torch over views of the addresses: slow, short, and what the others are compared with.

Shapes as in `moecomm.kernels.eager`. Rows are handled as bytes: `[n, row_bytes]` uint8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from moecomm.kernels.base import make_route
from moecomm.kernels.eager import Form, Home, Overflow, Sorted
from moecomm.kernels.reference import ReferenceRowKernels

__all__ = ["ReferenceEagerKernels"]

_LINE = 64


def _bytes_at(address: int, num_rows: int, row_bytes: int) -> Tensor:
    """A uint8 view `[num_rows, row_bytes]` of memory."""
    if num_rows * row_bytes == 0:
        return torch.empty((num_rows, row_bytes), dtype=torch.uint8)
    memory = (ctypes.c_uint8 * (num_rows * row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, row_bytes)


def _as_bytes(tensor: Tensor, row_bytes: int) -> Tensor:
    """`[n, row_bytes]` uint8: the tensor's memory, row by row."""
    if tensor.numel() == 0:
        return torch.empty((tensor.shape[0], row_bytes), dtype=torch.uint8)
    return tensor.contiguous().view(torch.uint8).reshape(-1, row_bytes)


def _starts(num_tokens: int, num_topk: int, value_bytes: int) -> tuple[int, int]:
    """Where a message's values and rows begin."""
    values = -(-num_tokens * num_topk * 4 // _LINE) * _LINE
    return values, values + -(-num_tokens * num_topk * value_bytes // _LINE) * _LINE


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


def _chose(ids: Tensor, expert_rank: Tensor, rank: int) -> Tensor:
    """`[T, K]` bool: the routes that lead to this rank."""
    return (ids >= 0) & (expert_rank[ids.clamp(min=0)] == rank)


class _Message:
    """One source's message. `ids` `[T, K]` int64; `values` `[T, K, value_bytes]` and `rows` `[n, row_bytes]` uint8;
    `row_of` `[T]`: which of the rows is a token's."""

    def __init__(self, home: Home, form: Form, window: int, num_tokens: int, is_shared: bool) -> None:
        num_topk, value_bytes = form.num_topk, form.value_bytes
        values, rows = _starts(num_tokens, num_topk, value_bytes)
        raw = _bytes_at(window, num_tokens, num_topk * 4).clone()
        self.ids = raw.view(torch.int32).reshape(num_tokens, num_topk).long()
        self.values = _bytes_at(window + values, num_tokens, num_topk * value_bytes).reshape(
            num_tokens, num_topk, value_bytes
        )
        if is_shared:
            assert home.domain_experts is not None
            has_row = _chose(self.ids, home.domain_experts, 1).any(dim=1)
        else:
            has_row = _chose(self.ids, home.expert_rank, home.rank).any(dim=1)
        self.row_of = has_row.cumsum(0) - 1
        self.rows = _bytes_at(window + rows, int(has_row.sum()), form.row_bytes)


@final
class ReferenceEagerKernels:
    """Reference low-latency kernels; see `moecomm.kernels.eager.EagerKernels` for what each does."""

    def send_eager(
        self, rows: Tensor, topk_idx: Tensor, weights: Tensor | None, expert_rank: Tensor, windows: Sequence[int]
    ) -> tuple[Tensor, int]:
        num_tokens, num_topk = topk_idx.shape
        counts = torch.empty(expert_rank.numel() + len(windows), dtype=torch.int32)
        fingerprint = ReferenceRowKernels().count_routes(topk_idx, expert_rank, len(windows), counts)
        copy = topk_idx.to(torch.int32, copy=True)
        value_bytes = 0 if weights is None else weights.element_size()
        row_bytes = rows.shape[1] * rows.element_size()
        values_start, rows_start = _starts(num_tokens, num_topk, value_bytes)
        for rank, window in enumerate(windows):
            _bytes_at(window, num_tokens, num_topk * 4).copy_(_as_bytes(copy, num_topk * 4))
            if weights is not None:
                width = num_topk * value_bytes
                _bytes_at(window + values_start, num_tokens, width).copy_(_as_bytes(weights, width))
            chosen = _as_bytes(rows, row_bytes)[_chose(topk_idx.long(), expert_rank, rank).any(dim=1)]
            _bytes_at(window + rows_start, *chosen.shape).copy_(chosen)
        return copy, fingerprint

    def receive_eager(
        self,
        home: Home,
        form: Form,
        windows: Sequence[int],
        num_tokens: Sequence[int],
        rows: int,
        values: int,
        used: Tensor,
    ) -> Sorted:
        rank, expert_rank, expert_local, tokens_per_expert, _, domain_sources = home
        num_experts, num_ranks = expert_rank.numel(), len(windows)
        shared = [False] * num_ranks if domain_sources is None else domain_sources.tolist()
        messages = [_Message(home, form, *message) for message in zip(windows, num_tokens, shared, strict=True)]
        counts = torch.zeros((num_ranks, num_experts + num_ranks), dtype=torch.int32)
        for source, message in enumerate(messages):
            named = message.ids[message.ids >= 0]
            counts[source, :num_experts] = torch.bincount(named, minlength=num_experts)
            for peer in range(num_ranks):
                counts[source, num_experts + peer] = _chose(message.ids, expert_rank, peer).any(dim=1).sum()
        totals: list[int] = counts[:, :num_experts].sum(dim=0).tolist()
        starts, ends = self._place(totals, form, expert_rank.tolist(), expert_local.tolist())

        before = counts[:rank, :num_experts].sum(dim=0).tolist()
        following = [start + earlier for start, earlier in zip(starts, before, strict=True)]
        routes = torch.full(messages[rank].ids.shape, -1, dtype=torch.int64)
        for t, experts in enumerate(messages[rank].ids.tolist()):
            for k, expert in enumerate(experts):
                if expert >= 0:
                    routes[t, k] = make_route(int(expert_rank[expert]), following[expert])
                    following[expert] += 1

        here = [e for e in range(num_experts) if int(expert_rank[e]) == rank]
        widths = (form.row_bytes, form.value_bytes if values else 0)
        end = 0
        for expert in here:
            local, filled = int(expert_local[expert]), starts[expert] + totals[expert]
            chosen = [m.rows[m.row_of[(m.ids == expert).nonzero()[:, 0]]] for m in messages]
            weights = [m.values[m.ids == expert] for m in messages]
            _write(rows, starts[expert], torch.cat(chosen), widths[0])
            _write(values, starts[expert], torch.cat(weights)[:, : widths[1]], widths[1])
            zero_to = starts[expert] + int(used[local]) if form.capacity else ends[expert]
            _zero((rows, values), filled, zero_to, widths)
            end = ends[expert]
            if form.capacity:
                used[local] = totals[expert]
        if not form.capacity:
            _zero((rows, values), end, int(used[0]), widths)
            used[0] = end
        arrived = torch.tensor([totals[e] for e in here], dtype=torch.int32)
        tokens_per_expert += arrived
        offsets = None if form.capacity else torch.tensor([ends[e] for e in here], dtype=torch.int32)
        return Sorted(counts, routes, arrived, offsets)

    @staticmethod
    def _place(
        totals: list[int], form: Form, expert_rank: list[int], expert_local: list[int]
    ) -> tuple[list[int], list[int]]:
        """Where each expert's rows begin and end (expert_major: padded) at its rank."""
        starts, ends = [], []
        filled: dict[int, int] = {}
        for expert, total in enumerate(totals):
            rank = expert_rank[expert]
            if form.capacity:
                if total > form.capacity:
                    raise Overflow(expert, total, form.capacity)
                start = expert_local[expert] * form.capacity
                end = start + total
            else:
                start = filled.get(rank, 0)
                end = start + _padded(total, form.alignment)
                if end > form.num_rows:
                    raise Overflow(rank, end, form.num_rows)
            filled[rank] = end
            starts.append(start)
            ends.append(end)
        return starts, ends

    def copy_expert_rows(
        self,
        out: int,
        rows: Tensor,
        row_bytes: int,
        counts: Tensor,
        local_experts: tuple[int, int],
        capacity: int,
        alignment: int,
    ) -> None:
        source = (
            _as_bytes(rows.reshape(-1), row_bytes) if rows.numel() else torch.empty((0, row_bytes), dtype=torch.uint8)
        )
        begin = 0
        for local, expert in enumerate(range(*local_experts)):
            total = int(counts[:, expert].sum())
            begin = local * capacity if capacity else begin
            _write(out, begin, source[begin : begin + total], row_bytes)
            begin += _padded(total, alignment)


def _write(base: int, first: int, rows: Tensor, row_bytes: int) -> None:
    """Writes `[n, row_bytes]` to row `first` and on."""
    _bytes_at(base + first * row_bytes, rows.shape[0], row_bytes).copy_(rows)


def _zero(bases: tuple[int, int], begin: int, end: int, widths: tuple[int, int]) -> None:
    for base, width in zip(bases, widths, strict=True):
        _bytes_at(base + begin * width, max(0, end - begin), width).zero_()

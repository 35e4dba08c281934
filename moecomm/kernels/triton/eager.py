"""Low-latency kernels in Triton; the message format is that of csrc/cpu/eager.h. Shapes as in `moecomm.kernels.eager`.

Nothing is fused yet: ids, weights and rows all move with the kernel that pushes rows, and a call waits for the device
to check ids (send) and to learn the counts (receive).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from moecomm.kernels.base import ROW_BITS
from moecomm.kernels.eager import Form, Home, Overflow, Sorted
from moecomm.kernels.triton.eager_messages import count_messages, row_sources
from moecomm.kernels.triton.fingerprint import checked_fingerprint
from moecomm.kernels.triton.plans import plan_by_expert, plan_by_rank
from moecomm.kernels.triton.push import push_address_rows, push_rows
from moecomm.kernels.triton.runtime import alignment_of, check_device

__all__ = ["TritonEagerKernels"]

_LINE = 64


class _Message(NamedTuple):
    """Addresses of a message's parts."""

    ids: int
    values: int
    rows: int


def _message(window: int, num_tokens: int, num_topk: int, value_bytes: int) -> _Message:
    values = window + -(-num_tokens * num_topk * 4 // _LINE) * _LINE
    return _Message(window, values, values + -(-num_tokens * num_topk * value_bytes // _LINE) * _LINE)


class _Block(NamedTuple):
    """Where the rows of each expert go.

    Attributes:
        starts: by expert, the first row at its rank.
        ends: by expert, behind the last one, padding included.
        spans: rows of mine that become zero, begin and end.
        used: what `used` becomes.
        mine: my experts, by local index.
    """

    starts: list[int]
    ends: list[int]
    spans: list[tuple[int, int]]
    used: list[int]
    mine: list[int]


@final
class TritonEagerKernels:
    """Low-latency kernels for CUDA tensors, and for CPU tensors where Triton interprets."""

    def send_eager(
        self, rows: Tensor, topk_idx: Tensor, weights: Tensor | None, expert_rank: Tensor, windows: Sequence[int]
    ) -> tuple[Tensor, int]:
        device = check_device("topk_idx", topk_idx)
        num_tokens, num_topk = topk_idx.shape
        fingerprint = checked_fingerprint(topk_idx, expert_rank, len(windows))
        copy = topk_idx.to(torch.int32, copy=True)
        value_bytes = 0 if weights is None else weights.element_size()
        parts = [_message(window, num_tokens, num_topk, value_bytes) for window in windows]
        bases = torch.zeros(len(windows), dtype=torch.int64, device=device)
        routes = plan_by_rank(copy, expert_rank, bases)
        everybody = torch.arange(len(windows), device=device).unsqueeze(0) << ROW_BITS
        if copy.numel():
            push_rows(copy.view(1, -1), everybody, [part.ids for part in parts])
            if weights is not None:
                push_rows(weights.view(1, -1), everybody, [part.values for part in parts])
        push_rows(rows, routes, [part.rows for part in parts])
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
        device = check_device("used", used)
        parts = [_message(w, n, form.num_topk, form.value_bytes) for w, n in zip(windows, num_tokens, strict=True)]
        begins = [sum(num_tokens[:source]) for source in range(len(windows) + 1)]
        ids = torch.empty(begins[-1], form.num_topk, dtype=torch.int32, device=device)
        _gather([part.ids for part in parts], num_tokens, form.num_topk * 4, ids)
        bounds = torch.tensor(begins, device=device)
        counts = count_messages(ids, bounds, home.expert_rank)
        num_experts = home.expert_rank.numel()
        totals: list[int] = counts[:, :num_experts].sum(dim=0).tolist()
        block = _place(totals, home, form, used.tolist())

        routes = plan_by_expert(ids, home.expert_rank, torch.tensor(block.starts, device=device))
        here = torch.where(routes >> ROW_BITS == home.rank, routes, -1)
        to_me = [0] * home.rank
        first_rows = torch.tensor([part.rows for part in parts], device=device)
        sources = row_sources(ids, bounds, home.expert_rank, home.rank, first_rows, form.row_bytes)
        if home.domain_experts is not None and home.domain_sources is not None:
            # Messages for my whole domain hold rows of its other ranks, too; those rows have no route here.
            elsewhere = (~home.domain_experts).to(torch.int32)
            of_domain = row_sources(ids, bounds, elsewhere, 0, first_rows, form.row_bytes)
            is_for_all = home.domain_sources.repeat_interleave(bounds.diff())
            sources = torch.where(is_for_all, of_domain, sources)
        alignment = alignment_of(form.row_bytes, *(part.rows for part in parts))
        push_address_rows(sources, alignment, form.row_bytes, here, [*to_me, rows])
        _zero(rows, form.row_bytes, block.spans, device)
        if values:
            numbers = [n * form.num_topk for n in num_tokens]
            places, alignment = _places([part.values for part in parts], numbers, form.value_bytes, device)
            push_address_rows(places, alignment, form.value_bytes, here.view(-1, 1), [*to_me, values])
            _zero(values, form.value_bytes, block.spans, device)

        used[: len(block.used)] = torch.tensor(block.used)
        arrived = torch.tensor([totals[e] for e in block.mine], dtype=torch.int32, device=device)
        home.tokens_per_expert.add_(arrived)
        offsets = None
        if not form.capacity:
            offsets = torch.tensor([block.ends[e] for e in block.mine], dtype=torch.int32, device=device)
        return Sorted(counts, routes[begins[home.rank] : begins[home.rank + 1]].clone(), arrived, offsets)

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
        device = check_device("rows", rows)
        spans, begin = [], 0
        for local, total in enumerate(counts[:, slice(*local_experts)].sum(dim=0).tolist()):
            begin = local * capacity if capacity else begin
            spans.append((begin, begin + total))
            begin += -(-total // alignment) * alignment
        places = _rows_of(spans, device)
        sources = rows.data_ptr() + places * row_bytes
        push_address_rows(sources, alignment_of(rows.data_ptr(), row_bytes), row_bytes, places[:, None], [out])


def _place(totals: list[int], home: Home, form: Form, used: list[int]) -> _Block:
    """Decides where all rows go.

    Raises:
        Overflow: as `receive_eager`.
    """
    starts, ends, spans, new_used = [], [], [], list(used)
    mine = [0] * home.tokens_per_expert.numel()
    filled: dict[int, int] = {}
    end_of_mine = 0
    experts = zip(totals, home.expert_rank.tolist(), home.expert_local.tolist(), strict=True)
    for expert, (total, rank, local) in enumerate(experts):
        if form.capacity:
            if total > form.capacity:
                raise Overflow(expert, total, form.capacity)
            start = local * form.capacity
            end = start + total
        else:
            start = filled.get(rank, 0)
            end = start + -(-total // form.alignment) * form.alignment
            if end > form.num_rows:
                raise Overflow(rank, end, form.num_rows)
            filled[rank] = end
        starts.append(start)
        ends.append(end)
        if rank == home.rank:
            mine[local] = expert
            spans.append((start + total, start + used[local] if form.capacity else end))
            if form.capacity:
                new_used[local] = total
            end_of_mine = end
    if not form.capacity:
        spans.append((end_of_mine, used[0]))
        new_used[0] = end_of_mine
    return _Block(starts, ends, [(begin, end) for begin, end in spans if begin < end], new_used, mine)


def _places(addresses: list[int], numbers: Sequence[int], row_bytes: int, device: torch.device) -> tuple[Tensor, int]:
    """The address of each of `numbers[i]` rows from `addresses[i]` on, and what divides them all."""
    parts = [torch.arange(n) * row_bytes + first for first, n in zip(addresses, numbers, strict=True)]
    return torch.cat(parts).to(device), alignment_of(row_bytes, *addresses)


def _gather(addresses: list[int], numbers: Sequence[int], row_bytes: int, out: Tensor) -> None:
    """Copies rows from `numbers[i]` rows at `addresses[i]`, one after the other, to `out`."""
    places, alignment = _places(addresses, numbers, row_bytes, out.device)
    routes = torch.arange(places.numel(), device=out.device).unsqueeze(1)
    push_address_rows(places, alignment, row_bytes, routes, [out.data_ptr()])


def _zero(base: int, row_bytes: int, spans: list[tuple[int, int]], device: torch.device) -> None:
    """Writes zeros to these rows."""
    places = _rows_of(spans, device)
    zeros = torch.zeros(1, row_bytes, dtype=torch.uint8, device=device).expand(places.numel(), row_bytes)
    push_rows(zeros, places[:, None], [base])


def _rows_of(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    """`[n]` int64: all rows of these spans."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(*span) for span in spans)]).to(device)

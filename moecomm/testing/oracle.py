"""The oracle: what dispatch and combine must give, computed in one place from the inputs of all ranks.

Written from the definition of the canonical order and from nothing else; it shares no code with the package's planning.

    T tokens of a rank, H hidden, K top-k, E experts over all ranks, R ranks, N rows that one rank receives

    expert_major    for each local expert, for each source rank, for each of its tokens, for each k: one row per route;
                    then zero rows up to a multiple of expert_alignment
    slab            the same, but then zero rows up to `capacity`, the same for each expert
    flat            for each source rank, for each of its tokens that chose any local expert: one row

With a capacity, expert_major and flat are followed by zero rows up to it.

Both functions are plain torch and differentiable, so autograd through them is the reference for gradients, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ReferenceReceived", "reference_combine", "reference_dispatch"]


@dataclass(frozen=True)
class ReferenceReceived:
    """What one rank receives.

    Attributes:
        x: `[N, H]`, slab: `[E_local, capacity, H]`, the rows; zero where no route is.
        topk_weights: `[N]`, slab: `[E_local, capacity]`, flat: `[N, K]`; float32 (float64 beside float64 rows); 0 where
            no route is; None if no weights were given.
        topk_idx: None, flat: `[N, K]` int32 local expert ids, -1 where the expert is elsewhere.
        num_tokens_per_expert: `[E_local]` int32, routes to each local expert.
        offsets: `[E_local]` int32, inclusive prefix sums of the counts rounded up to the alignment; expert_major
            only.
        sources: `[N, 3]` int64 (slab: N = E_local * capacity), source rank, token and k of each row; -1 for padding,
            and for k in flat.
    """

    x: Tensor
    topk_weights: Tensor | None
    topk_idx: Tensor | None
    num_tokens_per_expert: Tensor
    offsets: Tensor | None
    sources: Tensor


def reference_dispatch(
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None = None,
    *,
    num_experts: int,
    rank: int,
    layout: str = "expert_major",
    expert_alignment: int = 1,
    capacity: int = 0,
) -> ReferenceReceived:
    """What `rank` receives when every rank dispatches.

    Arguments:
        xs: by rank, `[T_r, H]`.
        topk_idxs: by rank, `[T_r, K]` int32 or int64, -1 = no expert.
        topk_weights: by rank, `[T_r, K]`; what stands at a -1 does not matter.
        num_experts: over all ranks, placed in contiguous blocks, the first E % R ranks hosting one more.
        rank: whose receive side.
        layout: "expert_major", "slab" or "flat".
        expert_alignment: pads the rows of each expert (expert_major).
        capacity: rows of each expert (slab), of the rank (0 = as many as arrive).

    Raises:
        ValueError: the layout is unknown, or there are more rows than `capacity`.
    """
    experts = _local_experts(num_experts, len(xs), rank)
    counts = _routes_per_expert(topk_idxs, num_experts)[experts.start : experts.stop]
    sources = _sources(topk_idxs, experts, layout, expert_alignment, capacity)
    source_rank, token, choice = sources.unbind(1)
    is_row = source_rank >= 0

    # All tokens of all ranks one below the other, and a zero row at the end for padding.
    first_token = torch.tensor([0, *(x.shape[0] for x in xs)]).cumsum(0)
    at = torch.where(is_row, first_token[source_rank.clamp_min(0)] + token, first_token[-1])
    rows = torch.cat([*xs, xs[0].new_zeros(1, xs[0].shape[1])])[at]

    num_topk = topk_idxs[0].shape[1]
    ids = torch.cat([*(idx.to(torch.int64) for idx in topk_idxs), torch.full((1, num_topk), -1)])[at]
    here = (ids >= experts.start) & (ids < experts.stop)
    weights = None
    if topk_weights is not None:
        kept = _exact(xs[0].dtype)
        table = torch.cat([*(w.to(kept) for w in topk_weights), torch.zeros(1, num_topk, dtype=kept)])[at]
        if layout == "flat":
            weights = torch.where(here, table, 0.0)
        else:
            chosen = table.gather(1, choice.clamp_min(0)[:, None])[:, 0]
            weights = torch.where(is_row, chosen, 0.0)
    if layout == "slab":
        rows = rows.reshape(len(experts), capacity, rows.shape[1])
        weights = None if weights is None else weights.reshape(len(experts), capacity)
    return ReferenceReceived(
        x=rows,
        topk_weights=weights,
        topk_idx=torch.where(here, ids - experts.start, -1).to(torch.int32) if layout == "flat" else None,
        num_tokens_per_expert=counts.to(torch.int32),
        offsets=_rounded_up(counts, expert_alignment).cumsum(0).to(torch.int32) if layout == "expert_major" else None,
        sources=sources,
    )


def reference_combine(
    ys: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    *,
    num_experts: int,
    rank: int,
    topk_weights: Tensor | None = None,
    layout: str = "expert_major",
    expert_alignment: int = 1,
    capacity: int = 0,
    domain_of: Sequence[int] | None = None,
) -> Tensor:
    """What `rank` gets back when every rank combines.

    Arguments:
        ys: by rank, `[N_r, H]`, slab: `[E_local, capacity, H]`, float64, float32, bfloat16 or float16, in the order of
            `reference_dispatch`.
        topk_idxs: by rank, as dispatched.
        num_experts, layout, expert_alignment, capacity: as dispatched.
        rank: whose tokens.
        topk_weights: `[T, K]`, the weights of this rank's own tokens (not for flat); None sums plainly.
        domain_of: by rank the number of its domain, `Topology.domain_of`: as with `reduce="per_host"`. None: as with
            `reduce="exact"`.

    Returns:
        `[T, H]`: per token the sum over its routes in ascending k (flat: over ranks, ascending), of w * y, product and
        sum each rounded to float32 (float64 for float64), starting from zero, rounded once to the dtype of `ys`. The
        weights are first rounded to that float32 or float64. With `domain_of` that is done for the rows of each domain
        alone, and the domains' sums are added in ascending domain, in float32 (float64), and rounded once more.
    """
    if layout == "flat" and topk_weights is not None:
        raise ValueError("topk_weights: rows of layout 'flat' are summed over experts already and cannot be weighted")
    if layout == "slab":
        ys = [y.flatten(0, 1) for y in ys]
    own = topk_idxs[rank]
    num_tokens, num_topk = own.shape
    # Where the row of each term of each token's sum is, in all rows of all ranks one below the other; last: a zero row.
    num_terms = len(ys) if layout == "flat" else num_topk
    num_rows = sum(y.shape[0] for y in ys)
    row_of = torch.full((num_tokens, num_terms), num_rows)
    first_row = 0
    for host, y in enumerate(ys):
        experts = _local_experts(num_experts, len(ys), host)
        sources = _sources(topk_idxs, experts, layout, expert_alignment, capacity)
        if y.shape[0] != sources.shape[0]:
            raise ValueError(f"ys[{host}] must have {sources.shape[0]} rows, got {y.shape[0]}")
        mine = (sources[:, 0] == rank).nonzero()[:, 0]
        column = torch.full_like(mine, host) if layout == "flat" else sources[mine, 2]
        row_of[sources[mine, 1], column] = first_row + mine
        first_row += y.shape[0]

    exact = _exact(ys[0].dtype)
    rows = torch.cat([*ys, ys[0].new_zeros(1, ys[0].shape[1])])
    nothing = torch.zeros(num_tokens, rows.shape[1], dtype=exact)
    if domain_of is None:
        domain_of = (0,) * len(ys)
    # Of each row of `rows`, its domain; the zero row at the end is in none.
    counts = torch.tensor([y.shape[0] for y in ys])
    domains = torch.cat([torch.tensor(list(domain_of)).repeat_interleave(counts), torch.tensor([-1])])
    total = nothing
    for domain in sorted(set(domain_of)):
        part = nothing
        for term in range(num_terms):
            row = torch.where(domains[row_of[:, term]] == domain, row_of[:, term], num_rows)
            addend = rows[row].to(exact)
            if topk_weights is not None:
                weight = torch.where(row < num_rows, topk_weights[:, term].to(exact), 0.0)
                addend = weight[:, None] * addend
            part = part + addend
        total = total + part.to(rows.dtype).to(exact)
    return total.to(rows.dtype)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows of this dtype are summed and their weights kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _local_experts(num_experts: int, num_ranks: int, rank: int) -> range:
    each, more = divmod(num_experts, num_ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def _sources(topk_idxs: Sequence[Tensor], experts: range, layout: str, expert_alignment: int, capacity: int) -> Tensor:
    """Source rank, token and k of every row, `[N, 3]`, in the canonical order; -1 for padding, and for k in flat."""
    if layout == "flat":
        rows = torch.cat([_flat_rows(source, idx, experts) for source, idx in enumerate(topk_idxs)])
        return _filled_up(rows, capacity)
    if layout not in ("expert_major", "slab"):
        raise ValueError(f"layout must be 'expert_major', 'slab' or 'flat', got {layout!r}")
    # nonzero lists by token, then k; so the routes are listed by source, token, k, and a stable sort keeps that order.
    routes = torch.cat([_routes_of(source, idx, experts) for source, idx in enumerate(topk_idxs)])
    local_expert, order = routes[:, 0].sort(stable=True)
    counts = torch.bincount(local_expert, minlength=len(experts))
    padded = torch.full_like(counts, capacity) if layout == "slab" else _rounded_up(counts, expert_alignment)
    if bool((counts > padded).any()):
        raise ValueError(f"capacity: {int(counts.max())} routes lead to one expert, and there are {capacity} rows")
    # Each row moves down by the padding of the experts before its own.
    padding_before = (padded - counts).cumsum(0) - (padded - counts)
    rows = torch.full((int(padded.sum()), 3), -1)
    rows[torch.arange(len(routes)) + padding_before[local_expert]] = routes[order, 1:]
    return rows if layout == "slab" else _filled_up(rows, capacity)


def _filled_up(rows: Tensor, capacity: int) -> Tensor:
    if 0 < capacity < len(rows):
        raise ValueError(f"capacity: the rank receives {len(rows)} rows, and there are {capacity}")
    return torch.cat([rows, torch.full((max(0, capacity - len(rows)), 3), -1)])


def _routes_of(source: int, idx: Tensor, experts: range) -> Tensor:
    """Local expert, source rank, token and k of each route of a rank to these experts, by token, then k."""
    token, choice = ((idx >= experts.start) & (idx < experts.stop)).nonzero().unbind(1)
    expert = idx[token, choice].to(torch.int64) - experts.start
    return torch.stack([expert, torch.full_like(token, source), token, choice], dim=1)


def _flat_rows(source: int, idx: Tensor, experts: range) -> Tensor:
    token = ((idx >= experts.start) & (idx < experts.stop)).any(dim=1).nonzero()[:, 0]
    return torch.stack([torch.full_like(token, source), token, torch.full_like(token, -1)], dim=1)


def _routes_per_expert(topk_idxs: Sequence[Tensor], num_experts: int) -> Tensor:
    chosen = torch.cat([idx[idx >= 0].to(torch.int64) for idx in topk_idxs])
    return torch.bincount(chosen, minlength=num_experts)


def _rounded_up(counts: Tensor, multiple: int) -> Tensor:
    return (counts + multiple - 1) // multiple * multiple

"""The contract of an exchange between domains: over any grid the oracle's bits, also where sums are made per host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from moecomm.algorithms.hops import Way
from moecomm.communicator import Communicator
from moecomm.groups import Group
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts.cases import Case, Inputs, cases_for, random_rows
from moecomm.testing.contracts.world import World
from moecomm.testing.oracle import ReferenceReceived, reference_combine, reference_dispatch
from moecomm.topology import Topology

__all__ = ["CHECKS", "refinements"]

_SUMMABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MOST_TOKENS = 64


def refinements(found: Topology) -> list[Topology]:
    """Grids that can be tried where `found` holds: itself, pairs, the last rank of each domain apart, single ranks."""
    sizes = [len(found.ranks_in(domain)) for domain in range(found.num_domains)]

    def split(part: Callable[[int, int], int]) -> Topology:
        """Ranks of a domain stay together where `part(local index, size)` is the same."""
        keys = [(domain, part(found.local_index(rank), sizes[domain])) for rank, domain in enumerate(found.domain_of)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return Topology(found.host_of, tuple(numbers[key] for key in keys))

    grids = [
        found,
        split(lambda index, _: index // 2),
        split(lambda index, size: index // max(1, size - 1)),
        split(lambda index, _: index),
    ]
    return [grid for place, grid in enumerate(grids) if grid not in grids[:place]]


def check_every_grid(world: World) -> None:
    """Over grids of any kind, over rails and from rank to rank: what arrives, exact sums, and sums per host."""
    for num_ranks in sorted({count for count in world.rank_counts if count == 2} | {world.several}):
        cases = [case for case in cases_for(num_ranks) if max(case.tokens) <= _MOST_TOKENS]
        world.run(_each_grid, num_ranks, cases)


def _each_grid(group: Group, transport: str, cases: Sequence[Case]) -> None:
    with _communicator(group, transport, cases[0], None) as communicator:
        found = communicator.topology
    for number, case in enumerate(cases):
        grids = refinements(found)
        grid = grids[number % len(grids)]
        try:
            has_fast = case.layout == "expert_major" and case.routing != "with_duplicates"
            with _communicator(group, transport, case, grid) as communicator:
                most = sum(case.tokens) * case.num_topk + case.num_experts * case.expert_alignment
                _exchange(communicator, case, 0)
                _exchange(communicator, case, 1, capacity=most)
                if has_fast:
                    _exchange(communicator, case, 2, mode="low_latency", layout="slab")
                    _exchange(communicator, case, 3, mode="low_latency", layout="expert_major")
            if has_fast and number % 2:
                with _communicator(group, transport, case, grid, "direct") as communicator:
                    _exchange(communicator, case, 4, mode="low_latency", layout="slab")
        except AssertionError as error:
            where = f"case '{case.name}', domains {grid.domain_of}, rank {group.rank}"
            raise AssertionError(f"{where}: {error}") from error


def _exchange(communicator: Communicator, case: Case, seed: int, **options: Any) -> None:
    rank, topology = communicator.rank, communicator.topology
    everyone = [case.inputs(one, seed) for one in range(case.num_ranks)]
    mine = everyone[rank]
    options.setdefault("layout", case.layout)
    if options["layout"] != "slab":
        options["expert_alignment"] = case.expert_alignment
    received = communicator.dispatch(mine.x, mine.topk_idx, mine.topk_weights, **options)
    handle = received.handle
    form = {
        "layout": handle.layout,
        "expert_alignment": handle.expert_alignment,
        "capacity": handle.capacity if handle.layout == "slab" else 0,
    }
    expected = [_expected(case, everyone, one, form) for one in range(case.num_ranks)]
    num_rows = expected[rank].x.shape[0]  # zero rows may follow
    weights = received.topk_weights
    assert weights is not None
    assert_bitwise_equal(received.x[:num_rows], expected[rank].x, "dispatch: x")
    assert_bitwise_equal(weights[:num_rows], expected[rank].topk_weights, "dispatch: topk_weights")
    again = communicator.dispatch(mine.x, None, mine.topk_weights, handle=handle)
    assert_bitwise_equal(again.x[:num_rows], expected[rank].x, "dispatch with a handle: x")
    if case.dtype not in _SUMMABLE:
        return
    ys = [random_rows(tuple(one.x.shape), case.dtype, f"y {seed} {r}") for r, one in enumerate(expected)]
    for one, wanted in zip(ys, expected, strict=True):
        one.view(-1, case.hidden)[wanted.sources[:, 0] < 0] = float("nan")  # padding must never be looked at
    y = torch.full_like(received.x, float("nan"))
    y[:num_rows] = ys[rank]
    buffer = communicator.combine_buffer(handle, case.dtype)
    buffer.view_as(y).copy_(y)
    for topk_weights in (None,) if handle.layout == "flat" else (None, mine.topk_weights):
        what = "weighted combine" if topk_weights is not None else "combine"
        exact = _expected_home(case, ys, everyone, rank, topk_weights, form, None)
        assert_bitwise_equal(communicator.combine(y, handle, topk_weights), exact, what)
        sums = _expected_home(case, ys, everyone, rank, topk_weights, form, topology.domain_of)
        got = communicator.combine(y, handle, topk_weights, reduce="per_host")
        assert_bitwise_equal(got, sums, f"{what} per host")
        got = communicator.combine(buffer.view_as(y), handle, topk_weights, reduce="per_host")
        assert_bitwise_equal(got, sums, f"{what} per host, of a combine_buffer")


def _communicator(
    group: Group, transport: str, case: Case, topology: Topology | None, algorithm: Way = "hierarchical"
) -> Communicator:
    return Communicator(
        group,
        num_experts=case.num_experts,
        hidden=case.hidden,
        num_topk=case.num_topk,
        max_tokens_per_rank=max(1, *case.tokens),
        transport=transport,
        topology=topology,
        algorithm=algorithm,
        timeout=timedelta(seconds=30),
    )


def _expected(case: Case, everyone: list[Inputs], rank: int, form: dict[str, Any]) -> ReferenceReceived:
    return reference_dispatch(
        [one.x for one in everyone],
        [one.topk_idx for one in everyone],
        [one.topk_weights for one in everyone],
        num_experts=case.num_experts,
        rank=rank,
        **form,
    )


def _expected_home(
    case: Case,
    ys: list[Tensor],
    everyone: list[Inputs],
    rank: int,
    topk_weights: Tensor | None,
    form: dict[str, Any],
    domain_of: Sequence[int] | None,
) -> Tensor:
    return reference_combine(
        ys,
        [one.topk_idx for one in everyone],
        num_experts=case.num_experts,
        rank=rank,
        topk_weights=topk_weights,
        domain_of=domain_of,
        **form,
    )


CHECKS: tuple[Callable[[World], None], ...] = (check_every_grid,)

"""The contract of an exchange between domains: over any grid the oracle's bits, also where sums are made per host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from moecomm.algorithms.hops import Way
from moecomm.communicator import Communicator
from moecomm.groups import Group
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts.cases import Case
from moecomm.testing.contracts.expected import expected_of
from moecomm.testing.contracts.world import World
from moecomm.topology import Topology

__all__ = ["CHECKS", "refinements"]

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
        cases = [case for case in world.cases(num_ranks) if max(case.tokens) <= _MOST_TOKENS]
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
    options.setdefault("layout", case.layout)
    if options["layout"] != "slab":
        options["expert_alignment"] = case.expert_alignment
    mine = case.inputs(rank, seed)
    received = communicator.dispatch(mine.x, mine.topk_idx, mine.topk_weights, **options)
    handle = received.handle
    expected = expected_of(case, seed, handle.layout, handle.capacity if handle.layout == "slab" else 0)
    arrived = expected.received[rank]
    num_rows = arrived.x.shape[0]  # zero rows may follow
    weights = received.topk_weights
    assert weights is not None
    assert_bitwise_equal(received.x[:num_rows], arrived.x, "dispatch: x")
    assert_bitwise_equal(weights[:num_rows], arrived.topk_weights, "dispatch: topk_weights")
    again = communicator.dispatch(mine.x, None, mine.topk_weights, handle=handle)
    assert_bitwise_equal(again.x[:num_rows], arrived.x, "dispatch with a handle: x")
    if not expected.ys:
        return
    y = torch.full_like(received.x, float("nan"))
    y[:num_rows] = expected.ys[rank]
    buffer = communicator.combine_buffer(handle, case.dtype)
    buffer.view_as(y).copy_(y)
    for topk_weights in (None,) if handle.layout == "flat" else (None, mine.topk_weights):
        what = "weighted combine" if topk_weights is not None else "combine"
        exact = expected.home(rank, topk_weights)
        assert_bitwise_equal(communicator.combine(y, handle, topk_weights), exact, what)
        sums = expected.home(rank, topk_weights, domain_of=topology.domain_of)
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


CHECKS: tuple[Callable[[World], None], ...] = (check_every_grid,)

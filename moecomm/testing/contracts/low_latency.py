"""The contract of low-latency calls: fixed shapes, and otherwise the same rows and sums as in throughput mode."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from moecomm.algorithms.plan import Layout
from moecomm.communicator import Communicator
from moecomm.groups import Group
from moecomm.handle import Received
from moecomm.testing.compare import assert_bitwise_equal, expect
from moecomm.testing.contracts.cases import Case
from moecomm.testing.contracts.expected import expected_of
from moecomm.testing.contracts.world import World
from moecomm.testing.oracle import ReferenceReceived

__all__ = ["CHECKS"]


def check_against_the_oracle(world: World) -> None:
    """Every case in both layouts, for every number of ranks, several times in a row in the same windows."""
    for num_ranks in world.rank_counts:
        cases = [case for case in world.cases(num_ranks) if case.layout == "expert_major" and _fits(case)]
        world.run(_each_case, num_ranks, cases)


def _fits(case: Case) -> bool:
    """Slabs hold every token once, and the memory of a fixed shape is for small batches."""
    return case.routing != "with_duplicates" and max(case.tokens) <= 64


def _each_case(group: Group, transport: str, cases: list[Case]) -> None:
    for case in cases:
        try:
            with _communicator(group, transport, case) as communicator:
                for seed in (0, 1, 2, 3):
                    _exchange(communicator, case, "expert_major" if seed % 2 else "slab", seed)
        except AssertionError as error:
            raise AssertionError(f"case '{case.name}', rank {group.rank} of {group.size}: {error}") from error


def _exchange(communicator: Communicator, case: Case, layout: Layout, seed: int) -> None:
    rank, mine = communicator.rank, case.inputs(communicator.rank, seed)
    options: dict[str, Any] = {"mode": "low_latency", "layout": layout}
    if layout == "expert_major":
        options["expert_alignment"] = case.expert_alignment
    received = communicator.dispatch(mine.x, mine.topk_idx, mine.topk_weights, **options)
    capacity = received.handle.capacity if layout == "slab" else 0  # grouped rows are compared without those beyond
    expected = expected_of(case, seed, layout, capacity)
    _compare(received, expected.received[rank], layout, "dispatch")
    pending = communicator.dispatch_async(mine.x, mine.topk_idx, mine.topk_weights, **options)
    _compare(pending.wait(), expected.received[rank], layout, "dispatch_async")
    if not expected.ys:
        return
    y = torch.full_like(received.x, float("nan"))
    y[: expected.ys[rank].shape[0]] = expected.ys[rank]
    for weights in (None, mine.topk_weights):
        what = "combine" if weights is None else "weighted combine"
        got = communicator.combine(y, received.handle, topk_weights=weights)
        assert_bitwise_equal(got, expected.home(rank, weights), what)


def check_shapes_do_not_depend_on_the_routing(world: World) -> None:
    """What is received has the same shape whatever is sent, so that a captured graph stays valid."""
    world.run(_shapes, world.several)


def _shapes(group: Group, transport: str) -> None:
    case = Case("shapes", (4,) * group.size, hidden=8, num_experts=6, num_topk=2)
    with _communicator(group, transport, case) as communicator:
        for layout in ("slab", "expert_major"):
            shapes = set()
            for num_tokens in (0, 1, 4):
                one = case.inputs(group.rank, seed=num_tokens)
                received = communicator.dispatch(
                    one.x[:num_tokens], one.topk_idx[:num_tokens], mode="low_latency", layout=_as_layout(layout)
                )
                shapes.add(tuple(received.x.shape))
            expect(len(shapes) == 1, f"{layout}: shapes {sorted(shapes)}")


def check_too_many_tokens_are_refused(world: World) -> None:
    """More tokens than a call can hold raise ValueError with both numbers; the communicator goes on working."""
    world.run(_too_many, world.several)


def _too_many(group: Group, transport: str) -> None:
    case = Case("too many", (9,) * group.size, hidden=4, num_experts=6, num_topk=2)
    one = case.inputs(group.rank)
    with _communicator(group, transport, case, max_tokens=8) as communicator:
        try:
            communicator.dispatch(one.x, one.topk_idx, mode="low_latency")
        except ValueError as error:
            expect("9" in str(error) and "8" in str(error), f"the message does not name both numbers: {error}")
        else:
            raise AssertionError("9 tokens were accepted where 8 fit")
        communicator.dispatch(one.x[:8], one.topk_idx[:8], mode="low_latency")


def _as_layout(name: str) -> Layout:
    return "slab" if name == "slab" else "expert_major"


def _communicator(group: Group, transport: str, case: Case, max_tokens: int | None = None) -> Communicator:
    return Communicator(
        group,
        num_experts=case.num_experts,
        hidden=case.hidden,
        num_topk=case.num_topk,
        max_tokens_per_rank=max_tokens or max(1, *case.tokens),
        transport=transport,
        timeout=timedelta(seconds=30),
    )


def _compare(received: Received, expected: ReferenceReceived, layout: Layout, what: str) -> None:
    what = f"{what}, {layout}"
    rows, weights = received.x, received.topk_weights
    assert weights is not None
    if layout == "expert_major":
        count = expected.x.shape[0]
        beyond = rows[count:].contiguous().view(torch.uint8)
        expect(not bool(beyond.any()) and not bool(weights[count:].any()), f"{what}: not zero beyond row {count}")
        rows, weights = rows[:count], weights[:count]
    assert_bitwise_equal(rows, expected.x, f"{what}: x")
    assert_bitwise_equal(weights, expected.topk_weights, f"{what}: topk_weights")
    for name in ("topk_idx", "num_tokens_per_expert", "offsets"):
        assert_bitwise_equal(getattr(received, name), getattr(expected, name), f"{what}: {name}")


CHECKS: tuple[Callable[[World], None], ...] = (
    check_against_the_oracle,
    check_shapes_do_not_depend_on_the_routing,
    check_too_many_tokens_are_refused,
)

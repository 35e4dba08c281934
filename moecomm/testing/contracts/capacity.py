"""The contract of `capacity`: throughput calls of fixed shape, and otherwise the same rows, sums and gradients."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from moecomm.communicator import Communicator
from moecomm.errors import CallMismatch, CapacityExceeded, MemoryLimitExceeded
from moecomm.groups import Group
from moecomm.handle import Handle, Received
from moecomm.testing.compare import assert_bitwise_equal, expect
from moecomm.testing.contracts.cases import Case, random_rows
from moecomm.testing.contracts.expected import Expected, expected_of
from moecomm.testing.contracts.world import World
from moecomm.testing.oracle import ReferenceReceived

__all__ = ["CHECKS"]

_MOST_TOKENS = 64


def check_against_the_oracle(world: World) -> None:
    """Every case, in just as many rows as the fullest rank needs and in more, in memory that holds poison."""
    for num_ranks in sorted({count for count in world.rank_counts if count == 2} | {world.several}):
        cases = [case for case in world.cases(num_ranks) if max(case.tokens) <= _MOST_TOKENS]
        world.run(_each_case, num_ranks, cases)


def _each_case(group: Group, transport: str, cases: list[Case]) -> None:
    for case in cases:
        try:
            with _communicator(group, transport, case) as communicator:
                for seed, spare in ((0, 0), (1, 3)):
                    _exchange(communicator, case, seed, spare)
        except AssertionError as error:
            raise AssertionError(f"case '{case.name}', rank {group.rank} of {group.size}: {error}") from error


def _exchange(communicator: Communicator, case: Case, seed: int, spare: int) -> None:
    rank, needed = communicator.rank, _most_rows(case, seed)
    capacity = max(needed + spare, case.expert_alignment)
    expected = expected_of(case, seed, capacity=capacity)
    mine, arrived = expected.inputs[rank], expected.received[rank]
    options: dict[str, Any] = {
        "layout": case.layout,
        "expert_alignment": case.expert_alignment,
        "capacity": capacity,
    }
    received = communicator.dispatch(mine.x, mine.topk_idx, mine.topk_weights, **options)
    handle = received.handle
    _compare(received, arrived, "dispatch")
    expect(handle.num_rows == handle.capacity == capacity, f"num_rows {handle.num_rows}, capacity {handle.capacity}")
    expect(handle.mode == "throughput", f"mode {handle.mode}")
    pending = communicator.dispatch_async(mine.x, mine.topk_idx, mine.topk_weights, **options)
    _compare(pending.wait(), arrived, "dispatch_async")
    again = communicator.dispatch(mine.x, None, mine.topk_weights, handle=handle)
    _compare(again, arrived, "dispatch with a handle")
    if expected.ys:
        _bring_home(communicator, case, expected, handle)
    # What is received next lands in this memory; none of it may show.
    for one in (received, again):
        one.x.view(torch.uint8).fill_(0xFF)
        if one.topk_idx is not None:
            one.topk_idx.fill_(7)


def _bring_home(communicator: Communicator, case: Case, expected: Expected, handle: Handle) -> None:
    rank = communicator.rank
    y = expected.ys[rank]
    buffer = communicator.combine_buffer(handle, case.dtype)
    buffer.copy_(y)
    for weights in (None, expected.inputs[rank].topk_weights) if case.layout == "expert_major" else (None,):
        home = expected.home(rank, weights)
        what = "combine" if weights is None else "weighted combine"
        assert_bitwise_equal(communicator.combine(y, handle, weights), home, what)
        assert_bitwise_equal(communicator.combine(buffer, handle, weights), home, f"{what} of a combine_buffer")


def _most_rows(case: Case, seed: int = 0) -> int:
    """Rows of the fullest rank."""
    return max(one.x.shape[0] for one in expected_of(case, seed).received)


def check_what_does_not_fit_is_refused_everywhere(world: World) -> None:
    """One row too many for one rank: CapacityExceeded on all, naming rank, rows and capacity; and they go on."""
    for layout in ("expert_major", "flat"):
        texts = world.run(_one_row_too_many, world.several, layout)
        expect(len(set(texts)) == 1, f"{layout}: the ranks tell different things: {texts}")


def _one_row_too_many(group: Group, transport: str, layout: str) -> str:
    case = _case("too many", group.size, layout)
    expected = expected_of(case)
    mine, rows = expected.inputs[group.rank], [one.x.shape[0] for one in expected.received]
    fullest, capacity = rows.index(max(rows)), max(rows) - 1
    with _communicator(group, transport, case) as communicator:
        for _ in range(2):
            text = ""
            try:
                communicator.dispatch(mine.x, mine.topk_idx, layout=case.layout, capacity=capacity)
                communicator.check()  # raises what only a device has found so far
            except CapacityExceeded as error:
                text = str(error).partition(": ")[2]
            for wanted in (f"{max(rows)} rows for rank {fullest}", f"room for {capacity}"):
                expect(wanted in text, f"'{wanted}' is not in '{text}'")
            received = communicator.dispatch(
                mine.x, mine.topk_idx, mine.topk_weights, layout=case.layout, capacity=capacity + 1
            )
            fitting = expected_of(case, capacity=capacity + 1).received[group.rank]
            _compare(received, fitting, "dispatch of what fits")
    return text


def check_gradients(world: World) -> None:
    """Gradients are those of the same calls without a capacity, bit for bit."""
    for layout in ("expert_major", "flat"):
        world.run(_gradients, world.several, layout)


def _gradients(group: Group, transport: str, layout: str) -> None:
    case = _case("gradients", group.size, layout)
    one = case.inputs(group.rank)
    results = []
    with _communicator(group, transport, case) as communicator:
        for capacity in (None, 8 * group.size):
            x = one.x.double().requires_grad_()
            weights = one.topk_weights.nan_to_num().requires_grad_()
            received = communicator.dispatch(x, one.topk_idx, weights, layout=case.layout, capacity=capacity)
            travelled = received.topk_weights
            assert travelled is not None
            gate = travelled[:, None] if travelled.dim() == 1 else travelled.sum(dim=1, keepdim=True)
            y = torch.sin(received.x) * (1.5 + gate)  # rows of zero give rows of zero, whose gradients go nowhere
            at_home = weights if layout == "expert_major" else None
            home = communicator.combine(y, received.handle, topk_weights=at_home)
            torch.autograd.backward((home * random_rows(tuple(home.shape), torch.float64, "g")).sum())
            assert x.grad is not None
            assert weights.grad is not None
            results.append((home.detach(), x.grad, weights.grad))
    for name, bare, fixed in zip(("result", "gradient of x", "gradient of topk_weights"), *results, strict=True):
        assert_bitwise_equal(fixed, bare, f"{layout}: {name}")


def check_mistakes_are_refused(world: World) -> None:
    """Values that are none, and capacities that differ between ranks, from the handle, or do not fit into memory."""
    world.run(_mistakes, world.several)


def _mistakes(group: Group, transport: str) -> None:
    case = _case("mistakes", group.size, "expert_major")
    mine, most = case.inputs(group.rank), 8 * group.size
    with _communicator(group, transport, case, memory_limit=1 << 20) as communicator:
        received = communicator.dispatch(mine.x, mine.topk_idx, capacity=most)
        whole = communicator.dispatch(mine.x, mine.topk_idx)
        wrong: list[tuple[type[Exception], dict[str, Any]]] = [
            (ValueError, {"topk_idx": mine.topk_idx, "capacity": 0}),
            (ValueError, {"topk_idx": mine.topk_idx, "capacity": -most}),
            (ValueError, {"topk_idx": mine.topk_idx, "capacity": 2**31}),
            (TypeError, {"topk_idx": mine.topk_idx, "capacity": True}),
            (TypeError, {"topk_idx": mine.topk_idx, "capacity": float(most)}),
            (ValueError, {"topk_idx": mine.topk_idx, "capacity": 7, "expert_alignment": 8}),
            (ValueError, {"topk_idx": mine.topk_idx, "capacity": most, "mode": "low_latency"}),
            (ValueError, {"handle": received.handle, "capacity": most + 1}),
            (ValueError, {"handle": whole.handle, "capacity": most}),
            (MemoryLimitExceeded, {"topk_idx": mine.topk_idx, "capacity": 1 << 20}),
        ]
        if group.size > 1:
            wrong.append((CallMismatch, {"topk_idx": mine.topk_idx, "capacity": most + group.rank}))
        for kind, options in wrong:
            try:
                communicator.dispatch(mine.x, **options)
                communicator.check()
            except kind as error:
                expect("capacity" in str(error) or kind is MemoryLimitExceeded, f"no word of the capacity: {error}")
            else:
                raise AssertionError(f"not refused: {options}")
        again = communicator.dispatch(mine.x, handle=received.handle, capacity=most)
        _compare(again, expected_of(case, capacity=most).received[group.rank], "dispatch after mistakes", bare=True)


def _case(name: str, num_ranks: int, layout: str) -> Case:
    return Case(
        name,
        (4,) * num_ranks,
        hidden=8,
        num_experts=2 * num_ranks + 1,
        num_topk=2,
        dtype=torch.float64,
        layout="flat" if layout == "flat" else "expert_major",
        routing="hot_expert",
    )


def _communicator(group: Group, transport: str, case: Case, memory_limit: int | None = None) -> Communicator:
    return Communicator(
        group,
        num_experts=case.num_experts,
        hidden=case.hidden,
        num_topk=case.num_topk,
        max_tokens_per_rank=max(1, *case.tokens),
        transport=transport,
        timeout=timedelta(seconds=30),
        memory_limit=memory_limit,
    )


def _compare(received: Received, expected: ReferenceReceived, what: str, *, bare: bool = False) -> None:
    for name in ("x", "topk_idx", "num_tokens_per_expert", "offsets", *(() if bare else ("topk_weights",))):
        got: Tensor | None = getattr(received, name)
        assert_bitwise_equal(got, getattr(expected, name), f"{what}: {name}")


CHECKS: tuple[Callable[[World], None], ...] = (
    check_against_the_oracle,
    check_what_does_not_fit_is_refused_everywhere,
    check_gradients,
    check_mistakes_are_refused,
)

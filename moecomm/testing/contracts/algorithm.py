"""The contract of an exchange: dispatch and combine give what the oracle gives, bit for bit, in every case."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moecomm.algorithms.plan import Layout
from moecomm.communicator import Communicator
from moecomm.groups import Group
from moecomm.handle import Received
from moecomm.testing.compare import assert_bitwise_equal, expect
from moecomm.testing.contracts.cases import Case, Inputs, random_rows
from moecomm.testing.contracts.expected import Expected, expected_of
from moecomm.testing.contracts.world import World
from moecomm.testing.oracle import ReferenceReceived

__all__ = ["CHECKS"]


def check_against_the_oracle(world: World) -> None:
    """Every case, for every number of ranks, twice in a row in memory that holds poison the second time."""
    for num_ranks in world.rank_counts:
        world.run(_each_case, num_ranks, world.cases(num_ranks))


def check_rows_of_many_pages(world: World) -> None:
    """Messages of several megabytes, where kernels take other paths."""
    tokens = tuple((350, 201, 0, 90)[rank % 4] for rank in range(world.several))
    case = Case("large", tokens, hidden=1537, num_experts=6, num_topk=4, expert_alignment=64)
    world.run(_each_case, world.several, [case], (0,))


def _each_case(group: Group, transport: str, cases: list[Case], seeds: tuple[int, ...] = (0, 1)) -> None:
    for case in cases:
        try:
            with _communicator(group, transport, case) as communicator:
                for seed in seeds:
                    _exchange(communicator, case, seed)
        except AssertionError as error:
            raise AssertionError(f"case '{case.name}', rank {group.rank} of {group.size}: {error}") from error


def _exchange(communicator: Communicator, case: Case, seed: int) -> None:
    expected, rank = expected_of(case, seed), communicator.rank
    mine, arrived = expected.inputs[rank], expected.received[rank]
    options: dict[str, Any] = {"layout": case.layout, "expert_alignment": case.expert_alignment}
    received = communicator.dispatch(mine.x, mine.topk_idx, mine.topk_weights, **options)
    _compare(received, arrived, "dispatch")
    bare = communicator.dispatch(mine.x, mine.topk_idx, **options)
    expect(bare.topk_weights is None, "dispatch without weights gave weights")
    assert_bitwise_equal(bare.x, arrived.x, "dispatch without weights: x")
    pending = communicator.dispatch_async(mine.x, mine.topk_idx, mine.topk_weights, **options)
    _compare(pending.wait(), arrived, "dispatch_async")

    swapped = expected_of(case, seed, rows_seed=seed + 10)
    cached = communicator.dispatch(swapped.inputs[rank].x, None, mine.topk_weights, handle=received.handle)
    _compare(cached, swapped.received[rank], "dispatch with a handle")
    if expected.ys:
        _bring_home(communicator, case, expected, received)
    # What is received next lands in this memory; none of it may show.
    for one in (received, bare, cached):
        one.x.view(torch.uint8).fill_(0xFF)


def _bring_home(communicator: Communicator, case: Case, expected: Expected, received: Received) -> None:
    rank, handle = communicator.rank, received.handle
    mine, y = expected.inputs[rank], expected.ys[rank]
    came = expected.home(rank, ys=[one.x for one in expected.received])
    assert_bitwise_equal(communicator.combine(received.x, handle), came, "combine of what came")
    summed = expected.home(rank)
    assert_bitwise_equal(communicator.combine(y, handle), summed, "combine")
    assert_bitwise_equal(communicator.combine_async(y, handle).wait(), summed, "combine_async")
    buffer = communicator.combine_buffer(handle, case.dtype)
    buffer.copy_(y)
    assert_bitwise_equal(communicator.combine(buffer, handle), summed, "combine of a combine_buffer")
    if case.layout == "expert_major":
        weighted = expected.home(rank, mine.topk_weights)
        got = communicator.combine(y, handle, topk_weights=mine.topk_weights)
        assert_bitwise_equal(got, weighted, "weighted combine")
        half = mine.topk_weights.to(torch.bfloat16)
        got = communicator.combine(buffer, handle, topk_weights=half)
        assert_bitwise_equal(got, expected.home(rank, half), "combine with bfloat16 weights")


def check_the_result_does_not_depend_on_the_number_of_ranks(world: World) -> None:
    """The same tokens over the same experts, spread over 1, 2, ... ranks: the same bits come home."""
    for dtype in (torch.float32, torch.bfloat16):
        digests = {}
        for num_ranks in world.rank_counts:
            parts = world.run(_share_of_the_batch, num_ranks, dtype)
            digests[num_ranks] = hashlib.sha256(torch.cat(parts).view(torch.uint8).numpy().tobytes()).hexdigest()
        expect(len(set(digests.values())) == 1, f"{dtype}: results by number of ranks: {digests}")


def _share_of_the_batch(group: Group, transport: str, dtype: torch.dtype) -> Tensor:
    case = Case("whole", (37,), hidden=48, num_experts=10, num_topk=4, dtype=dtype, routing="with_duplicates")
    whole = case.inputs(0)
    x = random_rows((37, 48), dtype, "batch")
    first, last = (37 * rank // group.size for rank in (group.rank, group.rank + 1))
    with _communicator(group, transport, case) as communicator:
        received = communicator.dispatch(x[first:last], whole.topk_idx[first:last])
        rows_per_expert = received.num_tokens_per_expert.to(torch.int64)
        scale = torch.tensor([1.0 + 0.37 * expert for expert in communicator.local_experts], dtype=dtype)
        y = torch.tanh(received.x * scale.repeat_interleave(rows_per_expert)[:, None])
        return communicator.combine(y, received.handle, topk_weights=whole.topk_weights[first:last])


def check_gradients(world: World) -> None:
    """Gradients of rows, of expert outputs and of weights, in both forms of weighting, are those of the oracle."""
    for num_ranks in [count for count in world.rank_counts if count <= 3]:
        world.run(_gradients, num_ranks, "expert_major")
        world.run(_gradients, num_ranks, "flat")


def _gradients(group: Group, transport: str, layout: Layout) -> None:
    tokens = (5, 0, 4)[: group.size]
    case = Case(
        f"gradients, {layout}",
        tokens,
        hidden=6,
        num_experts=5,
        num_topk=3,
        dtype=torch.float64,
        routing="masked",
        layout=layout,
        expert_alignment=4 if layout == "expert_major" else 1,
    )
    xs = [random_rows((count, 6), torch.float64, f"x {rank}").requires_grad_() for rank, count in enumerate(tokens)]
    inputs = [case.inputs(rank) for rank in range(group.size)]
    weights = [one.topk_weights.double().requires_grad_() for one in inputs]
    leaves = [[x.detach().clone().requires_grad_() for x in xs], [w.detach().clone().requires_grad_() for w in weights]]

    # The reference: all ranks in one graph.
    recorded = [Inputs(x, one.topk_idx, w) for x, one, w in zip(xs, inputs, weights, strict=True)]
    expected = Expected(case, recorded)
    ys = [_expert(one.x, one.topk_weights) for one in expected.received]
    loss = torch.zeros((), dtype=torch.float64)
    for rank, own_weights in enumerate(weights):
        home = expected.home(rank, own_weights if layout == "expert_major" else None, ys=ys)
        loss = loss + (home * random_rows(tuple(home.shape), torch.float64, f"g {rank}")).sum()
    torch.autograd.backward(loss)

    x, own = leaves[0][group.rank], leaves[1][group.rank]
    with _communicator(group, transport, case) as communicator:
        received = communicator.dispatch(
            x, inputs[group.rank].topk_idx, own, layout=layout, expert_alignment=case.expert_alignment
        )
        y = _expert(received.x, received.topk_weights)
        home = communicator.combine(y, received.handle, topk_weights=own if layout == "expert_major" else None)
        torch.autograd.backward((home * random_rows(tuple(home.shape), torch.float64, f"g {group.rank}")).sum())
    _expect_close(x.grad, xs[group.rank].grad, f"{case.name}: gradient of x")
    _expect_close(own.grad, weights[group.rank].grad, f"{case.name}: gradient of topk_weights")


def _expect_close(got: Tensor | None, wanted: Tensor | None, what: str) -> None:
    if got is None or wanted is None:
        raise AssertionError(f"{what}: got {got}, expected {wanted}")
    expect(torch.allclose(got, wanted, rtol=1e-12, atol=1e-12), f"{what}: got\n{got}\nexpected\n{wanted}")


def _expert(x: Tensor, weights: Tensor | None) -> Tensor:
    assert weights is not None
    gate = weights[:, None] if weights.dim() == 1 else weights.sum(dim=1, keepdim=True)
    return torch.sin(x) * (1.5 + gate)


def check_mistakes_are_refused_before_anything_is_sent(world: World) -> None:
    """A bad argument on every rank raises ValueError there, and the communicator goes on working."""
    world.run(_mistakes, world.several)


def _mistakes(group: Group, transport: str) -> None:
    case = Case("mistakes", (3,) * group.size, hidden=4, num_experts=6, num_topk=2)
    one = case.inputs(group.rank)
    beyond, below = one.topk_idx.clone(), one.topk_idx.clone()
    beyond[1, 1], below[2, 0] = 6, -2
    with _communicator(group, transport, case) as communicator:
        for arguments, named in (
            ((one.x, beyond), "topk_idx"),
            ((one.x, below), "topk_idx"),
            ((one.x[:, :3], one.topk_idx), "hidden"),
            ((one.x[:2], one.topk_idx), "topk_idx"),
            ((one.x, one.topk_idx, one.topk_weights[:, :1]), "topk_weights"),
        ):
            _expect_refusal(partial(communicator.dispatch, *arguments), named)
        received = communicator.dispatch(one.x, one.topk_idx)
        too_many = torch.zeros(received.x.shape[0] + 1, 4, dtype=case.dtype)
        _expect_refusal(partial(communicator.combine, too_many, received.handle), "y")
        expected = expected_of(case).received[group.rank]
        _compare(communicator.dispatch(one.x, one.topk_idx, one.topk_weights), expected, "dispatch after mistakes")


def _expect_refusal(call: Callable[[], Any], named: str) -> None:
    try:
        call()
    except ValueError as error:
        expect(named in str(error), f"the message does not name {named}: {error}")
    else:
        raise AssertionError(f"a wrong {named} was accepted")


def _communicator(group: Group, transport: str, case: Case) -> Communicator:
    return Communicator(
        group,
        num_experts=case.num_experts,
        hidden=case.hidden,
        num_topk=case.num_topk,
        transport=transport,
        timeout=timedelta(seconds=30),
    )


def _compare(received: Received, expected: ReferenceReceived, what: str) -> None:
    for name in ("x", "topk_weights", "topk_idx", "num_tokens_per_expert", "offsets"):
        assert_bitwise_equal(getattr(received, name), getattr(expected, name), f"{what}: {name}")


CHECKS: tuple[Callable[[World], None], ...] = (
    check_against_the_oracle,
    check_rows_of_many_pages,
    check_the_result_does_not_depend_on_the_number_of_ranks,
    check_gradients,
    check_mistakes_are_refused_before_anything_is_sent,
)

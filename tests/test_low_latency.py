"""Low-latency mode gives the bits of throughput mode and of the oracle: every transport, 1 to 16 ranks, every shape."""

from functools import partial

import pytest
import torch
from low_latency_ranks import WORLDS, compare_modes, low_latency_of, open_communicator, padding_is_zero, spread_over

from moecomm.testing import launch, masked, uniform
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts.cases import Case, random_rows


def compare_cases(group, transport, cases, seeds):
    for case in cases:
        with open_communicator(
            group,
            experts=case.num_experts,
            hidden=case.hidden,
            topk=case.num_topk,
            most=max(1, *case.tokens),
            transport=transport,
        ) as comm:
            for seed in seeds:
                compare_modes(comm, case, seed)


def tokens_of(num_ranks, *counts):
    """Unequal numbers of tokens, in turn; one that is alone has the first."""
    return tuple(counts[rank % len(counts)] for rank in range(num_ranks))


def cases_of(num_ranks):
    few = max(1, num_ranks - 1)
    spread = partial(Case, tokens=tokens_of(num_ranks, 5, 0, 9, 1))
    return [
        spread("odd hidden, experts do not divide", hidden=31, num_experts=2 * num_ranks + 1, num_topk=3),
        spread("fewer experts than ranks", hidden=33, num_experts=few, num_topk=min(few, 2), dtype=torch.float32),
        spread("one expert in all", hidden=1, num_experts=1, num_topk=1, dtype=torch.float64, expert_alignment=4),
        spread("masked, aligned", hidden=24, num_experts=11, num_topk=4, routing="masked", expert_alignment=8),
        spread("top-64", hidden=8, num_experts=65, num_topk=64, dtype=torch.float16, idx_dtype=torch.int32),
        spread("no routes", hidden=8, num_experts=4, num_topk=2, routing="no_routes", expert_alignment=2),
        spread("all to one rank", hidden=16, num_experts=2 * num_ranks, num_topk=2, routing="all_to_one_rank"),
        spread("views with poison in the gaps", hidden=20, num_experts=9, num_topk=4, strided=True, routing="masked"),
        Case("no tokens anywhere", (0,) * num_ranks, hidden=8, num_experts=4, num_topk=2),
        Case("one token each", (1,) * num_ranks, hidden=2048, num_experts=8, num_topk=8),
    ]


@pytest.mark.parametrize(
    ("backend", "transport", "num_ranks"),
    [(*world, n) for world in WORLDS for n in (1, 2, 3, 4, 8, 16) if world[0] == "stepped" or n < 5],
)
def test_bits_are_those_of_throughput_mode_and_of_the_oracle(backend, transport, num_ranks):
    seeds = (0, 1, 2) if num_ranks <= 4 else (0,)
    cases = cases_of(num_ranks)[:: 1 if num_ranks <= 4 else 2]
    launch(compare_cases, num_ranks, transport, cases, seeds, backend=backend, timeout=60)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int64, torch.float8_e4m3fn, torch.float64]
)
def test_rows_of_any_dtype_travel(dtype):
    case = Case("dtype", (4, 0, 7), hidden=13, num_experts=7, num_topk=3, dtype=dtype, expert_alignment=2)
    launch(compare_cases, 3, "local", [case], (0, 1))


@pytest.mark.parametrize("num_tokens", [7, 8, 9, 31, 32, 33, 127, 128, 129, 255, 256, 257])
def test_numbers_of_tokens_about_powers_of_two(num_tokens):
    tokens = (num_tokens, num_tokens - 1)
    cases = [
        Case("uniform", tokens, hidden=3, num_experts=8, num_topk=4, dtype=torch.float32, expert_alignment=16),
        Case("hot", tokens, hidden=64, num_experts=3, num_topk=1, routing="hot_expert"),
    ]
    launch(compare_cases, 2, "local", cases, (0,))


@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("total", [1023, 1024, 1025])
def test_about_a_thousand_rows_to_one_expert(backend, total):
    tokens = (total - total // 2 - 1, 1, total // 2)
    case = Case("hot", tokens, hidden=5, num_experts=4, num_topk=1, dtype=torch.float32, routing="hot_expert")
    launch(compare_cases, 3, "auto", [case], (0,), backend=backend)


@pytest.mark.parametrize("num_topk", [1, 2, 9, 16, 33, 64])
def test_any_number_of_choices(num_topk):
    case = Case("top-k", (3, 5), hidden=7, num_experts=num_topk + 3, num_topk=num_topk, routing="masked")
    launch(compare_cases, 2, "local", [case], (0, 1))


# -- a handle used again -----------------------------------------------------------------------------------------------


def use_a_handle_again(group, transport, layout):
    rank, tokens = group.rank, (3, 0, 6)
    idx, weights = masked(tokens[rank], 6, 2, seed=rank), torch.rand(tokens[rank], 2)
    with open_communicator(group, transport=transport) as comm:
        first = low_latency_of(comm, random_rows((tokens[rank], 16), torch.float32, f"x {rank}"), idx, layout=layout)
        for number in range(7):
            x = random_rows((tokens[rank], 16), (torch.float32, torch.bfloat16)[number % 2], f"x {rank} {number}")
            again = comm.dispatch(x, None, weights, handle=first.handle)
            plain = low_latency_of(comm, x, idx, weights, layout=layout)
            for name in ("x", "topk_weights", "num_tokens_per_expert", "offsets"):
                assert_bitwise_equal(getattr(again, name), getattr(plain, name), name)
            for name in ("routes", "topk_idx", "counts", "stamp"):
                assert_bitwise_equal(getattr(again.handle, name), getattr(first.handle, name), name)
            assert padding_is_zero(again)
            home = comm.combine(plain.x, plain.handle, weights)
            # Ranks need not use the same one of several handles of one dispatch.
            handle = first.handle if rank else again.handle
            assert_bitwise_equal(comm.combine(again.x, handle, weights), home, "combine")


@pytest.mark.parametrize("layout", ["slab", "expert_major"])
@pytest.mark.parametrize(("backend", "transport"), WORLDS)
def test_a_handle_is_used_again(backend, transport, layout):
    launch(use_a_handle_again, 3, transport, layout, backend=backend)


# -- gradients ---------------------------------------------------------------------------------------------------------


def gradients(group, transport, mode, layout, num_tokens):
    """Gradients of rows, experts' outputs and router weights, weighted at home and travelling, and through a handle."""
    rank = group.rank
    count = num_tokens[rank]
    x = random_rows((count, 16), torch.float32, f"x {rank}").requires_grad_()
    weights = torch.rand(count, 2, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    idx = masked(count, 6, 2, seed=rank)
    options = {} if mode == "throughput" else {"layout": layout}
    with open_communicator(group, transport=transport) as comm:
        received = comm.dispatch(x, idx, weights, mode=mode, **options)
        cached = comm.dispatch(x * 2, handle=received.handle)
        y = torch.sin(received.x) * (1 + received.topk_weights[..., None]) + cached.x
        plain = comm.combine(y, received.handle)
        weighted = comm.combine(y * y, received.handle, weights)
        ((plain * plain).sum() + (weighted * torch.arange(16.0)).sum()).backward()
        group.all_gather(None)
        return plain.detach(), weighted.detach(), x.grad, weights.grad


@pytest.mark.parametrize("num_tokens", [(5,), (4, 7), (3, 0, 8), (0, 0, 1)])
@pytest.mark.parametrize(("backend", "transport"), WORLDS)
def test_gradients_are_those_of_throughput_mode(backend, transport, num_tokens):
    run = partial(launch, gradients, len(num_tokens), transport, backend=backend)
    for layout in ("slab", "expert_major"):
        pairs = zip(run("throughput", layout, num_tokens), run("low_latency", layout, num_tokens), strict=True)
        for wanted, got in pairs:
            for one, other, name in zip(got, wanted, ("plain", "weighted", "x.grad", "weights.grad"), strict=True):
                assert_bitwise_equal(one, other, f"{layout}: {name}")


# -- rows are read where they lie --------------------------------------------------------------------------------------


def combine_in_place(group, layout):
    """`combine_buffer` and what a dispatch brought are not copied: no block is taken, no copy counted."""
    count = 5
    x, idx = random_rows((count, 16), torch.bfloat16, f"x {group.rank}"), uniform(count, 6, 2, seed=group.rank)
    with open_communicator(group) as comm:
        received = low_latency_of(comm, x, idx, layout=layout)
        wanted = comm.combine(received.x.clone(), received.handle)
        assert comm.stats["copies"] == 1
        for _ in range(4):
            for y in (received.x, comm.combine_buffer(received.handle, x.dtype)):
                y.copy_(received.x)
                alive = comm.stats["fixed_blocks_alive"]
                assert_bitwise_equal(comm.combine(y, received.handle), wanted, "combine in place")
                assert comm.stats["fixed_blocks_alive"] <= alive
                assert comm.stats["copies"] == 1
            # Rows elsewhere are copied, whatever they are part of; only those that routes name.
            assert_bitwise_equal(comm.combine(received.x.float(), received.handle).bfloat16(), wanted, "copied")
            comm._exchanger.session.memory.num_copies = 1
        group.all_gather(None)


@pytest.mark.parametrize("layout", ["slab", "expert_major"])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_what_lies_in_receive_memory_is_not_copied(backend, layout):
    launch(combine_in_place, 3, layout, backend=backend)


def test_a_buffer_has_the_shape_of_what_was_received():
    with open_communicator(None) as comm:
        received = low_latency_of(comm, torch.ones(3, 16), uniform(3, 6, 2))
        assert comm.combine_buffer(received.handle, torch.float16).shape == received.x.shape == (6, 8, 16)
        y = spread_over(received, torch.ones(6, 16), received.num_tokens_per_expert.cumsum(0))
        assert torch.equal(comm.combine(y, received.handle), torch.full((3, 16), 2.0))


def combine_both(group):
    """Of either mode, in one shape: what the combines of the handles are called."""
    with open_communicator(group, experts=4, hidden=8, topk=2, most=4) as comm:
        idx = uniform(4, 4, 2, seed=group.rank)
        x = random_rows((4, 8), torch.float32, f"x {group.rank}")
        fast = comm.dispatch(x, idx, mode="low_latency", layout="expert_major")
        slow = comm.dispatch(x, idx, capacity=fast.handle.capacity)
        titles = []
        for received in (fast, slow, fast):
            pending = comm.combine_async(received.x, received.handle)
            titles.append(repr(pending).partition(" #")[0])
            assert_bitwise_equal(pending.wait(), 2 * x, "combine")
        return titles


def test_a_handle_is_combined_in_its_mode_whatever_had_its_shape_before():
    for titles in launch(combine_both, 2):
        assert titles == ["Work(low-latency combine", "Work(combine", "Work(low-latency combine"]

"""Low-latency kernels in Triton, interpreted: the same messages and blocks as the reference, bit by bit."""

import pytest
import torch
from eager_cases import (
    POISON,
    REFERENCE,
    Memory,
    Receiver,
    World,
    blocks_of,
    check_message_for_a_domain,
    compare,
    grouped,
    inputs_of,
    pair_of,
    send,
    slab,
)
from kernel_cases import assert_same_bits, bytes_at

from moecomm import _C
from moecomm.kernels import kernels_for
from moecomm.kernels.eager import Form, Home, Overflow, message_bytes
from moecomm.kernels.registry import eager_kernels_for
from moecomm.testing import masked, uniform, with_duplicates

TRITON = eager_kernels_for("triton")
WORLDS = {
    "one rank": World([0, 0, 0], 1),
    "blocks": World(blocks_of(7, 3), 3),
    "fewer experts than ranks": World(blocks_of(2, 4), 4),
    "experts scattered over the ranks": World([1, 0, 1, 2, 0, 1, 2, 2], 3),
}
TOKENS = {1: (6,), 3: (5, 0, 9), 4: (3, 1, 0, 8)}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize(
    ("hidden", "num_topk", "dtype", "values"),
    [
        (0, 3, torch.float32, torch.float32),
        (1, 1, torch.uint8, None),
        (33, 3, torch.bfloat16, torch.float32),
        (515, 2, torch.float64, torch.float64),
        (7, 64, torch.float8_e4m3fn, torch.float64),
    ],
)
def test_messages_and_blocks(world, hidden, num_topk, dtype, values):
    tokens = TOKENS[world.num_ranks]
    inputs = inputs_of(world, tokens, num_topk, hidden=hidden, dtype=dtype, values=values)
    messages, sent = send(TRITON, world, inputs)
    wanted, expected = send(REFERENCE, world, inputs)
    forms = [slab(world, tokens), grouped(world, tokens, num_topk, 4)]
    for rank in range(world.num_ranks):
        assert_same_bits(sent[rank][0], expected[rank][0])
        assert sent[rank][1] == expected[rank][1]
        for got, want in zip(messages[rank], wanted[rank], strict=True):
            assert_same_bits(got.whole, want.whole)
        got, want = pair_of(world, rank, inputs, kernels=TRITON, **forms[rank % 2])
        compare(got, want, got.receive(messages, inputs), want.receive(wanted, inputs))


@pytest.mark.parametrize("domain_of", [(0, 1, 1), (0, 0, 1)])
def test_a_message_for_a_domain_gives_what_messages_for_its_ranks_give(domain_of):
    check_message_for_a_domain(TRITON, domain_of)


def test_duplicates_and_more_ids_than_one_program_looks_at():
    world = WORLDS["blocks"]
    tokens = (40, 3, 150)
    inputs = inputs_of(world, tokens, 5, hidden=3, values=torch.float32, routing=with_duplicates)
    messages, _ = send(TRITON, world, inputs)
    got, want = pair_of(world, 1, inputs, kernels=TRITON, **grouped(world, tokens, 5, 8))
    compare(got, want, got.receive(messages, inputs), want.receive(messages, inputs))


def test_more_experts_and_ranks_than_one_program_compares():
    world = World(blocks_of(70, 19), 19)
    tokens = tuple(rank % 3 for rank in range(19))
    inputs = inputs_of(world, tokens, 4, hidden=3, values=torch.float32)
    messages, _ = send(REFERENCE, world, inputs)
    mine = [Memory(messages[rank][7].num_bytes) for rank in range(19)]
    arguments = (inputs.rows[7], inputs.ids[7], inputs.weights[7], world.expert_rank)
    TRITON.send_eager(*arguments, [window.address for window in mine])
    for rank in range(19):
        assert_same_bits(mine[rank].whole, messages[rank][7].whole)
    got, want = pair_of(world, 7, inputs, kernels=TRITON, **grouped(world, tokens, 4, 2))
    compare(got, want, got.receive(messages, inputs), want.receive(messages, inputs))


@pytest.mark.parametrize("values", [None, torch.float64])
@pytest.mark.parametrize("alignment", [0, 8])
def test_padding_is_zero_use_after_use(values, alignment):
    """One block, many calls, more and fewer rows in turn."""
    world = World(blocks_of(5, 2), 2)
    form = slab(world, (9, 4)) if alignment == 0 else grouped(world, (9, 4), 2, alignment)
    receivers = None
    for seed, tokens in enumerate([(9, 4), (0, 0), (1, 4), (9, 0), (2, 3), (5, 4)]):
        inputs = inputs_of(world, tokens, 2, hidden=3, values=values, seed=seed)
        messages, _ = send(REFERENCE, world, inputs)
        receivers = receivers or [pair_of(world, rank, inputs, kernels=TRITON, **form) for rank in range(2)]
        for got, want in receivers:
            compare(got, want, got.receive(messages, inputs), want.receive(messages, inputs))


@pytest.mark.parametrize("shift", [1, 8, 40])
def test_blocks_at_any_address(shift):
    world = WORLDS["blocks"]
    inputs = inputs_of(world, (5, 0, 9), 3, hidden=11, dtype=torch.uint8, values=torch.float32)
    messages, _ = send(REFERENCE, world, inputs)
    got, want = pair_of(world, 2, inputs, kernels=TRITON, **slab(world, (14,)), shift=shift)
    compare(got, want, got.receive(messages, inputs), want.receive(messages, inputs))


def test_rows_with_gaps_and_ids_of_both_widths():
    world = WORLDS["blocks"]
    wide = torch.randn(6, 9)
    for rows, ids in (
        (wide[:, 2:7], uniform(6, 7, 3)),
        (torch.randn(1, 5).expand(6, 5), masked(6, 7, 3).int()),
        (torch.randn(12, 5)[::2], uniform(6, 7, 3).int()),
    ):
        windows = [Memory(message_bytes(6, 3, 20, 0)) for _ in range(6)]
        copy, _ = TRITON.send_eager(rows, ids, None, world.expert_rank, [w.address for w in windows[:3]])
        REFERENCE.send_eager(rows.contiguous(), ids, None, world.expert_rank, [w.address for w in windows[3:]])
        for got, want in zip(windows[:3], windows[3:], strict=True):
            assert_same_bits(got.whole, want.whole)
        assert_same_bits(copy, ids.int())
        assert copy.data_ptr() != ids.data_ptr()


@pytest.mark.parametrize("bad", [-2, 7, 2**31, 2**40])
def test_a_wrong_id_is_named_and_nothing_is_sent(bad):
    world = WORLDS["blocks"]
    ids = masked(4, 7, 2)
    ids[3, 1] = bad
    windows = [Memory(message_bytes(4, 2, 20, 0)) for _ in range(3)]
    with pytest.raises(ValueError, match=rf"topk_idx\[3, 1\] = {bad} .* 0 to 6"):
        TRITON.send_eager(torch.ones(4, 5), ids, None, world.expert_rank, [w.address for w in windows])
    assert all(bool((window.whole == POISON).all()) for window in windows)


@pytest.mark.parametrize("capacity", [0, 4])
def test_what_does_not_fit_is_named_alike_and_nothing_is_written(capacity):
    world = WORLDS["blocks"]
    inputs = inputs_of(world, (4, 0, 3), 4, hidden=3, values=torch.float32, routing=with_duplicates)
    fitting = inputs_of(world, (1, 0, 1), 4, hidden=3, values=torch.float32)
    form = {"capacity": capacity, "alignment": 1, "num_rows": 8}
    found = set()
    for rank in range(3):
        for receiver in pair_of(world, rank, inputs, kernels=TRITON, **form):
            receiver.receive(send(REFERENCE, world, fitting)[0], fitting)
            before = [t.clone() for t in (receiver.everything, receiver.used, receiver.tokens_per_expert)]
            with pytest.raises(Overflow) as caught:
                receiver.receive(send(REFERENCE, world, inputs)[0], inputs)
            found.add((caught.value.index, caught.value.need, caught.value.room))
            after = (receiver.everything, receiver.used, receiver.tokens_per_expert)
            for one, other in zip(after, before, strict=True):
                assert_same_bits(one, other)
    assert len(found) == 1


@pytest.mark.parametrize("world", list(WORLDS.values())[:3], ids=list(WORLDS)[:3])
@pytest.mark.parametrize("alignment", [0, 4])
@pytest.mark.parametrize(("shape", "dtype"), [((13,), torch.bfloat16), ((), torch.float64), ((0,), torch.float32)])
def test_copies_of_expert_rows(world, alignment, shape, dtype):
    tokens = TOKENS[world.num_ranks]
    inputs = inputs_of(world, tokens, 3, hidden=2)
    messages, _ = send(REFERENCE, world, inputs)
    form = slab(world, tokens) if alignment == 0 else grouped(world, tokens, 3, alignment)
    for rank in range(world.num_ranks):
        counts = Receiver(REFERENCE, world, rank, inputs.row_bytes, 0, **form).receive(messages, inputs).counts
        num_local = world.num_local(rank)
        first = world.experts.index(rank) if num_local else 0
        num_rows = num_local * form["capacity"] if form["capacity"] else form["num_rows"]
        rows = torch.randn(num_rows, *shape).to(dtype)
        got, want = Memory(rows.nbytes), Memory(rows.nbytes)
        local = (first, first + num_local)
        for kernels, out in ((TRITON, got), (REFERENCE, want)):
            arguments = (out.address, rows, rows[:1].nbytes, counts, local, form["capacity"], form["alignment"])
            kernels.copy_expert_rows(*arguments)
        assert_same_bits(got.whole, want.whole)


def test_slabs_beyond_two_to_the_31_bytes():
    """Address space is free: the last slab lies 5 GB behind the first, and few pages of it exist."""
    world = World([0, 0, 0], 1)
    row_bytes, capacity = 4096, 600_000
    inputs = inputs_of(world, (5,), 2, hidden=row_bytes, dtype=torch.uint8, values=torch.float64, routing=uniform)
    messages, _ = send(TRITON, world, inputs)
    space = _C.Mapping.create_private(3 * capacity * (row_bytes + 8))
    copied = _C.Mapping.create_private(3 * capacity * row_bytes)
    values = space.address + 3 * capacity * row_bytes
    used = torch.tensor([7, 7, 7])
    for expert in range(3):
        bytes_at(space.address + (expert * capacity + 6) * row_bytes, row_bytes).fill_(1)
    home = Home(0, world.expert_rank, world.expert_local, torch.zeros(3).long())
    form = Form(2, row_bytes, 8, capacity, 1, capacity)
    found = TRITON.receive_eager(home, form, [messages[0][0].address], [5], space.address, values, used)
    for t, choices in enumerate(inputs.ids[0].tolist()):
        for k, expert in enumerate(choices):
            route = int(found.routes[t, k])
            assert capacity * expert <= route < capacity * (expert + 1)
            assert_same_bits(bytes_at(space.address + route * row_bytes, row_bytes), inputs.rows[0][t])
            assert bytes_at(values + route * 8, 8).view(torch.float64)[0] == inputs.weights[0][t, k]
    for expert in range(3):
        assert not bytes_at(space.address + (expert * capacity + 6) * row_bytes, row_bytes).any()
    # A tensor over all of it: its rows are read where they are.
    rows = bytes_at(space.address, 3 * capacity * row_bytes)
    TRITON.copy_expert_rows(copied.address, rows, row_bytes, found.counts, (0, 3), capacity, 1)
    last = int(found.routes[inputs.ids[0] == 2].max())
    got, want = (bytes_at(one.address + last * row_bytes, row_bytes) for one in (copied, space))
    assert_same_bits(got, want)
    assert space.resident_bytes() < 64 << 20


def test_ids_on_another_device_are_refused():
    assert type(kernels_for("triton")).__name__ == "TritonRowKernels"
    with pytest.raises(ValueError, match="topk_idx is on meta"):
        TRITON.send_eager(torch.ones(1, 2), torch.zeros(1, 1, device="meta").long(), None, torch.zeros(1).int(), [0])

"""Low-latency kernels: native against reference and both against the oracle, bit by bit; blocks used time and again."""

import pytest
import torch
from eager_cases import (
    CPU,
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
from moecomm.kernels.base import rank_of, row_of
from moecomm.kernels.eager import Form, Home, Overflow, message_bytes
from moecomm.kernels.registry import kernels_for
from moecomm.testing import masked, reference_dispatch, uniform, with_duplicates

WORLDS = {
    "one rank": World([0, 0, 0], 1),
    "blocks": World(blocks_of(7, 3), 3),
    "fewer experts than ranks": World(blocks_of(2, 4), 4),
    "ranks in another order": World([2, 2, 0, 0, 1], 3),
    "experts scattered over the ranks": World([1, 0, 1, 2, 0, 1, 2, 2], 3),
}
TOKENS = {1: (6,), 3: (5, 0, 9), 4: (3, 1, 0, 8)}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize(
    ("hidden", "dtype", "values"),
    [
        (0, torch.float32, None),
        (0, torch.float32, torch.float32),
        (1, torch.uint8, None),
        (33, torch.bfloat16, torch.float32),
        (31, torch.float64, torch.float64),
        (7, torch.float8_e4m3fn, torch.float64),
        (515, torch.float16, torch.float32),
    ],
)
def test_native_and_reference_agree(world, hidden, dtype, values):
    tokens = TOKENS[world.num_ranks]
    for num_topk in (1, 3, 64):
        inputs = inputs_of(world, tokens, num_topk, hidden=hidden, dtype=dtype, values=values)
        messages, sent = send(CPU, world, inputs)
        wanted, expected = send(REFERENCE, world, inputs)
        for rank in range(world.num_ranks):
            assert_same_bits(sent[rank][0], expected[rank][0])
            assert sent[rank][1] == expected[rank][1]
            for got, want in zip(messages[rank], wanted[rank], strict=True):
                assert_same_bits(got.whole, want.whole)
            forms = [slab(world, tokens), *(grouped(world, tokens, num_topk, a) for a in (1, 4))]
            for form in forms:
                got, want = pair_of(world, rank, inputs, **form)
                compare(got, want, got.receive(messages, inputs), want.receive(wanted, inputs))


@pytest.mark.parametrize("domain_of", [(0, 1, 1), (0, 0, 1), (0, 1, 0)])
@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["native", "reference"])
def test_a_message_for_a_domain_gives_what_messages_for_its_ranks_give(kernels, domain_of):
    check_message_for_a_domain(kernels, domain_of)


@pytest.mark.parametrize("layout", ["slab", "expert_major"])
@pytest.mark.parametrize(("num_experts", "num_ranks"), [(3, 1), (7, 3), (2, 4)])
def test_against_the_oracle(num_experts, num_ranks, layout):
    """Neither implementation is trusted: where the rows go is defined elsewhere."""
    world = World(blocks_of(num_experts, num_ranks), num_ranks)
    tokens = TOKENS[num_ranks]
    inputs = inputs_of(world, tokens, 3, hidden=5, dtype=torch.float32, values=torch.float32, routing=uniform)
    messages, sent = send(CPU, world, inputs)
    for rank in range(num_ranks):
        alignment = 4 if layout == "expert_major" else 1
        form = slab(world, tokens) if layout == "slab" else grouped(world, tokens, 3, alignment)
        got = Receiver(CPU, world, rank, inputs.row_bytes, 4, **form)
        found = got.receive(messages, inputs)
        want = reference_dispatch(
            inputs.rows, inputs.ids, inputs.weights, num_experts=num_experts, rank=rank, expert_alignment=alignment
        )
        rows = got.rows.part.view(torch.float32).view(-1, 5)
        values = got.values.part.view(torch.float32)
        assert torch.equal(found.num_tokens_per_expert, want.num_tokens_per_expert)
        if layout == "expert_major":
            assert torch.equal(found.offsets, want.offsets)
            end = want.x.shape[0]
            assert_same_bits(rows[:end], want.x)
            assert_same_bits(values[:end], want.topk_weights)
            assert not rows[end:].any()
            assert not values[end:].any()
        else:
            first = 0
            for expert, count in enumerate(want.num_tokens_per_expert.tolist()):
                begin = expert * form["capacity"]
                assert_same_bits(rows[begin : begin + count], want.x[first : first + count])
                assert_same_bits(values[begin : begin + count], want.topk_weights[first : first + count])
                assert not rows[begin + count : begin + form["capacity"]].any()
                assert not values[begin + count : begin + form["capacity"]].any()
                first += count
        # My routes lead to my own rows, wherever those are.
        for t, choices in enumerate(inputs.ids[rank].tolist()):
            for k, expert in enumerate(choices):
                route = int(found.routes[t, k])
                assert (route < 0) == (expert < 0)
                if expert >= 0 and rank_of(route) == rank:
                    assert_same_bits(rows[row_of(route)], inputs.rows[rank][t])
        assert_same_bits(sent[rank][0], inputs.ids[rank].to(torch.int32))


@pytest.mark.parametrize("values", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("alignment", [0, 1, 8])
def test_padding_is_zero_use_after_use(values, alignment):
    """One block, many calls, more and fewer rows in turn: what no route fills is zero each time."""
    world = World(blocks_of(5, 2), 2)
    most = (9, 4)
    form = slab(world, most) if alignment == 0 else grouped(world, most, 2, alignment)
    receivers = None
    for seed, tokens in enumerate([(9, 4), (0, 0), (1, 4), (9, 0), (9, 4), (2, 3), (0, 1), (5, 4)]):
        inputs = inputs_of(
            world, tokens, 2, hidden=3, values=values, seed=seed, routing=uniform if seed % 2 else masked
        )
        messages, _ = send(CPU, world, inputs)
        receivers = receivers or [pair_of(world, rank, inputs, **form) for rank in range(2)]
        for rank, (got, want) in enumerate(receivers):
            found = got.receive(messages, inputs)
            compare(got, want, found, want.receive(messages, inputs))
            is_row = torch.zeros(got.rows.num_bytes // inputs.row_bytes, dtype=torch.bool)
            begin = 0
            for local, count in enumerate(found.num_tokens_per_expert.tolist()):
                begin = local * form["capacity"] if form["capacity"] else begin
                is_row[begin : begin + count] = True
                begin = begin if form["capacity"] else int(found.offsets[local])
            assert not got.rows.part.view(-1, inputs.row_bytes)[~is_row].any()
            assert bool(got.rows.part.view(-1, inputs.row_bytes)[is_row].any(dim=1).all())
            if values is not None:
                assert not got.values.part.view(-1, inputs.value_bytes)[~is_row].any()
            expected = found.num_tokens_per_expert.long() if found.offsets is None else found.offsets[-1:].long()
            assert torch.equal(got.used[: expected.numel()], expected), rank


@pytest.mark.parametrize("shift", [1, 8, 40])
def test_any_address(shift):
    world = WORLDS["blocks"]
    inputs = inputs_of(world, (5, 0, 9), 3, hidden=11, dtype=torch.uint8, values=torch.float32)
    messages, _ = send(CPU, world, inputs)
    for rank in range(3):
        got, want = pair_of(world, rank, inputs, **slab(world, (14,)), shift=shift)
        compare(got, want, got.receive(messages, inputs), want.receive(messages, inputs))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_any_form_give_one_message_and_the_fingerprint_of_throughput_mode(dtype):
    world = WORLDS["blocks"]
    ids = masked(6, 7, 3, seed=2)
    shown = ids.to(dtype)
    rows = torch.randn(6, 5)
    windows = [Memory(message_bytes(6, 3, 20, 0)) for _ in range(6)]
    copy, fingerprint = CPU.send_eager(rows, shown, None, world.expert_rank, [w.address for w in windows[:3]])
    REFERENCE.send_eager(rows, ids, None, world.expert_rank, [w.address for w in windows[3:]])
    for got, want in zip(windows[:3], windows[3:], strict=True):
        assert_same_bits(got.whole, want.whole)
    assert_same_bits(copy, ids.to(torch.int32))
    assert copy.data_ptr() != shown.data_ptr()
    counts = torch.empty(10, dtype=torch.int32)
    assert fingerprint == kernels_for("cpu").count_routes(ids, world.expert_rank, 3, counts)


def test_rows_with_gaps_and_one_row_many_times():
    world = WORLDS["blocks"]
    ids = uniform(6, 7, 3)
    wide = torch.randn(6, 9)
    for rows in (wide[:, 2:7], torch.randn(1, 5).expand(6, 5), torch.randn(12, 5)[::2]):
        windows = [Memory(message_bytes(6, 3, 20, 0)) for _ in range(6)]
        CPU.send_eager(rows, ids, None, world.expert_rank, [w.address for w in windows[:3]])
        REFERENCE.send_eager(rows.contiguous(), ids, None, world.expert_rank, [w.address for w in windows[3:]])
        for got, want in zip(windows[:3], windows[3:], strict=True):
            assert_same_bits(got.whole, want.whole)


@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["cpu", "reference"])
@pytest.mark.parametrize("bad", [-2, 7, 2**31, 2**40])
def test_a_wrong_id_is_named_and_nothing_is_sent(kernels, bad):
    world = WORLDS["blocks"]
    ids = masked(4, 7, 2)
    ids[3, 1] = bad
    windows = [Memory(message_bytes(4, 2, 20, 0)) for _ in range(3)]
    with pytest.raises(ValueError, match=rf"topk_idx\[3, 1\] = {bad} .* 0 to 6"):
        kernels.send_eager(torch.ones(4, 5), ids, None, world.expert_rank, [w.address for w in windows])
    assert all(bool((window.whole == POISON).all()) for window in windows)


@pytest.mark.parametrize("capacity", [0, 4])
def test_what_does_not_fit_is_named_alike_on_every_rank_and_nothing_is_written(capacity):
    world = WORLDS["blocks"]
    inputs = inputs_of(world, (4, 0, 3), 4, hidden=3, values=torch.float32, routing=with_duplicates)
    fitting = inputs_of(world, (1, 0, 1), 4, hidden=3, values=torch.float32)
    form = {"capacity": capacity, "alignment": 1, "num_rows": 8}
    found = set()
    for rank in range(3):
        for receiver in pair_of(world, rank, inputs, **form):
            receiver.receive(send(CPU, world, fitting)[0], fitting)
            before = [t.clone() for t in (receiver.everything, receiver.used, receiver.tokens_per_expert)]
            with pytest.raises(Overflow) as caught:
                receiver.receive(send(CPU, world, inputs)[0], inputs)
            found.add((caught.value.index, caught.value.need, caught.value.room))
            after = (receiver.everything, receiver.used, receiver.tokens_per_expert)
            for one, other in zip(after, before, strict=True):
                assert_same_bits(one, other)
    assert len(found) == 1
    ((index, need, room),) = found
    totals = sum(torch.bincount(ids[ids >= 0], minlength=7) for ids in inputs.ids)
    if capacity:
        assert (need, room) == (int(totals[index]), capacity)
        assert need > room
    else:
        # What is said of a rank counts up to the first of its experts that no longer fits.
        experts = [e for e in range(7) if world.experts[e] == index]
        assert room == 8 < need <= sum(int(totals[e]) for e in experts)


# Experts of a rank must have neighbouring ids here.
@pytest.mark.parametrize("world", list(WORLDS.values())[:4], ids=list(WORLDS)[:4])
@pytest.mark.parametrize("alignment", [0, 1, 4])
@pytest.mark.parametrize(("shape", "dtype"), [((13,), torch.bfloat16), ((), torch.float64), ((0,), torch.float32)])
def test_copies_of_expert_rows(world, alignment, shape, dtype):
    tokens = TOKENS[world.num_ranks]
    inputs = inputs_of(world, tokens, 3, hidden=2)
    messages, _ = send(CPU, world, inputs)
    form = slab(world, tokens) if alignment == 0 else grouped(world, tokens, 3, alignment)
    for rank in range(world.num_ranks):
        counts = Receiver(CPU, world, rank, inputs.row_bytes, 0, **form).receive(messages, inputs).counts
        num_local = world.num_local(rank)
        first = world.experts.index(rank) if num_local else 0
        num_rows = num_local * form["capacity"] if form["capacity"] else form["num_rows"]
        rows = torch.randn(num_rows, *shape).to(dtype)
        got, want = Memory(rows.nbytes), Memory(rows.nbytes)
        for kernels, out in ((CPU, got), (REFERENCE, want)):
            kernels.copy_expert_rows(
                out.address,
                rows,
                rows[:1].nbytes,
                counts,
                (first, first + num_local),
                form["capacity"],
                form["alignment"],
            )
        assert_same_bits(got.whole, want.whole)
        copied = int(counts[:, first : first + num_local].sum())
        assert int((got.whole != POISON).sum()) <= copied * (rows.nbytes // max(1, num_rows))


# -- far away ----------------------------------------------------------------------------------------------------------


def test_slabs_beyond_two_to_the_31_bytes():
    """Address space is free: the last slab lies 5 GB behind the first, and few pages of it exist."""
    world = World([0, 0, 0], 1)
    row_bytes, capacity = 4096, 600_000
    inputs = inputs_of(world, (5,), 2, hidden=row_bytes, dtype=torch.uint8, values=torch.float64, routing=uniform)
    messages, _ = send(CPU, world, inputs)
    space = _C.Mapping.create_private(3 * capacity * (row_bytes + 8))
    copied = _C.Mapping.create_private(3 * capacity * row_bytes)
    values = space.address + 3 * capacity * row_bytes
    used = torch.tensor([7, 7, 7])
    for expert in range(3):
        row = bytes_at(space.address + (expert * capacity + 6) * row_bytes, row_bytes)
        row.fill_(1)
    home = Home(0, world.expert_rank, world.expert_local, torch.zeros(3).long())
    form = Form(2, row_bytes, 8, capacity, 1, capacity)
    found = CPU.receive_eager(home, form, [messages[0][0].address], [5], space.address, values, used)
    for t, choices in enumerate(inputs.ids[0].tolist()):
        for k, expert in enumerate(choices):
            route = int(found.routes[t, k])
            assert capacity * expert <= route < capacity * (expert + 1)
            assert_same_bits(bytes_at(space.address + route * row_bytes, row_bytes), inputs.rows[0][t])
            value = bytes_at(values + route * 8, 8).view(torch.float64)[0]
            assert value == inputs.weights[0][t, k]
    for expert in range(3):
        assert not bytes_at(space.address + (expert * capacity + 6) * row_bytes, row_bytes).any()
    _C.copy_expert_rows(copied.address, space.address, row_bytes, found.counts.data_ptr(), 1, 3, 0, 3, capacity, 1)
    last = int(found.routes[inputs.ids[0] == 2].max())
    assert bytes_at(copied.address + last * row_bytes, row_bytes).any()
    assert_same_bits(
        bytes_at(copied.address + last * row_bytes, row_bytes), bytes_at(space.address + last * row_bytes, row_bytes)
    )
    assert space.resident_bytes() < 64 << 20


def test_more_than_two_to_the_31_rows():
    world = World([0, 0], 1)
    capacity = 2**31 + 9
    inputs = inputs_of(world, (3,), 2, hidden=1, dtype=torch.uint8, routing=uniform)
    messages, _ = send(CPU, world, inputs)
    space = _C.Mapping.create_private(2 * capacity)
    home = Home(0, world.expert_rank, world.expert_local, torch.zeros(2).long())
    form = Form(2, 1, 0, capacity, 1, capacity)
    used = torch.zeros(2).long()
    found = CPU.receive_eager(home, form, [messages[0][0].address], [3], space.address, 0, used)
    assert found.routes[inputs.ids[0] == 1].tolist() == [capacity, capacity + 1, capacity + 2]
    assert_same_bits(bytes_at(space.address + capacity, 3), inputs.rows[0].flatten())


def test_source_rows_beyond_two_to_the_31_bytes():
    world = World([0, 0], 1)
    stride = 3 << 30
    space = _C.Mapping.create_private(stride + 4096)
    rows = torch.frombuffer(space.view(0, space.nbytes), dtype=torch.uint8).as_strided((2, 16), (stride, 1))
    rows.copy_(torch.arange(32, dtype=torch.uint8).view(2, 16))
    window = Memory(message_bytes(2, 1, 16, 0))
    CPU.send_eager(rows, torch.tensor([[0], [1]]), None, world.expert_rank, [window.address])
    assert window.part[64:96].tolist() == list(range(32))

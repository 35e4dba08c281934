"""Captured low-latency calls between real processes: what the reference says, through all windows, and replayed."""

import pytest
import torch
from captured_ranks import CapturedRank, Case
from captured_replay import recorded, replay
from eager_cases import inputs_of
from kernel_cases import bytes_at

from moecomm import _C
from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured import CapturedExchange, captured_memory
from moecomm.testing import launch, masked, uniform, with_duplicates
from moecomm.transports.peers import gather_peers
from moecomm.transports.shm import ShmTransport


def start(group, case):
    """The rank of this process, and what ends it."""
    transport = ShmTransport(group, gather_peers(group), 1)
    places = [transport.addresses(transport.allocate(nbytes)) for nbytes in case.memory()[:3]]
    rank = CapturedRank(case, group.rank, *places)
    rank.poison_all()
    group.all_gather(None)

    def end():
        rank.check_guards()
        group.all_gather(None)
        transport.close()

    return rank, end


def call_after_call(group, case, num_calls):
    rank, end = start(group, case)
    for call in range(num_calls):
        routing = with_duplicates if call % 3 == 2 and case.layout == "expert_major" else masked
        rank.pair(call, case.inputs(call, routing=routing))
    end()


@pytest.mark.parametrize(
    "case",
    [
        Case(1, "slab"),
        Case(1, "expert_major", hidden=1, dtype=torch.float64, values=torch.float64, topk=3, num_experts=3),
        Case(2, "slab", topk=3, hidden=13, weighted=False),
        Case(2, "expert_major", dtype=torch.float32, hidden=16, in_place=True, shift=40),
        Case(3, "slab", values=None, num_experts=2, in_place=True),
        Case(3, "expert_major", hidden=5, dtype=torch.float16, alignment=4),
    ],
    ids=str,
)
def test_dozens_of_calls_give_what_the_reference_says(case):
    launch(call_after_call, case.num_ranks, case, (0, 12, 10, 8)[case.num_ranks], backend="processes", timeout=100)


def test_four_ranks_and_more_ids_than_one_block_holds():
    case = Case(4, "expert_major", most=40, topk=5, num_experts=9, hidden=3)
    launch(call_after_call, 4, case, 2, backend="processes", timeout=100)


def overlap(group, case, num_calls):
    """`depth` calls in flight, each with a block of its own."""
    rank, end = start(group, case)
    others = [rank.exchange.block(case.form, rank.rows.address, rank.values.address) for _ in range(case.depth - 1)]
    blocks = [rank.block, *others]
    for block in others:  # they fill one place in turns, so they share what is known of it
        block.placed.arrived.used.set_(rank.block.placed.arrived.used)
    for call in range(num_calls + case.depth):
        rank.block = blocks[call % case.depth]
        if call >= case.depth:
            rank.receive()
            rank.exchange.check()
            rank.compare(case.inputs(call - case.depth), call - case.depth)
        if call < num_calls:
            rank.send(case.inputs(call))
    end()


def test_two_calls_in_flight_through_four_windows():
    launch(overlap, 2, Case(2, "slab", depth=2), 10, backend="processes", timeout=100)


def replayed(group, case, num_replays):
    """A dispatch and its combine are recorded once, with the number of tokens of each rank, and replayed."""
    rank, end = start(group, case)
    tokens = [3, 0, case.most][: group.size]
    mine = tokens[group.rank]
    ids = torch.full((mine, case.topk), -1)
    x, out = (torch.zeros(mine, case.hidden, dtype=case.dtype) for _ in range(2))
    weights, at_home = torch.zeros(mine, case.topk), torch.zeros(mine, case.topk)
    y = rank.answer(0).clone()
    with recorded() as launches:
        rank.exchange.dispatch(x, ids, rank.block, topk_weights=weights)
        rank.exchange.combine(y, rank.block.placed, out, topk_weights=at_home)
    for call in range(num_replays):
        inputs = inputs_of(
            case.world, tokens, case.topk, hidden=case.hidden, dtype=case.dtype, values=case.values, seed=call
        )
        given = case.inputs(call, tokens)
        inputs.weights = given.weights
        x.copy_(inputs.rows[group.rank])
        ids.copy_(inputs.ids[group.rank])
        weights.copy_(inputs.weights[group.rank])
        at_home.copy_(rank.weights_at_home(call, mine))
        y.copy_(case.answers(call)[group.rank])
        replay(launches)
        rank.exchange.check()
        rank.compare(inputs, call)
        rank.compare_sums(call, out, at_home)
    end()


@pytest.mark.parametrize("case", [Case(2, "slab"), Case(3, "expert_major", hidden=16)], ids=str)
def test_launches_of_one_call_can_be_replayed_with_new_contents(case):
    launch(replayed, case.num_ranks, case, 9, backend="processes", timeout=100)


def test_rows_beyond_two_to_the_31_bytes():
    """Address space is free: the last slab lies 5 GB behind the first, and few pages of it exist."""
    row_bytes, capacity, ranks = 4096, 600_000, torch.zeros(3, dtype=torch.int32)
    space = _C.Mapping.create_private(3 * capacity * row_bytes)
    sizes = {"max_tokens_per_rank": 5, "max_in_flight": 1}
    needed = captured_memory(num_ranks=1, num_topk=2, row_bytes=row_bytes, value_bytes=0, num_rows=1, **sizes)
    memory = [torch.zeros(nbytes // 8 + 8, dtype=torch.int64) for nbytes in (needed.board, needed.windows)]
    board, windows = (-(-one.data_ptr() // 64) * 64 for one in memory)
    exchange = CapturedExchange(
        0,
        boards=[board],
        windows=[windows],
        outputs=[space.address],
        message_bytes=needed.message,
        output_bytes=needed.output,
        expert_rank=ranks,
        expert_local=torch.arange(3, dtype=torch.int32),
        **sizes,
    )
    block = exchange.block(Form(2, row_bytes, 0, capacity, 1, capacity), space.address)
    block.placed.arrived.used.fill_(7)
    last = space.address + (2 * capacity + 6) * row_bytes
    bytes_at(last, row_bytes).fill_(1)
    x, ids = torch.randint(0, 255, (5, row_bytes // 4)).float(), uniform(5, 3, 2)
    exchange.dispatch(x, ids, block)
    out = torch.zeros_like(x)
    rows = bytes_at(space.address, 3 * capacity * row_bytes).view(torch.float32).view(3, capacity, -1)
    exchange.combine(rows, block.placed, out, outputs=exchange.outputs_at([space.address]))
    exchange.check()
    assert torch.equal(out, 2 * x)
    assert torch.equal(rows[2, 0], x[(ids == 2).any(dim=1)][0])
    assert not bytes_at(last, row_bytes).any()
    assert space.resident_bytes() < 64 << 20

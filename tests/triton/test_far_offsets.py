"""Offsets beyond 2**31 in captured calls, in static ones and in what is put: address space is free, few pages exist."""

from contextlib import contextmanager

import pytest
import torch
from kernel_cases import bytes_at
from triton.runtime.interpreter import interpreter_builder

from moecomm import _C
from moecomm.kernels import kernels_for
from moecomm.kernels.captured import FarMemory
from moecomm.kernels.eager import Form
from moecomm.kernels.triton import captured_far, gradients
from moecomm.kernels.triton.captured import CapturedExchange, captured_memory
from moecomm.kernels.triton.captured_blocks import make_arrived
from moecomm.kernels.triton.captured_combine import Outputs, copy_outputs
from moecomm.kernels.triton.captured_messages import MessageLayout, Windows
from moecomm.kernels.triton.captured_state import NUM_SLOTS, make_control
from moecomm.kernels.triton.captured_static import StaticExchange, static_mailbox_bytes
from moecomm.kernels.triton.captured_zeros import Block, zero_rows
from moecomm.kernels.triton.gathered_rows import sum_routed_rows
from moecomm.kernels.triton.nvshmem_device import interpret_with
from moecomm.kernels.triton.runtime import launch
from moecomm.kernels.triton.signals import make_status
from moecomm.kernels.triton.tiles import numbers_of
from moecomm.kernels.wire import Wire

GIB = 1 << 30
MOST_RESIDENT = 64 << 20
# Many short rows, whose numbers do not fit into 32 bits; and fewer long ones, whose bytes do not.
FAR_ROWS = pytest.mark.parametrize(("row", "row_bytes"), [(2**31 + 5, 2), (600_000, 4096)])


def space_of(nbytes):
    return _C.Mapping.create_private(nbytes)


# -- kernels alone -----------------------------------------------------------------------------------------------------


@FAR_ROWS
def test_far_rows_are_blanked(row, row_bytes):
    rows, weights = space_of((row + 3) * row_bytes), space_of((row + 3) * 8)
    spans = torch.tensor([[1, row], [2, row + 2]])
    for place in (0, 1, row - 1, row, row + 1, row + 2):
        bytes_at(rows.address + place * row_bytes, row_bytes).fill_(7)
        bytes_at(weights.address + place * 8, 8).fill_(7)
    zero_rows(make_status(1, "cpu"), spans, Block(rows.address, weights.address, row_bytes, 8, row + 3))
    for place, is_left in ((0, True), (1, False), (row - 1, True), (row, False), (row + 1, False), (row + 2, True)):
        for start, nbytes in ((rows.address, row_bytes), (weights.address, 8)):
            assert bytes_at(start + place * nbytes, nbytes).eq(7 if is_left else 0).all(), (place, nbytes)


@FAR_ROWS
def test_far_rows_are_copied_home(row, row_bytes):
    source, target = space_of((row + 3) * row_bytes), space_of((row + 3) * row_bytes)
    for n, place in enumerate((0, row, row + 1)):
        bytes_at(source.address + place * row_bytes, row_bytes).fill_(n + 1)
    board = torch.zeros(NUM_SLOTS, dtype=torch.int64)
    control, operations = make_control(0, [board.data_ptr()], torch.device("cpu"), 10**9, 2)
    first_rows, lengths = torch.tensor([0, row]), torch.tensor([1, 2], dtype=torch.int32)
    copy_outputs(control, operations[0], (source.address, row_bytes), first_rows, lengths, target.address)
    for n, place in enumerate((0, row, row + 1)):
        assert bytes_at(target.address + place * row_bytes, row_bytes).eq(n + 1).all()
    assert bytes_at(target.address + (row + 2) * row_bytes, row_bytes).eq(0).all()
    assert target.resident_bytes() < MOST_RESIDENT


def test_far_rows_are_scaled_and_multiplied(monkeypatch):
    """One program, of those that a grid for so many rows has; its rows, weights and sums are beyond 2**31."""
    program = 2**26 + 1
    first, num_rows = 32 * program, 32 * program + 5
    spaces = [space_of(num_rows * nbytes) for nbytes in (2, 2, 2, 4, 4)]
    scaled, g, y, weights, dots = (
        bytes_at(space.address, num_rows * nbytes).view(dtype)
        for space, nbytes, dtype in zip(spaces, (2, 2, 2, 4, 4), 3 * [torch.float16] + 2 * [torch.float32], strict=True)
    )
    torch.manual_seed(0)
    for tensor in (g, y, weights):
        tensor[first:] = torch.randn(5).to(tensor.dtype)
    moves = numbers_of("a row", torch.float16, 2, 2)

    def begin(x, y, z):
        interpreter_builder.grid_idx = (program + x, y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", begin)
    addresses = [tensor.data_ptr() for tensor in (scaled, g, y)]
    launch(
        gradients.scale_dot_kernel,
        1,
        g.device,
        *(addresses[0], dots, *addresses[1:], weights, num_rows, moves.num_units),
        **gradients._constants(moves),
    )
    near = [tensor[first:].clone() for tensor in (g, y, weights)]
    want = kernels_for("reference").scale_dot(near[0].view(-1, 1), near[1].view(-1, 1), near[2])
    assert torch.equal(scaled[first:], want[0].view(-1))
    assert torch.equal(dots[first:], want[1])
    assert sum(space.resident_bytes() for space in spaces) < MOST_RESIDENT


@FAR_ROWS
def test_far_rows_are_summed_into_far_rows(row, row_bytes):
    rows, sums = space_of((row + 3) * row_bytes), space_of((row + 1) * row_bytes)
    columns = row_bytes // 2
    all_rows = bytes_at(rows.address, (row + 3) * row_bytes).view(torch.float16).view(-1, columns)
    values = torch.randn(3, columns).half()
    all_rows[[0, row, row + 2]] = values
    out = bytes_at(sums.address, (row + 1) * row_bytes).view(torch.float16).as_strided((2, columns), (row * columns, 1))
    routes = torch.tensor([[row, -1, 0], [0, row + 2, -1]])
    sum_routed_rows(all_rows, routes, out=out)
    want = torch.stack([values[1].float() + values[0].float(), values[0].float() + values[2].float()]).half()
    assert torch.equal(out, want)
    assert sums.resident_bytes() < MOST_RESIDENT


# -- what is put -------------------------------------------------------------------------------------------------------


class Recorder:
    """Notes what kernels ask of a network."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *numbers: self.calls.append((name, *numbers))


@contextmanager
def recorded_network():
    network = Recorder()
    interpret_with(network)
    try:
        yield network.calls
    finally:
        interpret_with(None)


PACKED, WINDOWS, OUTPUTS, LANDINGS = (n << 44 for n in (1, 2, 3, 4))
ROW_BYTES, TICKET = 14336, 2  # the second call, and so the second window


def far_ranks(num_ranks):
    """Control, the operation and far memory of rank 0, to whom all others are far."""
    board = torch.zeros(num_ranks * NUM_SLOTS, dtype=torch.int64)
    boards = [board.data_ptr()] + [0] * (num_ranks - 1)
    control, operations = make_control(0, boards, torch.device("cpu"), 10**9, 2)
    pes = torch.arange(num_ranks, dtype=torch.int32)
    wire = Wire(rank=0, boards=control.boards, pes=pes, board=boards[0], num_slots=NUM_SLOTS)
    return board, control, operations[1], FarMemory(wire, PACKED, LANDINGS, 9 * GIB)


def test_messages_are_put_from_and_to_far_windows():
    board, control, operation, far = far_ranks(3)
    message_bytes, rows_at = 7 * GIB, 3 * GIB
    layout, totals = MessageLayout(64, rows_at, message_bytes), torch.tensor([0, 250_000, 1], dtype=torch.int32)
    with recorded_network() as calls:
        windows = Windows(WINDOWS, message_bytes, 1, 1)
        captured_far.put_messages(control, operation, torch.tensor([TICKET]), far, windows, layout, ROW_BYTES, totals)
    counter = board.data_ptr() + far.wire.lane(operation.slot) * 8
    second = 3 * message_bytes
    assert [call for call in calls if call[0] != "fence"] == [
        (
            "put_signal",
            WINDOWS + second,
            PACKED + second + to * message_bytes,
            rows_at + int(totals[to]) * ROW_BYTES,
            counter,
            1,
            to,
        )
        for to in (1, 2)
    ]


def test_rows_are_put_home_from_and_to_far_places():
    board, control, operation, far = far_ranks(2)
    ranks, local = torch.zeros(2, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    arrived = make_arrived(2, 2, 2, torch.zeros(2, dtype=torch.int64))
    arrived.counts.copy_(torch.tensor([[300_000, 200_000, 0, 0], [400_000, 100_000, 0, 0]]))
    arrived.first_rows.copy_(torch.tensor([0, 700_000]))
    outputs = Outputs(torch.zeros(2, 2, dtype=torch.int64), 20 * GIB, 16, OUTPUTS)
    runs = torch.zeros(2, 2, 3, dtype=torch.int64)
    with recorded_network() as calls:
        captured_far.put_outputs(
            control, operation, torch.tensor([TICKET]), far, outputs, ROW_BYTES, arrived, (ranks, local), runs
        )
    source, target = OUTPUTS + 20 * GIB, LANDINGS + 9 * GIB
    counter = board.data_ptr() + far.wire.lane(operation.slot) * 8
    assert [call for call in calls if call[0] != "fence"] == [
        ("put", target, source + 300_000 * ROW_BYTES, 400_000 * ROW_BYTES, 1),
        (
            "put_signal",
            target + 400_000 * ROW_BYTES,
            source + 900_000 * ROW_BYTES,
            100_000 * ROW_BYTES,
            counter,
            1,
            1,
        ),
    ]


# -- whole calls of two ranks in one process ---------------------------------------------------------------------------

T, K, H = 3, 2, 8
EXPERT_RANK, EXPERT_LOCAL = (torch.tensor(one, dtype=torch.int32) for one in ([0, 0, 1, 1], [0, 1, 0, 1]))


class Pair:
    """Two ranks, whose messages and outputs are each of `nbytes` bytes, hold what they may."""

    def __init__(self, nbytes):
        self.boards = [torch.zeros(2 * NUM_SLOTS, dtype=torch.int64) for _ in range(2)]
        self.spaces = [space_of(4 * nbytes) for _ in range(4)]
        addresses = [space.address for space in self.spaces]
        self.exchanges = [
            CapturedExchange(
                rank,
                boards=[board.data_ptr() for board in self.boards],
                windows=addresses[:2],
                outputs=addresses[2:],
                message_bytes=nbytes,
                output_bytes=nbytes,
                expert_rank=EXPERT_RANK,
                expert_local=EXPERT_LOCAL,
                max_tokens_per_rank=T,
                timeout_ns=10**9,
            )
            for rank in range(2)
        ]

    def check(self):
        for exchange in self.exchanges:
            exchange.check()
        assert sum(space.resident_bytes() for space in self.spaces) < MOST_RESIDENT


def inputs_of(call):
    """x, ids and weights of both ranks; each token names two experts."""
    torch.manual_seed(call)
    for _ in range(2):
        yield torch.randn(T, H), torch.stack([torch.randperm(4)[:K] for _ in range(T)]), torch.rand(T, K)


def test_windows_and_outputs_far_from_the_first():
    nbytes = 3 * GIB
    needed = captured_memory(
        num_ranks=2,
        num_topk=K,
        row_bytes=H * 4,
        value_bytes=4,
        num_rows=4 * T,
        max_tokens_per_rank=T,
        max_in_flight=1,
    )
    assert max(needed.message, needed.output) < nbytes
    pair, form = Pair(nbytes), Form(K, H * 4, 4, 2 * T, 1, 4 * T)
    rows, values = ([torch.zeros(4 * T, width) for _ in range(2)] for width in (H, 1))
    blocks = [
        exchange.block(form, mine.data_ptr(), of_mine.data_ptr())
        for exchange, mine, of_mine in zip(pair.exchanges, rows, values, strict=True)
    ]
    for call in range(3):  # through both windows
        inputs, out = list(inputs_of(call)), torch.zeros(2, T, H)
        for exchange, block, (x, ids, weights) in zip(pair.exchanges, blocks, inputs, strict=True):
            exchange.send(x, ids, block, topk_weights=weights)
        for exchange, block in zip(pair.exchanges, blocks, strict=True):
            exchange.receive(block)
        for rank, block in enumerate(blocks):
            assert_arrived(rank, block.placed.arrived, rows[rank], values[rank].view(-1), inputs)
        for exchange, block, mine in zip(pair.exchanges, blocks, rows, strict=True):
            exchange.send_rows(mine, block.placed)
        for rank, (exchange, block) in enumerate(zip(pair.exchanges, blocks, strict=True)):
            exchange.sum_rows(block.placed, out[rank])
            assert torch.equal(out[rank], K * inputs[rank][0])
        pair.check()


def assert_arrived(rank, arrived, rows, values, inputs):
    """Rows of each expert: those of the first source, then those of the second, in the order of tokens."""
    for local, expert in enumerate((rank == EXPERT_RANK).nonzero().view(-1).tolist()):
        first, count = int(arrived.first_rows[local]), int(arrived.num_tokens_per_expert[local])
        chosen = [(ids == expert).nonzero() for _, ids, _ in inputs]
        want = torch.cat([x[where[:, 0]] for (x, _, _), where in zip(inputs, chosen, strict=True)])
        assert torch.equal(rows[first : first + count], want)
        want = torch.cat([weights[ids == expert] for _, ids, weights in inputs])
        assert torch.equal(values[first : first + count], want)


@pytest.mark.parametrize("is_flat", [False, True])
def test_static_calls_in_far_places(is_flat):
    """Blocks, and rows that go home, lie up to 13 GB behind where the memory of all begins."""
    pair, num_rows = Pair(1 << 20), 2 * T if is_flat else 4 * T
    regions = [space_of(14 * GIB) for _ in range(2)]
    mailboxes = [space_of(static_mailbox_bytes(num_ranks=2, num_experts=4, max_in_flight=1)) for _ in range(2)]
    statics = [
        StaticExchange(exchange, [one.address for one in mailboxes], [one.address for one in regions])
        for exchange in pair.exchanges
    ]
    form = Form(K, H * 4, 4, 0, 1, num_rows)
    # At each rank they lie elsewhere.
    places = [[(n + rank) * GIB + 64 for n in (5, 7, 9, 10, 12)] for rank in range(2)]
    blocks = [
        static.block(form, rows_at, values_at, T, ids_at=ids_at if is_flat else None)
        for static, (rows_at, values_at, ids_at, _, _) in zip(statics, places, strict=True)
    ]
    width = K if is_flat else 1
    rows, values = (
        [
            bytes_at(region.address + at[plane], num_rows * width * 4).view(torch.float32).view(-1, width)
            for region, at in zip(regions, places, strict=True)
        ]
        for plane, width in enumerate((H, width))
    )
    for call in range(2):
        inputs, out, home = list(inputs_of(call)), torch.zeros(2, T, H), torch.zeros(2, T, K)
        for static, block, (x, ids, weights) in zip(statics, blocks, inputs, strict=True):
            static.announce(x, ids, block, signature=1, topk_weights=weights)
        for static, block in zip(statics, blocks, strict=True):
            static.push(block)
        for rank, (static, block) in enumerate(zip(statics, blocks, strict=True)):
            static.arrive(block)
            if not is_flat:
                assert_arrived(rank, block.placed.arrived, rows[rank], values[rank].view(-1), inputs)
        for static, block, at, mine, of_mine in zip(statics, blocks, places, rows, values, strict=True):
            beside = of_mine.clone() if is_flat else of_mine.view(-1).clone()
            how = {"place": at[3], "values": beside, "values_at": at[4]}
            static.send_rows(mine, block.answered, signature=1, **how)
        for rank, (static, block) in enumerate(zip(statics, blocks, strict=True)):
            x, ids, weights = inputs[rank]
            static.sum_rows(
                block.answered, out[rank], signature=1, home=home[rank], topk_idx=ids.int() if is_flat else None
            )
            # A token has one row at each rank (flat), or one for each of its experts.
            copies = torch.tensor([len(set(EXPERT_RANK[one].tolist())) for one in ids]) if is_flat else torch.tensor(K)
            assert torch.equal(out[rank], copies.view(-1, 1) * x)
            assert torch.equal(home[rank], weights)
        for static, block in zip(statics, blocks, strict=True):
            static.release(block.answered)
        pair.check()
    assert sum(region.resident_bytes() for region in regions) < MOST_RESIDENT

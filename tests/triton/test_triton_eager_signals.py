"""Low-latency calls by device code only: send, signal, wait, receive; under chaos and between real processes.

What arrives is compared with the reference kernels bit by bit, while windows are used again and sizes change.
"""

import pytest
import torch
import triton
from eager_cases import REFERENCE, Receiver, World, blocks_of, grouped, inputs_of, send, slab
from interpreter_chaos import Chaos
from kernel_cases import assert_same_bits
from window_ranks import POISON, fill

from moecomm.kernels.eager import message_bytes
from moecomm.kernels.triton import signals
from moecomm.kernels.triton.eager import TritonEagerKernels
from moecomm.testing import launch
from moecomm.transports.peers import gather_peers
from moecomm.transports.shm import ShmTransport

EXPERTS, TOPK, HIDDEN, MOST_TOKENS = 5, 2, 6, 4
SLOT = 0
TIMEOUT_NS = 20_000_000_000
WINDOW_BYTES = message_bytes(MOST_TOKENS, TOPK, HIDDEN * 2, 4)


def block_of(world, layout):
    most = [MOST_TOKENS] * world.num_ranks
    return slab(world, most) if layout == "slab" else grouped(world, most, TOPK, 3)


def inputs_for(world, call):
    tokens = [(call + 2 * rank + 1) % (MOST_TOKENS + 1) for rank in range(world.num_ranks)]
    with torch.random.fork_rng():  # every rank makes the same
        torch.manual_seed(call)
        return inputs_of(world, tokens, TOPK, hidden=HIDDEN, values=torch.float32, seed=call)


class EagerRank:
    """One rank with `depth` calls in flight; too_little: windows that lack, 0 is right."""

    def __init__(self, rank, boards, windows, *, num_calls, layout, depth=1, too_little=0):
        self.rank, self.boards, self.windows, self.num_calls = rank, torch.tensor(boards), windows, num_calls
        self.depth, self.num_windows = depth, 2 * depth - too_little
        self.world = World(blocks_of(EXPERTS, len(boards)), len(boards))
        self.status = signals.make_status(len(boards), "cpu")
        self.kernels = TritonEagerKernels()
        block = block_of(self.world, layout)
        self.mine, self.wanted = (
            Receiver(kernels, self.world, rank, HIDDEN * 2, 4, **block) for kernels in (self.kernels, REFERENCE)
        )

    def run(self):
        for call in range(self.num_calls + self.depth):
            if call >= self.depth:
                self.receive(call - self.depth)
            if call < self.num_calls:
                self.send(call)

    def window(self, call, rank, source):
        return self.windows[rank] + (call % self.num_windows * self.world.num_ranks + source) * WINDOW_BYTES

    def send(self, call):
        inputs, ranks = inputs_for(self.world, call), range(self.world.num_ranks)
        rows, ids, weights = inputs.rows[self.rank], inputs.ids[self.rank], inputs.weights[self.rank]
        windows = [self.window(call, peer, self.rank) for peer in ranks]
        self.kernels.send_eager(rows, ids, weights, self.world.expert_rank, windows)
        signals.signal_all(self.boards, self.rank, SLOT)

    def receive(self, call):
        board = self.boards[self.rank].item()
        signals.wait(board, SLOT, call + 1, status=self.status, timeout_ns=TIMEOUT_NS)
        signals.raise_if_behind(self.status, f"call #{call}")
        inputs = inputs_for(self.world, call)
        expected = self.wanted.receive(send(REFERENCE, self.world, inputs)[0], inputs)
        found = self.mine.receive(
            {self.rank: [Window(self, call, source) for source in range(len(inputs.ids))]}, inputs
        )
        num_values = self.world.num_ranks * WINDOW_BYTES // 4
        fill[(1,)](self.window(call, self.rank, 0), num_values, POISON, BLOCK=triton.next_power_of_2(num_values))
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_same_bits(one, other)
        assert_same_bits(self.mine.everything, self.wanted.everything)


class Window:
    """The message of a source, for `Receiver`."""

    def __init__(self, rank, call, source):
        self.address = rank.window(call, rank.rank, source)


# -- under chaos -------------------------------------------------------------------------------------------------------


def exchange(num_ranks, seed, **options):
    num_windows = 2 * options.get("depth", 1)
    boards = torch.zeros(num_ranks, 1, num_ranks, dtype=torch.int64)
    windows = torch.full((num_ranks, num_windows * num_ranks * WINDOW_BYTES + 64), 0xA5, dtype=torch.uint8)
    places = [-(-window.data_ptr() // 64) * 64 for window in windows]
    ranks = [
        EagerRank(rank, [board.data_ptr() for board in boards], places, **options).run for rank in range(num_ranks)
    ]
    Chaos(seed, shared=[boards, windows]).run(*ranks)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"num_calls": 4, "layout": "slab"}),
        (2, {"num_calls": 5, "layout": "expert_major", "depth": 2}),
        (3, {"num_calls": 3, "layout": "slab"}),
    ],
)
def test_what_arrives_is_what_the_reference_says(num_ranks, options, seed):
    exchange(num_ranks, seed, **options)


def test_one_window_too_few_gives_other_bits_with_one_of_six_seeds():
    caught = []
    for seed in range(6):
        try:
            exchange(2, seed, num_calls=4, layout="slab", too_little=1)
        except AssertionError as error:
            caught.append(error)
            break
    assert caught, "with every seed the bits were right all the same"


# -- between processes -------------------------------------------------------------------------------------------------


def exchange_as_process(group, layout, depth):
    transport = ShmTransport(group, gather_peers(group), 1)
    boards = transport.allocate(signals.board_bytes(group.size, 1))
    windows = transport.allocate(2 * depth * group.size * WINDOW_BYTES)
    places = transport.addresses(boards), transport.addresses(windows)
    EagerRank(group.rank, *places, num_calls=3 + 2 * depth, layout=layout, depth=depth).run()
    group.all_gather(None)
    transport.close()


@pytest.mark.parametrize(
    ("num_ranks", "layout"), [(1, "slab"), (2, "expert_major"), (3, "slab"), (3, "expert_major"), (4, "slab")]
)
def test_processes_with_device_signals_get_what_the_reference_says(num_ranks, layout):
    depth = 1 + num_ranks % 2
    launch(exchange_as_process, num_ranks, layout, depth, backend="processes", timeout=100)

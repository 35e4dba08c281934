"""The native parts below the exchange by themselves: blocks of an arena, mappings, counters that ranks wait for."""

import ctypes
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecomm import _C

PAGE = 4096
REACHED, TIMEOUT, LOST = range(3)


# -- arena -------------------------------------------------------------------------------------------------------------


def pages(nbytes):
    return max(1, -(-nbytes // PAGE)) * PAGE


class Model:
    """What an arena should do: the lowest hole that is large enough, unless there is address space to be generous."""

    def __init__(self, begin, nbytes, limit):
        self.begin, self.end, self.limit = begin, begin + nbytes // PAGE * PAGE, limit
        self.is_generous = nbytes // PAGE * PAGE > 2 * limit + 1
        self.blocks = {}

    def check(self, nbytes, offset):
        size = pages(nbytes)
        if nbytes > self.limit or sum(self.blocks.values()) + size > self.limit:
            assert offset is None
        elif not self.is_generous:
            assert offset == self.lowest(size)
        if offset is None:
            return
        assert self.begin <= offset <= self.end - size
        assert offset % PAGE == 0
        for start, taken in self.blocks.items():
            assert start + taken <= offset or offset + size <= start, "blocks overlap"

    def lowest(self, size):
        offset = self.begin
        for start, taken in sorted(self.blocks.items()):
            if start - offset >= size:
                break
            offset = start + taken
        return offset if offset + size <= self.end else None


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 6 * PAGE)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("trim"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(
    operations=OPERATIONS,
    begin=st.integers(0, 3),
    num_pages=st.integers(1, 64),
    limit=st.integers(1, 30 * PAGE),
    odd=st.integers(0, PAGE - 1),
)
def test_blocks_are_disjoint_lowest_first_within_the_limit_and_return(operations, begin, num_pages, limit, odd):
    begin, nbytes = begin * PAGE, num_pages * PAGE + odd
    mapping = _C.Mapping.create_private(begin + nbytes)
    arena = _C.Arena(mapping, limit, begin, nbytes)
    model, blocks, peak = Model(begin, nbytes, limit), [], 0
    for what, number in operations:
        block = None
        if what == "allocate":
            block = arena.allocate(number)
            model.check(number, None if block is None else block.offset)
            if block is None:
                continue
            assert block.nbytes == number
            assert block.address == mapping.address + block.offset
            assert bytes(memoryview(block)[:1]) in (b"", bytes(1), b"x")
            memoryview(block)[:] = b"x" * number
            model.blocks[block.offset] = pages(number)
            blocks.append(block)
        elif what == "free" and blocks:
            block = blocks.pop(number % len(blocks))
            assert bytes(memoryview(block)) == b"x" * block.nbytes
            del model.blocks[block.offset]
            block = None
        elif what == "trim":
            before = arena.usage().touched_bytes
            assert arena.trim() == before - sum(model.blocks.values())
        usage = arena.usage()
        live = sum(model.blocks.values())
        peak = max(peak, live)
        assert (usage.live_bytes, usage.live_blocks) == (live, len(blocks))
        assert (usage.limit, usage.peak_bytes) == (limit, peak)
        assert live <= limit
        assert live <= usage.touched_bytes <= nbytes
        assert mapping.resident_bytes() <= usage.touched_bytes
    block = None
    blocks.clear()
    assert arena.usage().live_bytes == 0
    everything = min(limit, nbytes) // PAGE * PAGE
    whole = arena.allocate(everything) if everything else None
    assert not everything or whole.offset == begin, "the space did not grow together again"


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out", "random"])
@pytest.mark.parametrize("spread", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("alive", [1, 2, 3, 8])
def test_tensors_of_similar_size_keep_using_the_same_pages(alive, spread, order):
    """Whatever the order in which they die, no more pages than so many of the largest take; and soon no new ones."""
    numbers = random.Random(f"{alive} {spread} {order}")
    arena = _C.Arena(_C.Mapping.create_private(1 << 32), 1 << 30)
    blocks, largest, touched = [], 0, []
    for step in range(400):
        nbytes = int(1_000_000 * (1 + spread * numbers.uniform(-1, 1)))
        if step < 10:
            nbytes //= 10  # a smaller batch to begin with
        largest = max(largest, pages(nbytes))
        while len(blocks) >= alive:
            blocks.pop({"f": 0, "l": -1, "r": numbers.randrange(len(blocks))}[order[0]])
        blocks.append(arena.allocate(nbytes))
        touched.append(arena.usage().touched_bytes)
    assert touched[-1] <= 1.25 * largest * alive
    if spread < 0.1:
        assert touched[-1] <= touched[99] * 1.05


def test_a_range_outside_the_mapping_is_refused():
    mapping = _C.Mapping.create_private(4 * PAGE)
    for begin, nbytes in ((0, 5 * PAGE), (PAGE, 4 * PAGE), (5 * PAGE, 0), (100, PAGE)):
        with pytest.raises(ValueError, match="Arena"):
            _C.Arena(mapping, PAGE, begin, nbytes)
    assert _C.Arena(mapping, PAGE, 4 * PAGE, 0).allocate(1) is None


def test_a_block_keeps_its_memory_when_arena_and_mapping_are_gone():
    arena = _C.Arena(_C.Mapping.create_private(4 * PAGE), 4 * PAGE)
    block = arena.allocate(100)
    view = memoryview(block)
    del arena, block
    gc.collect()
    view[:3] = b"abc"
    assert bytes(view[:4]) == b"abc\0"
    assert len(view) == 100


@pytest.mark.parametrize("make", ["private", "shared"])
def test_trim_gives_back_the_pages_between_live_blocks_and_only_those(make):
    nbytes = 64 * PAGE
    mapping = _C.Mapping.create_private(nbytes) if make == "private" else _C.Mapping.create_shared("test", nbytes)
    mapping.close_fd()  # not needed to trim
    arena = _C.Arena(mapping, nbytes)
    blocks = [arena.allocate(8 * PAGE) for _ in range(6)]
    for number, block in enumerate(blocks):
        memoryview(block)[:] = bytes([number + 1]) * len(memoryview(block))
    block = None
    assert mapping.resident_bytes() == 48 * PAGE
    del blocks[4], blocks[1]  # leaves 0, 2, 3, 5
    assert arena.trim() == 16 * PAGE
    assert mapping.resident_bytes() == 32 * PAGE
    for number, block in zip((0, 2, 3, 5), blocks, strict=True):
        assert bytes(memoryview(block)) == bytes([number + 1]) * 8 * PAGE
    again = arena.allocate(8 * PAGE)
    assert again.offset == 8 * PAGE
    assert not any(bytes(memoryview(again)))
    assert arena.usage().touched_bytes == 40 * PAGE
    block = again = None
    blocks.clear()
    assert arena.trim() == 40 * PAGE
    assert (mapping.resident_bytes(), arena.usage().touched_bytes) == (0, 0)


def test_blocks_may_come_and_go_on_many_threads():
    arena = _C.Arena(_C.Mapping.create_private(1 << 22), 1 << 22)
    wrong = []

    def work(number):
        for turn in range(200):
            kept = [arena.allocate(1 + (number * 37 + turn * 11 + i) % (3 * PAGE)) for i in range(4)]
            for block in kept:
                memoryview(block)[:] = bytes([number]) * block.nbytes
            for block in kept:
                if bytes(memoryview(block)) != bytes([number]) * block.nbytes:
                    wrong.append(number)

    run_threads([(work, number) for number in range(8)])
    assert not wrong
    assert arena.usage().live_blocks == 0
    assert arena.usage().num_allocations == 8 * 200 * 4


def run_threads(calls):
    threads = [threading.Thread(target=call, args=args, daemon=True) for call, *args in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


# -- mapping -----------------------------------------------------------------------------------------------------------


def test_what_the_system_refuses_is_an_oserror_that_says_what():
    for make in (lambda: _C.Mapping.create_private(1 << 60), lambda: _C.Mapping.create_shared("test", 1 << 60)):
        with pytest.raises(OSError, match=f"mmap of {1 << 60} bytes: Cannot allocate memory"):
            make()
    with pytest.raises(FileNotFoundError, match="open of /proc/4194304/fd/3"):
        _C.Mapping.open_peer(4194304, 3, PAGE)


def test_a_mapping_of_another_size_is_refused():
    mapping = _C.Mapping.create_shared("test", 2 * PAGE)
    with pytest.raises(OSError, match="has 8192 bytes instead of 4096"):
        _C.Mapping.open_peer(os.getpid(), mapping.fd, PAGE)


def test_address_space_costs_no_memory():
    mapping = _C.Mapping.create_shared("test", 1 << 32)
    arena = _C.Arena(mapping, 1 << 32)
    block = arena.allocate(1 << 31)
    assert block is not None
    memoryview(block)[:PAGE] = bytes(PAGE)
    assert PAGE <= mapping.resident_bytes() <= 1 << 21  # where the system gives large pages


# -- counters ----------------------------------------------------------------------------------------------------------


def boards(num_ranks, num_slots=2, pids=None, spin_ns=0):
    nbytes = _C.SignalBoard.board_bytes(num_ranks, num_slots)
    mappings = [_C.Mapping.create_private(nbytes) for _ in range(num_ranks)]
    addresses = [mapping.address for mapping in mappings]
    return [
        _C.SignalBoard(
            rank=rank,
            num_slots=num_slots,
            boards=addresses,
            pids=pids or [0] * num_ranks,
            spin_ns=spin_ns,
            mappings=mappings,
        )
        for rank in range(num_ranks)
    ]


def test_each_source_has_a_lane_of_its_own():
    first, second, third = boards(3)
    first.signal(1, 0, 5)
    third.signal(1, 0, 7)
    third.signal(1, 1, 2)
    assert [second.lane(0, source) for source in range(3)] == [5, 0, 7]
    assert [second.lane(1, source) for source in range(3)] == [0, 0, 2]
    assert (second.total(0), first.total(0), third.total(0)) == (12, 0, 0)
    assert second.reached(1, 0)
    assert not second.reached(0, 1)
    second.signal_all(0, 6)
    assert second.reached(0, 5)
    assert not second.reached(0, 6)
    assert second.wait(0, 5, 10.0) == REACHED
    for wrong in (lambda: first.signal(3, 0, 1), lambda: first.signal(0, 2, 1), lambda: first.lane(0, 3)):
        with pytest.raises(ValueError, match="out of range"):
            wrong()


def test_what_was_posted_is_there_once_the_counter_is():
    ranks = boards(2)
    inbox = [_C.Mapping.create_private(PAGE) for _ in ranks]
    message = bytearray(b"hello")
    source = (ctypes.c_char * 5).from_buffer(message)
    ranks[0].post(ctypes.addressof(source), 5, [box.address for box in inbox], 0, 1, 3)
    assert [board.lane(1, 0) for board in ranks] == [3, 3]
    assert [bytes(box.view(0, 6)) for box in inbox] == [b"hello\0"] * 2


@pytest.mark.parametrize("spin_ns", [0, 50_000])
def test_a_wait_ends_in_time_and_not_before(spin_ns):
    first, _ = boards(2, spin_ns=spin_ns)
    start = time.monotonic()
    assert first.wait(0, 1, 0.3) == TIMEOUT
    assert 0.3 <= time.monotonic() - start < 10
    assert first.wait(0, 1, 0.0) == TIMEOUT


@pytest.mark.parametrize("spin_ns", [0, 50_000])
def test_a_signal_wakes_a_sleeper(spin_ns):
    first, second = boards(2, spin_ns=spin_ns)
    first.signal(0, 0, 1)
    outcome = []

    def wait():
        start = time.monotonic()
        outcome.append((first.wait(0, 1, 20.0), time.monotonic() - start))

    def signal():
        time.sleep(0.2)
        second.signal(0, 0, 1)

    run_threads([(wait,), (signal,)])
    assert outcome[0][0] == REACHED
    assert outcome[0][1] < 10


def test_a_rank_that_departs_ends_the_waits_for_it_but_not_those_that_it_has_fulfilled():
    first, second, third = boards(3)
    for board in (first, second, third):
        board.signal_all(1, 1)
    outcome = []
    run_threads([(lambda: outcome.append(first.wait(0, 1, 20.0)),), (lambda: (time.sleep(0.1), second.depart()),)])
    assert outcome == [LOST]
    assert first.gone() == third.gone() == [1]
    assert first.wait(1, 1, 20.0) == REACHED
    third.mark_departed(0)
    assert second.gone() == [0, 1]


def test_many_ranks_signal_and_wait_without_losing_any():
    num_ranks, turns = 6, 300
    ranks = boards(num_ranks)
    wrong = []

    def work(rank):
        for turn in range(1, turns + 1):
            ranks[rank].signal_all(0, 1)
            if ranks[rank].wait(0, turn, 20.0) != REACHED:
                wrong.append((rank, turn))
                return

    run_threads([(work, rank) for rank in range(num_ranks)])
    assert not wrong
    assert [board.total(0) for board in ranks] == [num_ranks * turns] * num_ranks


def test_a_process_that_ends_is_seen_also_before_it_is_reaped():
    peer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        first, _ = boards(2, pids=[0, peer.pid])
        first.signal(0, 0, 1)
        assert first.process_alive(1)
        assert first.wait(0, 1, 0.1) == TIMEOUT
        outcome = []
        run_threads([(lambda: outcome.append(first.wait(0, 1, 60.0)),), (lambda: (time.sleep(0.1), peer.kill()),)])
        assert outcome == [LOST]
        assert not first.process_alive(1)
        assert first.gone() == [1]
    finally:
        peer.kill()
        peer.wait()
    first, _ = boards(2, pids=[0, peer.pid])
    assert first.gone() == [1]
    assert first.wait(0, 1, 60.0) == LOST


def test_borrowed_memory_is_carved_and_left_alone():
    class Owner:
        """Holds memory."""

        memory = bytearray(8 * PAGE)

    owner = Owner()
    address = ctypes.addressof(ctypes.c_char.from_buffer(owner.memory))
    lives = weakref.ref(owner)
    mapping = _C.Mapping.borrow(address, 4 * PAGE, owner)
    arena = _C.Arena(mapping, 4 * PAGE)
    del owner, mapping
    block = arena.allocate(3 * PAGE)
    assert block.address == address
    assert arena.allocate(2 * PAGE) is None
    memoryview(block)[:] = b"\1" * (3 * PAGE)
    del block
    assert arena.trim() == 0, "memory of others was given back"
    assert Owner.memory[: 3 * PAGE] == b"\1" * (3 * PAGE)
    assert lives() is not None
    del arena
    assert lives() is None

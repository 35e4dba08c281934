"""Signals and waits of device code, interpreted: their arithmetic, their ends, and rows between real processes."""

import time

import pytest
import torch
from window_ranks import (
    BEFORE_COPY,
    BY_ITSELF,
    BY_LAST_PROGRAM,
    BY_NEXT_KERNEL,
    NUM_SLOTS,
    SLOT,
    Form,
    WindowRank,
    received,
)

from moecomm.errors import PeerTimeout
from moecomm.kernels.triton.signals import board_bytes, make_status, raise_if_behind, signal, signal_all, wait
from moecomm.testing import launch
from moecomm.transports.peers import gather_peers
from moecomm.transports.shm import ShmTransport

MILLISECOND = 1_000_000


def make_boards(num_ranks, num_slots=NUM_SLOTS):
    """Boards of all ranks, `[R, slots, R]`, and the table of their addresses."""
    boards = torch.zeros(num_ranks, num_slots, num_ranks, dtype=torch.int64)
    return boards, torch.tensor([board.data_ptr() for board in boards])


# -- signal ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_signal_all_adds_to_my_lane_everywhere_and_to_no_other(num_ranks):
    boards, table = make_boards(num_ranks)
    expected = torch.zeros_like(boards)
    for rank in range(num_ranks):
        for n in (1, 2**40 + rank):
            signal_all(table, rank, 2, n=n)
            expected[:, 2, rank] += n
    assert torch.equal(boards, expected)


def test_signal_adds_to_my_lane_of_one_peer():
    boards, table = make_boards(3)
    signal(table, 1, 0, peer=2)
    signal(table, 2, 1, peer=2, n=5)
    assert boards.nonzero().tolist() == [[2, 0, 1], [2, 1, 2]]
    assert (boards[2, 0, 1], boards[2, 1, 2]) == (1, 5)


def test_a_rank_without_a_board_is_skipped():
    boards, table = make_boards(4)
    table[1] = 0
    signal_all(table, 3, 0)
    assert boards[:, 0, 3].tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda table: signal_all(table, 3, 0), "rank is 3, but boards has 3"),
        (lambda table: signal_all(table, -1, 0), "rank is -1"),
        (lambda table: signal_all(table, 0, -1), "slot is -1 and n is 1"),
        (lambda table: signal_all(table, 0, 0, n=-2), "n is -2"),
        (lambda table: signal_all(table.int(), 0, 0), r"boards is torch.int32 \[3\]"),
        (lambda table: signal_all(table.repeat(2)[::2], 0, 0), "wanted contiguous"),
        (lambda table: signal(table, 0, 0, peer=3), "peer is 3, but boards has 3"),
        (lambda table: signal_all(table, 0, 0, status=make_status(2, "cpu")), r"status is torch.int64 \[6\].*\[7\]"),
        (lambda table: wait(0, 0, 1, status=torch.zeros(4, dtype=torch.int64), timeout_ns=1), r"torch.int64 \[4\]"),
        (lambda table: wait(0, -1, 1, status=make_status(2, "cpu"), timeout_ns=1), "slot is -1"),
        (lambda table: wait(0, 0, -1, status=make_status(2, "cpu"), timeout_ns=1), "at_least is -1"),
        (lambda table: wait(0, 0, torch.zeros(1), status=make_status(2, "cpu"), timeout_ns=1), "torch.float32"),
        (lambda table: wait(0, 0, table, status=make_status(2, "cpu"), timeout_ns=1), r"torch.int64 \[3\]"),
    ],
)
def test_wrong_arguments_are_refused_with_both_values(call, words):
    _, table = make_boards(3)
    with pytest.raises(ValueError, match=words):
        call(table)


# -- wait --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("from_memory", [False, True])
def test_a_wait_whose_lanes_are_there_ends_and_reports_nothing(num_ranks, from_memory):
    boards, _ = make_boards(num_ranks)
    boards[0, 1] = torch.arange(num_ranks) + 2**40
    status = make_status(num_ranks, "cpu")
    wait(
        boards.data_ptr(),
        1,
        torch.tensor([2**40]) if from_memory else 2**40,
        status=status,
        timeout_ns=10_000 * MILLISECOND,
    )
    assert not status.any()
    raise_if_behind(status, "call #0")


@pytest.mark.parametrize("from_memory", [False, True])
def test_a_wait_that_is_not_reached_ends_in_time_and_says_who_was_behind(from_memory):
    boards, _ = make_boards(4)
    boards[0, 2] = torch.tensor([7, 6, 9, 2])
    status = make_status(4, "cpu")
    began = time.monotonic()
    value = torch.tensor([7]) if from_memory else 7
    wait(boards.data_ptr(), 2, value, status=status, timeout_ns=60 * MILLISECOND)
    assert 0.06 <= time.monotonic() - began < 20
    with pytest.raises(PeerTimeout) as caught:
        raise_if_behind(status, "call #3", describe=lambda rank: f"rank {rank} (pid {100 + rank})")
    assert caught.value.peers == (1, 3)
    assert caught.value.operation == "call #3"
    text = str(caught.value)
    assert text.startswith("call #3: slot 2: the device waited 0.")
    assert "rank 1 (pid 101): counter at 6, expected 7; rank 3 (pid 103): counter at 2, expected 7." in text
    assert boards[0, 2].tolist() == [7, 6, 9, 2]


def test_the_first_failure_stays_and_later_waits_do_not_wait_for_their_deadline():
    boards, _ = make_boards(2)
    boards[0, 1, 0] = 1
    status = make_status(2, "cpu")
    wait(boards.data_ptr(), 1, 1, status=status, timeout_ns=MILLISECOND)
    first = status.clone()
    began = time.monotonic()
    for slot in (0, 1, 2):
        wait(boards.data_ptr(), slot, 5, status=status, timeout_ns=100_000 * MILLISECOND)
    assert time.monotonic() - began < 20
    is_clock = torch.arange(len(status)) == 1
    assert torch.equal(status[~is_clock], first[~is_clock])
    boards[0] = 5
    wait(boards.data_ptr(), 1, 5, status=status, timeout_ns=MILLISECOND)  # what is there is seen all the same
    with pytest.raises(PeerTimeout) as caught:
        raise_if_behind(status, "call #0")
    assert caught.value.peers == (1,)
    status.zero_()
    wait(boards.data_ptr(), 1, 5, status=status, timeout_ns=MILLISECOND)
    raise_if_behind(status, "call #1")


def test_after_a_failed_wait_nothing_is_signalled_until_the_status_is_cleared():
    boards, table = make_boards(2)
    status = make_status(2, "cpu")
    signal_all(table, 0, 0, status=status)
    wait(boards.data_ptr(), 1, 1, status=status, timeout_ns=MILLISECOND)
    signal_all(table, 0, 0, status=status)
    signal(table, 0, 0, peer=1, status=status)
    assert boards.sum() == 2
    status.zero_()
    signal_all(table, 0, 0, status=status)
    assert boards[:, 0, 0].tolist() == [2, 2]


# -- between processes -------------------------------------------------------------------------------------------------


def shared_rank(group, form):
    """This process as a rank: boards and windows in shared memory, addressed by all."""
    transport = ShmTransport(group, gather_peers(group), 1)
    boards = transport.allocate(board_bytes(group.size, NUM_SLOTS))
    windows = transport.allocate(form.num_windows * form.window_bytes)
    return transport, WindowRank(form, group.rank, transport.addresses(boards), transport.addresses(windows))


def exchange(group, form):
    transport, rank = shared_rank(group, form)
    num_rows = rank.run()
    group.all_gather(None)
    transport.close()
    return num_rows


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("signals", "waits", "from_memory"),
    [
        (BY_LAST_PROGRAM, BY_ITSELF, False),
        (BY_NEXT_KERNEL, BEFORE_COPY, False),
        (BY_LAST_PROGRAM, BEFORE_COPY, True),
    ],
)
def test_rows_between_processes_arrive_bit_by_bit_while_windows_are_used_again(num_ranks, signals, waits, from_memory):
    depth = 1 + num_ranks % 2
    form = Form(num_ranks, depth, num_calls=8 * depth, signals=signals, waits=waits, from_memory=from_memory)
    num_rows = launch(exchange, num_ranks, form, backend="processes", timeout=100)
    calls = range(form.num_calls)
    assert num_rows == [sum(int(received(form, n, r)[:, 0, 0].sum()) for n in calls) for r in range(num_ranks)]


def wait_for_the_silent(group, form):
    """Rank 1 does not signal; the others find out by themselves."""
    transport, rank = shared_rank(group, form)
    board = rank.boards[group.rank].item()
    if group.rank != 1:
        signal_all(rank.boards, group.rank, SLOT, n=3)
        wait(board, SLOT, 2, status=rank.status, timeout_ns=500 * MILLISECOND)
    group.all_gather(None)
    try:
        raise_if_behind(rank.status, "call #2")
        return None
    except PeerTimeout as error:
        return error.peers, str(error)
    finally:
        transport.close()


def test_a_silent_process_is_named_by_all_that_waited_for_it():
    first, silent, third = launch(wait_for_the_silent, 3, Form(3, 1, 1), backend="processes", timeout=100)
    assert silent is None
    for peers, text in (first, third):
        assert 1 in peers
        assert "rank 1: counter at 0, expected 2" in text

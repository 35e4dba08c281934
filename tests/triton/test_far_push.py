"""Puts and signals of device code over a network that is late, cuts and reorders; mistakes, and arguments refused."""

from collections import Counter

import pytest
import torch
from far_ranks import MISTAKES, Form, Round, exchange
from triton.runtime.errors import InterpreterError

from moecomm.errors import PeerTimeout
from moecomm.kernels.far_runs import FarRun, Memory, make_runs
from moecomm.kernels.triton import signals
from moecomm.kernels.triton.far_push import far_push
from moecomm.kernels.triton.far_wait import far_wait
from moecomm.kernels.triton.nvshmem_device import interpret_with
from moecomm.kernels.wire import Wire
from moecomm.testing import launch

NOTHING, EIGHT = Memory(0, 0), Memory(0, 8)


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_rows_to_near_and_far_ranks_arrive_bit_by_bit(num_ranks, parts, layout):
    for seed in range(2):
        found = launch(exchange, num_ranks, Form(seed, parts, layout), backend="processes", timeout=100)
        assert all((num_runs > 0) == (num_ranks > 2) and not wrong for num_runs, wrong, _ in found)
        assert all(calls.count("refresh") == 6 for _, _, calls in found)
        if num_ranks > 2:
            wanted = {"put", "put_signal", "signal", "fence", "quiet", "refresh"}
            called = {call for _, _, calls in found for call in calls}
            # Grants are pushes of one part, without runs.
            assert called == (wanted if parts == 1 else wanted - {"put_signal", "fence"})


def test_without_a_quiet_packed_rows_may_change_once_all_far_ranks_have_answered():
    for seed in range(3):
        found = launch(exchange, 3, Form(seed, 1, quiet=False), backend="processes", timeout=100)
        assert not any(wrong for _, wrong, _ in found)
        assert not any("quiet" in calls for _, _, calls in found)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_other_rows_with_one_of_a_few_seeds(mistake):
    parts = 3 if mistake in ("no quiet", "first part signals") else 1
    for seed in range(12):
        form = Form(seed, parts, mistake=mistake)
        if any(wrong for _, wrong, _ in launch(exchange, 3, form, backend="processes", timeout=100)):
            return
    pytest.fail("with every seed the rows were right all the same")


def test_every_round_has_several_runs_for_a_rank_and_ranks_without_tokens():
    rounds = [Round(3, number, "expert_major") for number in range(3)]
    assert any((one.counts[0, :7] > 0).sum() > 3 for one in rounds)
    assert any(len(x) == 0 for one in rounds for x in one.x)


def test_runs_are_sorted_by_rank_and_cut():
    runs = make_runs([FarRun(2, 100, 0, 25), FarRun(0, 8, 50, 10), FarRun(2, 7, 9, 0)], 3, "cpu", most_bytes=10)
    assert runs.table.tolist() == [[8, 50, 10], [100, 0, 10], [110, 10, 10], [120, 20, 5]]
    assert runs.starts.tolist() == [0, 1, 1, 4]
    assert (runs.region_bytes, runs.source_bytes) == (125, 60)
    big = 3 << 40
    assert make_runs([FarRun(1, big, big + 1, 5)], 2, "cpu").table.tolist() == [[big, big + 1, 5]]
    assert make_runs([], 2, "cpu").table.shape == (0, 3)


def wire(**changes):
    parts = {"rank": 0, "boards": torch.zeros(2, dtype=torch.int64), "pes": torch.arange(2, dtype=torch.int32)}
    return Wire(**{**parts, "board": 4096, "num_slots": 2, **changes})


def push(runs=None, **changes):
    far_push(
        wire(),
        make_runs([], 2, "cpu") if runs is None else runs,
        **{"source": NOTHING, "region": NOTHING, "slot": 0, **changes},
    )


SOME = make_runs([FarRun(1, 16, 4, 4)], 2, "cpu")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make_runs([FarRun(2, 0, 0, 1)], 2, "cpu"), r"rank=2.*there are 2 ranks"),
        (lambda: make_runs([FarRun(1, 0, -1, 1)], 2, "cpu"), r"source=-1.*no number may be negative"),
        (lambda: make_runs([], 2, "cpu", most_bytes=0), "most_bytes is 0"),
        (lambda: wire(rank=2), "rank is 2, but boards has 2"),
        (lambda: wire(boards=torch.zeros(2, dtype=torch.int32)), r"boards is torch.int32 \[2\]"),
        (lambda: wire(pes=torch.arange(3, dtype=torch.int32)), r"pes is \[3\] on cpu, boards \[2\]"),
        (lambda: push(slot=2), "slot is 2; a board has 2"),
        (lambda: push(make_runs([], 3, "cpu")), "runs is for 3 ranks on cpu; wanted 2"),
        (lambda: push(SOME, source=EIGHT, region=Memory(0, 19)), "region has 19 bytes, but runs reach to byte 20"),
        (lambda: push(SOME, source=Memory(0, 7), region=Memory(0, 20)), "source has 7 bytes, but runs reach to byte 8"),
        (lambda: push(n=-1), "n is -1 and parts is 1"),
        (lambda: push(parts=0), "parts is 0"),
        (lambda: push(parts=2), r"arrivals is None; with 2 parts wanted torch.int32 \[2\]"),
        (lambda: push(parts=2, arrivals=torch.zeros(2)), r"arrivals is torch.float32 \[2\]"),
        (lambda: push(status=signals.make_status(3, "cpu")), r"status is torch.int64 \[7\].*\[6\]"),
        (lambda: far_wait(wire(), 2, 1, status=signals.make_status(2, "cpu"), timeout_ns=1), "slot is 2"),
        (lambda: far_wait(wire(), 0, -1, status=signals.make_status(2, "cpu"), timeout_ns=1), "at_least is -1"),
        (lambda: push(to=2), "to is 2; there are 2 ranks"),
        (
            lambda: far_wait(
                *(wire(), 0, 1), status=signals.make_status(2, "cpu"), timeout_ns=1, awaited=torch.ones(2)
            ),
            r"awaited is torch.float32 \[2\] on cpu; wanted torch.int32 \[2\]",
        ),
        (lambda: far_wait(wire(), 0, torch.zeros(2), status=signals.make_status(2, "cpu"), timeout_ns=1), r"\[2\]"),
    ],
)
def test_wrong_arguments_are_refused_with_both_values(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_an_interpreted_kernel_without_a_network_says_so():
    interpret_with(None)
    with pytest.raises(InterpreterError, match=r"calls signal of NVSHMEM.*nothing stands in"):
        push()


class Counting:
    """A network that only counts."""

    def __init__(self):
        self.calls = Counter()

    def __getattr__(self, name):
        return lambda *arguments: self.calls.update([name])


def test_after_a_failed_wait_nothing_is_put_or_signalled():
    network, status = Counting(), signals.make_status(2, "cpu")
    board = torch.zeros(2, 2, dtype=torch.int64)
    mine = wire(boards=torch.tensor([board.data_ptr(), 0]), board=board.data_ptr())
    runs = make_runs([FarRun(1, 0, 0, 4), FarRun(1, 4, 4, 4)], 2, "cpu")
    interpret_with(network)
    try:
        far_wait(mine, 1, 1, status=status, timeout_ns=1_000_000)
        far_push(mine, runs, source=EIGHT, region=EIGHT, slot=0, status=status)
        assert network.calls == {"refresh": 1}
        assert not board.any()
        status.zero_()
        far_push(mine, runs, source=EIGHT, region=EIGHT, slot=0, status=status)
        assert network.calls == {"refresh": 1, "put": 1, "fence": 1, "put_signal": 1, "quiet": 1}
        assert board.nonzero().tolist() == [[0, 0]]
    finally:
        interpret_with(None)


def test_a_wait_for_some_ranks_neither_awaits_nor_blames_the_others():
    status = signals.make_status(3, "cpu")
    board = torch.tensor([[5, 0, 0], [0, 0, 0]])
    three = {"boards": torch.zeros(3, dtype=torch.int64), "pes": torch.arange(3, dtype=torch.int32)}
    mine = wire(**three, board=board.data_ptr())
    interpret_with(Counting())
    try:
        far_wait(mine, 0, 5, status=status, timeout_ns=1_000_000, awaited=torch.tensor([1, 0, 0], dtype=torch.int32))
        signals.raise_if_behind(status, "a call")
        far_wait(mine, 0, 5, status=status, timeout_ns=1_000_000, awaited=torch.tensor([1, 0, 1], dtype=torch.int32))
        with pytest.raises(PeerTimeout, match="for rank 2: counter at 0, expected 5") as caught:
            signals.raise_if_behind(status, "a call")
    finally:
        interpret_with(None)
    assert caught.value.peers == (2,)


def test_what_is_put_to_one_rank_signals_nobody_else():
    network = Counting()
    board = torch.zeros(2, 2, dtype=torch.int64)
    mine = wire(boards=torch.tensor([board.data_ptr(), 0]), board=board.data_ptr())
    interpret_with(network)
    try:
        far_push(mine, SOME, source=Memory(0, 8), region=Memory(0, 20), slot=0, to=1)
    finally:
        interpret_with(None)
    assert network.calls == {"put_signal": 1, "quiet": 1}
    assert not board.any()

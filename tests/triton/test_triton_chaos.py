"""Signals and waits of device code when memory and schedule are as unkind as a GPU's may be; mistakes must come out."""

import pytest
import torch
import triton
import triton.language as tl
from interpreter_chaos import Chaos, Stuck
from window_ranks import (
    BEFORE_COPY,
    BY_NEXT_KERNEL,
    BY_ONLY_PROGRAM,
    NUM_SLOTS,
    SIGNAL_MISTAKES,
    WAIT_MISTAKES,
    Form,
    Unequal,
    WindowRank,
    received,
)

from moecomm.errors import PeerTimeout
from moecomm.kernels.triton import lanes, signals

SEEDS = range(6)
MISTAKE_SEEDS = range(4)


class Memory:
    """Boards and windows of all ranks."""

    def __init__(self, form):
        self.boards = torch.zeros(form.num_ranks, NUM_SLOTS, form.num_ranks, dtype=torch.int64)
        self.windows = torch.zeros(form.num_ranks, form.num_windows * form.window_bytes // 4, dtype=torch.int32)

    def rank(self, form, rank):
        boards = [board.data_ptr() for board in self.boards]
        windows = [window.data_ptr() for window in self.windows]
        return WindowRank(form, rank, boards, windows)

    def chaos(self, seed):
        return Chaos(seed, shared=[self.boards, self.windows])


def exchange(form, seed):
    """Runs all ranks; returns how many rows each has got."""
    memory = Memory(form)
    return memory.chaos(seed).run(*[memory.rank(form, rank).run for rank in range(form.num_ranks)])


def expected_rows(form):
    calls = range(form.num_calls)
    return [sum(int(received(form, n, r)[:, 0, 0].sum()) for n in calls) for r in range(form.num_ranks)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "form",
    [
        Form(1, 1, 4),
        Form(2, 1, 5),
        Form(2, 1, 5, num_programs=1, signals=BY_ONLY_PROGRAM),
        Form(2, 2, 7, signals=BY_NEXT_KERNEL),
        Form(2, 1, 5, waits=BEFORE_COPY, from_memory=True),
        Form(3, 1, 4, num_programs=2, signals=BY_NEXT_KERNEL, waits=BEFORE_COPY),
        Form(4, 1, 3, num_programs=2),
    ],
    ids=str,
)
def test_right_kernels_bear_it(form, seed):
    assert exchange(form, seed) == expected_rows(form)


MISTAKES = [
    *(Form(2, 1, 5, signals=mistake) for mistake in SIGNAL_MISTAKES),
    *(Form(2, 1, 5, waits=mistake) for mistake in WAIT_MISTAKES),
    Form(2, 1, 5, too_few=1),
    Form(2, 1, 5, waits=BEFORE_COPY, too_few=1),
    Form(2, 1, 6, too_little=1),
    Form(2, 2, 7, too_little=1),
]


@pytest.mark.parametrize("form", MISTAKES, ids=str)
def test_each_mistake_gives_wrong_rows_with_one_of_four_seeds(form):
    caught = []
    for seed in MISTAKE_SEEDS:
        try:
            exchange(form, seed)
        except Unequal as error:
            caught.append(str(error))
            break
    assert caught, "wrong kernels have given right rows with every seed"


@pytest.mark.parametrize("mistake", SIGNAL_MISTAKES + WAIT_MISTAKES)
def test_the_interpreter_by_itself_does_not_see_these_mistakes(mistake):
    """Which is why there is chaos: with one rank and its programs one after the other all of them go unnoticed."""
    wrong = {"signals": mistake} if mistake in SIGNAL_MISTAKES else {"waits": mistake}
    form = Form(1, 1, 3, **wrong)
    memory = Memory(form)
    assert [memory.rank(form, 0).run()] == expected_rows(form)


@triton.jit
def sum_in_last_program(out, parts, arrivals, PARTS: tl.constexpr):
    tl.store(parts + tl.program_id(0), tl.program_id(0) + 1)
    if lanes.is_last_program(arrivals):
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, PARTS))))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_program_sees_what_the_others_have_stored_launch_after_launch(seed):
    out, parts, arrivals = (torch.zeros(size, dtype=torch.int32) for size in (1, 4, 1))
    chaos = Chaos(seed, shared=[parts])

    def body():
        for _ in range(3):
            chaos.write(parts, 1000)
            out.zero_()
            sum_in_last_program[(4,)](out, parts, arrivals, PARTS=4)
            assert (out.item(), arrivals.item()) == (10, 0)

    chaos.run(body)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_peer_that_does_not_come_is_reported_once_by_all_programs_that_wait(seed):
    form = Form(3, 1, 1)
    memory = Memory(form)

    def come(rank):
        me = memory.rank(form, rank)
        out = torch.full((3, 8, 12), -1, dtype=torch.int32)

        def body():
            if rank == 2:
                return None
            signals.signal_all(me.boards, rank, 1, n=4)
            me.copy(out, 0, at_least=4, timeout_ns=30_000)
            with pytest.raises(PeerTimeout) as caught:
                signals.raise_if_behind(me.status, "call #0")
            assert (out == -1).all()
            return caught.value.peers

        return body

    for peers in memory.chaos(seed).run(*[come(rank) for rank in range(3)])[:2]:
        assert 2 in peers


# -- what chaos itself does --------------------------------------------------------------------------------------------


@triton.jit
def write_then_flag(data, flag, RELEASE: tl.constexpr, SCOPE: tl.constexpr, FENCED: tl.constexpr):
    tl.store(data, 1)
    if FENCED:
        tl.debug_barrier()
    tl.atomic_add(flag, 1, sem=RELEASE, scope=SCOPE)


@triton.jit
def flag_then_read(out, data, flag, ACQUIRE: tl.constexpr, SCOPE: tl.constexpr, FENCED: tl.constexpr):
    tl.store(out, tl.atomic_add(flag, 0, sem=ACQUIRE, scope=SCOPE))
    if FENCED:
        tl.debug_barrier()
    tl.store(out + 1, tl.load(data))


@triton.jit
def write_or_read(out, data, flag, RELEASE: tl.constexpr, ACQUIRE: tl.constexpr, SCOPE: tl.constexpr):
    if tl.program_id(0) == 0:
        write_then_flag(data, flag, RELEASE, SCOPE, True)
    else:
        flag_then_read(out, data, flag, ACQUIRE, SCOPE, True)


def outcomes(run):
    """What (flag, data) a reader has seen with one of many seeds."""
    seen = set()
    for seed in range(40):
        data, flag, out = (torch.zeros(size, dtype=torch.int32) for size in (1, 1, 2))
        run(Chaos(seed, shared=[data, flag]), out, data, flag)
        seen.add(tuple(out.tolist()))
    return seen


FLAG_WITHOUT_DATA = (1, 0)


@pytest.mark.parametrize(
    ("release", "acquire", "scope", "fenced", "is_ordered"),
    [
        ("release", "acquire", "sys", (True, True), True),
        ("acq_rel", "acq_rel", "sys", (True, True), True),
        ("relaxed", "acquire", "sys", (True, True), False),
        ("release", "relaxed", "sys", (True, True), False),
        ("acquire", "release", "sys", (True, True), False),
        ("release", "acquire", "gpu", (True, True), False),
        ("release", "acquire", "sys", (False, True), False),
        ("release", "acquire", "sys", (True, False), False),
    ],
)
def test_between_ranks_data_come_with_the_flag_only_if_all_is_right(release, acquire, scope, fenced, is_ordered):
    def run(chaos, out, data, flag):
        chaos.run(
            lambda: write_then_flag[(1,)](data, flag, release, scope, fenced[0]),
            lambda: flag_then_read[(1,)](out, data, flag, acquire, scope, fenced[1]),
        )

    seen = outcomes(run)
    assert {(0, 0), (1, 1)} <= seen
    assert (FLAG_WITHOUT_DATA not in seen) == is_ordered


@pytest.mark.parametrize(("release", "acquire"), [("release", "acquire"), ("relaxed", "acquire")])
def test_between_programs_of_one_grid_device_scope_is_enough(release, acquire):
    def run(chaos, out, data, flag):
        chaos.run(lambda: write_or_read[(2,)](out, data, flag, release, acquire, "gpu"))

    assert (FLAG_WITHOUT_DATA not in outcomes(run)) == (release == "release")


@triton.jit
def number_programs(out, counter):
    tl.store(out + tl.program_id(0), tl.atomic_add(counter, 1, sem="relaxed", scope="gpu"))


@triton.jit
def add_one(values, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(values + at, tl.load(values + at) + 1)


@triton.jit
def spin(flag):
    while tl.load(flag, volatile=True) == 0:
        pass


def orders(seed):
    chaos, out, counter = Chaos(seed), torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def body():
        number_programs[(4,)](out, counter)
        return out.tolist()

    return tuple(chaos.run(body)[0])


def test_programs_run_in_every_order_and_a_seed_gives_one():
    seen = [orders(seed) for seed in range(60)]
    assert len(set(seen)) > 15
    assert [orders(seed) for seed in range(5)] == seen[:5]


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_of_one_rank_see_those_before_them(seed):
    values = torch.zeros(16, dtype=torch.int32)
    chaos = Chaos(seed, shared=[values])

    def body():
        for number in range(5):
            chaos.write(values[number : number + 1], 100)
            add_one[(1,)](values, BLOCK=16)
        return chaos.read(values).tolist()

    expected = [105 - number if number < 5 else 5 for number in range(16)]
    assert chaos.run(body)[0] == expected
    assert values.tolist() == expected


def test_ranks_that_get_nowhere_are_stuck():
    chaos, flag = Chaos(0, max_steps=2000), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Stuck, match="have not come to their end"):
        chaos.run(lambda: spin[(1,)](flag))

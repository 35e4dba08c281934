"""Ranks that push rows into each other's windows by kernels, signal, wait and compare: in real processes or in one.

    R ranks   T rows of a call   H columns   W windows

In call n a rank sends each of its rows to some of the ranks, and to each its number of rows, in a message in window
n % W. A rank has `depth` calls in flight: it receives call n - depth, then sends call n.

message [1 + MOST_ROWS, H] int32:   number of rows in the first column of row 0 | rows
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moecomm.kernels.triton import lanes, signals

COLUMNS = 12
MOST_ROWS = 7
POISON = -559038737
SLOT = 1
NUM_SLOTS = 3
ROW_BYTES = COLUMNS * 4
MESSAGE_BYTES = (1 + MOST_ROWS) * ROW_BYTES
TIMEOUT_NS = 20_000_000_000

# The same for device code.
_H = tl.constexpr(COLUMNS)
_BLOCK = tl.constexpr(16)
_MOST = tl.constexpr(MOST_ROWS)
_ROW = tl.constexpr(ROW_BYTES)
_MESSAGE = tl.constexpr(MESSAGE_BYTES)
_SLOT = tl.constexpr(SLOT)

BY_LAST_PROGRAM, BY_ONLY_PROGRAM, BY_NEXT_KERNEL = "by the last program", "by the only program", "by the next kernel"
SIGNAL_MISTAKES = ("before data", "no barrier", "relaxed", "device scope", "relaxed arrival")
BY_ITSELF, BEFORE_COPY = "by itself", "before the copy"
WAIT_MISTAKES = ("no barrier", "relaxed", "device scope")


@triton.jit
def release_wrongly(arrivals, boards, num_boards, lane, MISTAKE: tl.constexpr, BOARDS: tl.constexpr):
    """As `lanes.release_from_last_program`, with a mistake."""
    peers = tl.arange(0, BOARDS)
    board = tl.load(boards + peers, mask=peers < num_boards, other=0)
    counters = (board + lane * 8).to(tl.pointer_type(tl.int64))
    if MISTAKE != "no barrier":
        tl.debug_barrier()
    if MISTAKE == "relaxed arrival":
        before = tl.atomic_add(arrivals, 1, sem="relaxed", scope="gpu")
    else:
        before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if before == tl.num_programs(0) - 1:
        tl.store(arrivals, 0)
        tl.debug_barrier()
        if MISTAKE == "relaxed":
            tl.atomic_add(counters, 1, mask=board != 0, sem="relaxed", scope="sys")
        elif MISTAKE == "device scope":
            tl.atomic_add(counters, 1, mask=board != 0, sem="release", scope="gpu")
        else:
            tl.atomic_add(counters, 1, mask=board != 0, sem="release", scope="sys")


@triton.jit
def acquire_wrongly(board, slot, at_least, num_ranks, MISTAKE: tl.constexpr, RANKS: tl.constexpr):
    """As `lanes.acquire_lanes`, with a mistake."""
    is_rank = tl.arange(0, RANKS) < num_ranks
    counters = (board + (slot * num_ranks + tl.arange(0, RANKS)) * 8).to(tl.pointer_type(tl.int64))
    num_behind = 1
    while num_behind > 0:
        if MISTAKE == "relaxed":
            seen = tl.atomic_add(counters, 0, mask=is_rank, sem="relaxed", scope="sys")
        elif MISTAKE == "device scope":
            seen = tl.atomic_add(counters, 0, mask=is_rank, sem="acquire", scope="gpu")
        else:
            seen = tl.atomic_add(counters, 0, mask=is_rank, sem="acquire", scope="sys")
        num_behind = tl.sum((is_rank & (seen < at_least)).to(tl.int32))
    if MISTAKE != "no barrier":
        tl.debug_barrier()


@triton.jit
def push_rows(rows, places, num_rows, messages, arrivals, boards, num_ranks, lane, HOW: tl.constexpr, R: tl.constexpr):
    """Program p sends rows p, p + number of programs, ...; program 0 the numbers of rows, too.

    places [T + 1, R]: where each row lies in the message to each rank, -1 = it is not sent; last the numbers of rows.
    messages [R]: address of mine at each rank.
    """
    ranks = tl.arange(0, R)
    columns = tl.arange(0, _BLOCK)
    is_rank = ranks < num_ranks
    is_column = columns < _H
    message = tl.load(messages + ranks, mask=is_rank, other=0)
    if HOW == "before data":
        lanes.release_from_last_program(arrivals, boards, num_ranks, lane, 1, R)
    if tl.program_id(0) == 0:
        number = tl.load(places + num_rows * num_ranks + ranks, mask=is_rank, other=0).to(tl.int32)
        tl.store(message.to(tl.pointer_type(tl.int32)), number, mask=is_rank)
    for t in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.load(rows + t * _H + columns, mask=is_column)
        place = tl.load(places + t * num_ranks + ranks, mask=is_rank, other=-1)
        start = (message + (1 + place) * _ROW).to(tl.pointer_type(tl.int32))
        is_sent = (is_rank & (place >= 0))[:, None] & is_column[None, :]
        tl.store(start[:, None] + columns[None, :], row[None, :].broadcast_to(R, _BLOCK), mask=is_sent)
    if HOW == "by the last program":
        lanes.release_from_last_program(arrivals, boards, num_ranks, lane, 1, R)
    elif HOW == "by the only program":
        lanes.release_lane(boards, num_ranks, lane, 1, R)
    elif HOW != "by the next kernel" and HOW != "before data":
        release_wrongly(arrivals, boards, num_ranks, lane, HOW, R)


@triton.jit
def copy_messages(out, window, num_ranks, board, at_least, status, timeout_ns, HOW: tl.constexpr, R: tl.constexpr):
    """Program p copies the message of source p, having waited for all, unless a kernel before it has."""
    columns = tl.arange(0, _BLOCK)
    is_column = columns < _H
    num_behind = 0
    if HOW == "by itself":
        num_behind = lanes.acquire_lanes(board, _SLOT, at_least, num_ranks, status, timeout_ns, R)
    elif HOW != "before the copy":
        acquire_wrongly(board, _SLOT, at_least, num_ranks, HOW, R)
    if num_behind == 0:
        message = (window + tl.program_id(0) * _MESSAGE).to(tl.pointer_type(tl.int32))
        copy = out + tl.program_id(0) * (_MESSAGE // 4)
        num_rows = tl.load(message)
        tl.store(copy, num_rows)
        for row in range(1, 1 + tl.minimum(tl.maximum(num_rows, 0), _MOST)):
            tl.store(copy + row * _H + columns, tl.load(message + row * _H + columns, mask=is_column), mask=is_column)


@triton.jit
def fill(window, num_values, value, BLOCK: tl.constexpr):
    """Poisons what has been read."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.full([BLOCK], 0, tl.int32) + value
    tl.store(window.to(tl.pointer_type(tl.int32)) + at, values, mask=at < num_values)


@dataclass(frozen=True)
class Form:
    """What all ranks do alike.

    Attributes:
        num_programs: of a push.
        signals: how a push ends: one of BY_... or of SIGNAL_MISTAKES.
        waits: how a copy begins: BY_ITSELF, BEFORE_COPY or one of WAIT_MISTAKES.
        from_memory: a wait before the copy reads its value from memory.
        too_few: calls fewer than needed are waited for; 0 is right.
        too_little: windows that lack; 0 is right.
    """

    num_ranks: int
    depth: int
    num_calls: int
    num_programs: int = 3
    signals: str = BY_LAST_PROGRAM
    waits: str = BY_ITSELF
    from_memory: bool = False
    too_few: int = 0
    too_little: int = 0

    @property
    def num_windows(self):
        return 2 * self.depth - self.too_little

    @property
    def window_bytes(self):
        return self.num_ranks * MESSAGE_BYTES


def sent(form, call, source):
    """rows [T, H] and places [T + 1, R] of one rank in one call: functions of their numbers, so receivers know them."""
    make = torch.Generator().manual_seed(1000 * call + source)
    num_rows = (call * 3 + source * 5) % (MOST_ROWS + 1)
    rows = torch.randint(-(2**31), 2**31, (num_rows, COLUMNS), generator=make).to(torch.int32)
    is_sent = torch.rand(num_rows, form.num_ranks, generator=make) < 0.7
    places = torch.where(is_sent, is_sent.long().cumsum(0) - 1, -1)
    return rows, torch.cat([places, is_sent.long().sum(0)[None]])


def received(form, call, rank):
    """What a rank must find: [R, 1 + MOST_ROWS, H], poison where nothing was sent."""
    messages = torch.full((form.num_ranks, 1 + MOST_ROWS, COLUMNS), POISON, dtype=torch.int32)
    for source in range(form.num_ranks):
        rows, places = sent(form, call, source)
        messages[source, 0, 0] = places[-1, rank]
        mine = rows[places[:-1, rank] >= 0]
        messages[source, 1 : 1 + len(mine)] = mine
    return messages


class Unequal(AssertionError):
    """Rows are not what was sent."""


class WindowRank:
    """One rank.

    Arguments:
        boards, windows: per rank the address of its board and of its windows, here.
    """

    def __init__(self, form, rank, boards, windows):
        self.form, self.rank, self.boards, self.windows = form, rank, torch.tensor(boards), windows
        self.status = signals.make_status(form.num_ranks, "cpu")
        self.arrivals = torch.zeros(1, dtype=torch.int32)
        self.expected = torch.zeros(1, dtype=torch.int64)
        self.block = triton.next_power_of_2(form.num_ranks)

    def run(self):
        """Makes all calls; returns how many rows it has got."""
        form = self.form
        for window in range(form.num_windows):
            self.poison(window)
        signals.signal_all(self.boards, self.rank, SLOT)
        signals.wait(self.boards[self.rank].item(), SLOT, 1, status=self.status, timeout_ns=TIMEOUT_NS)
        num_rows = 0
        for call in range(form.num_calls + form.depth):
            if call >= form.depth:
                num_rows += self.receive(call - form.depth)
            if call < form.num_calls:
                self.send(call)
        return num_rows

    def window(self, call, rank):
        return self.windows[rank] + call % self.form.num_windows * self.form.window_bytes

    def poison(self, call):
        num_values = self.form.window_bytes // 4
        fill[(2,)](self.window(call, self.rank), num_values, POISON, BLOCK=triton.next_power_of_2(-(-num_values // 2)))

    def send(self, call):
        form, rank = self.form, self.rank
        rows, places = sent(form, call, rank)
        messages = torch.tensor([self.window(call, peer) + rank * MESSAGE_BYTES for peer in range(form.num_ranks)])
        push_rows[(form.num_programs,)](
            *(rows, places, len(rows), messages, self.arrivals, self.boards),
            *(form.num_ranks, SLOT * form.num_ranks + rank),
            HOW=form.signals,
            R=self.block,
        )
        if form.signals == BY_NEXT_KERNEL:
            signals.signal_all(self.boards, rank, SLOT)

    def receive(self, call):
        form, rank = self.form, self.rank
        board, at_least = self.boards[rank].item(), call + 2 - form.too_few
        if form.waits == BEFORE_COPY:
            if form.from_memory:
                self.expected.fill_(at_least)
            value = self.expected if form.from_memory else at_least
            signals.wait(board, SLOT, value, status=self.status, timeout_ns=TIMEOUT_NS)
        out = torch.full((form.num_ranks, 1 + MOST_ROWS, COLUMNS), POISON, dtype=torch.int32)
        self.copy(out, call, at_least=at_least)
        self.poison(call)
        signals.raise_if_behind(self.status, f"call #{call}")
        expected = received(form, call, rank)
        if not torch.equal(out, expected):
            where = (out != expected).nonzero()[0].tolist()
            raise Unequal(f"rank {rank}, call #{call}, at {where}: {out[tuple(where)]}, not {expected[tuple(where)]}")
        return int(out[:, 0, 0].sum())

    def copy(self, out, call, *, at_least, timeout_ns=TIMEOUT_NS):
        form = self.form
        copy_messages[(form.num_ranks,)](
            *(out, self.window(call, self.rank), form.num_ranks, self.boards[self.rank].item()),
            *(at_least, self.status, timeout_ns),
            HOW=form.waits,
            R=self.block,
        )

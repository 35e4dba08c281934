"""Ranks on several "hosts", in processes: rows by kernels, near ones stored, far ones put through a late network.

    R ranks, two of them on each host   heap: what a rank has, at the same offsets everywhere

heap:   board [SLOTS, R] int64 | received rows [MOST_ROWS, H] | packed rows [MOST_ROWS, H]

In each round every rank is granted the others' received rows, pushes its own, packs far ones, puts them in runs,
poisons what it has packed, waits, and compares with what `plan_exchange` says that it must have got. Rank r has the PE
R - 1 - r.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from late_network import LateNetwork

from moecomm.algorithms.far_rows import FarRows
from moecomm.algorithms.plan import plan_exchange
from moecomm.kernels.far_runs import FarRun, Memory, make_runs
from moecomm.kernels.reference import ReferenceRowKernels
from moecomm.kernels.triton import far_push, far_wait, nvshmem_device, signals
from moecomm.kernels.triton.lanes import release_lane
from moecomm.kernels.triton.rows import TritonRowKernels
from moecomm.kernels.wire import Wire
from moecomm.placement import Placement
from moecomm.transports.peers import gather_peers
from moecomm.transports.shm import ShmTransport

EXPERTS, TOPK, HIDDEN, MOST_ROWS = 7, 2, 6, 64
ROW_BYTES = HIDDEN * 4
GRANTED, PUSHED, SLOTS = 0, 1, 2
POISON = -559038737
TIMEOUT_NS = 20_000_000_000
MISTAKES = ("signal before puts", "no fence", "no quiet", "first part signals", "no quiet at the end", "wrong peer")


@triton.jit
def put_run(runs, i, source, region, pe):
    nvshmem_device.put(
        region + tl.load(runs + 3 * i), source + tl.load(runs + 3 * i + 1), tl.load(runs + 3 * i + 2), pe
    )


@triton.jit
def broken_push(
    runs, starts, source, region, rank, num_ranks, boards, pes, board, lane, n, arrivals, status,
    MISTAKE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """As `far_push_kernel`, with a mistake."""
    to = (rank + 1 + tl.program_id(0) // PARTS) % num_ranks
    part = tl.program_id(0) % PARTS
    if tl.load(boards + to) != 0:
        if part == 0:
            release_lane(boards + to, 1, lane, n, 1)
    else:
        pe = tl.load(pes + to)
        run = tl.load(starts + to)
        end = tl.load(starts + to + 1)
        if MISTAKE == "signal before puts":
            nvshmem_device.signal(board + lane * 8, n, pe)
        for i in range(run + part, end, PARTS):
            put_run(runs, i, source, region, pe)
        if MISTAKE == "first part signals":
            nvshmem_device.quiet()
            if part == 0:
                nvshmem_device.signal(board + lane * 8, n, pe)
        if MISTAKE == "no quiet" and far_push.is_last_part(arrivals + to, PARTS):
            nvshmem_device.signal(board + lane * 8, n, pe)
        if MISTAKE == "no fence":
            nvshmem_device.signal(board + lane * 8, n, pe)
        if MISTAKE != "first part signals" and MISTAKE != "no quiet":
            nvshmem_device.quiet()


@dataclass(frozen=True)
class Form:
    """What all ranks do alike. Without `quiet`, packed rows change only when every far rank has granted once more."""

    seed: int
    parts: int
    layout: str = "expert_major"
    rounds: int = 3
    most_bytes: int = 2 * ROW_BYTES + 4
    quiet: bool = True
    mistake: str = ""


class Round:
    """What every rank sends in one round; a function of its number, so that all know it.

    Attributes:
        counts: `[R, E + R]` int32, as `plan_exchange` wants them.
        received: per rank, `[MOST_ROWS, H]` int32, poison where nothing was sent.
    """

    def __init__(self, num_ranks, number, layout):
        make, kernels = torch.Generator().manual_seed(number), ReferenceRowKernels()
        self.placement, ranks = Placement(EXPERTS, num_ranks), range(num_ranks)
        num_tokens = [(4 + 3 * rank + 2 * number) % 7 for rank in ranks]
        self.ids = [torch.randint(-1, EXPERTS, (count, TOPK), generator=make) for count in num_tokens]
        self.x = [torch.randint(2**31, (count, HIDDEN), generator=make).int() for count in num_tokens]
        counts = torch.zeros(num_ranks, EXPERTS + num_ranks, dtype=torch.int32)
        for rank in ranks:
            kernels.count_routes(self.ids[rank], self.placement.expert_rank, num_ranks, counts[rank])
        self.counts = counts.numpy()
        self.received = [torch.full((MOST_ROWS, HIDDEN), POISON, dtype=torch.int32) for _ in ranks]
        plan = kernels.plan_flat if layout == "flat" else kernels.plan_expert_major
        for rank in ranks:
            bases = torch.from_numpy(plan_exchange(self.counts, self.placement, rank, layout, 1).bases)
            routes = plan(self.ids[rank], self.placement.expert_rank, bases)
            kernels.push_rows(self.x[rank], routes, [rows.data_ptr() for rows in self.received])


def heap_bytes(num_ranks):
    return SLOTS * num_ranks * 8 + 2 * MOST_ROWS * ROW_BYTES


class FarRank:
    """One rank. `heaps`: by rank the address of each one's heap here, which kernels use for near ranks only."""

    def __init__(self, form, rank, heaps):
        self.form, self.rank, self.heaps, num_ranks = form, rank, heaps, len(heaps)
        is_far = [peer // 2 != rank // 2 for peer in range(num_ranks)]
        self.far = [peer for peer in range(num_ranks) if is_far[peer]]
        self.received_at = SLOTS * num_ranks * 8
        self.packed_at = self.received_at + MOST_ROWS * ROW_BYTES
        self.nbytes = heap_bytes(num_ranks)
        self.wire = Wire(
            rank=rank,
            boards=torch.tensor([0 if far else heap for heap, far in zip(heaps, is_far, strict=True)]),
            pes=torch.arange(num_ranks, dtype=torch.int32).flip(0),
            board=heaps[rank],
            num_slots=SLOTS,
        )
        self.wrong_rounds = []
        self.status = signals.make_status(num_ranks, "cpu")
        self.arrivals = torch.zeros(num_ranks, dtype=torch.int32)

    def rows(self, offset):
        """Rows of mine, as a tensor over the heap."""
        memory = (ctypes.c_int32 * (MOST_ROWS * HIDDEN)).from_address(self.heaps[self.rank] + offset)
        return torch.from_numpy(np.ctypeslib.as_array(memory).reshape(MOST_ROWS, HIDDEN))

    def run(self):
        """Makes all rounds; returns how many runs it has put."""
        num_runs = 0
        for number in range(self.form.rounds):
            self.rows(self.received_at).fill_(POISON)
            self.push([], GRANTED, parts=1)
            self.wait(GRANTED, number + 1)
            self.rows(self.packed_at).fill_(POISON)
            num_runs += self.exchange(Round(len(self.heaps), number, self.form.layout), number)
        return num_runs

    def exchange(self, sent, number):
        rank, form = self.rank, self.form
        packed = FarRows(sent.counts, sent.placement, rank, self.far, form.layout, 1)
        kernels = TritonRowKernels()
        addresses = [heap + self.received_at for heap in self.heaps]
        [parts] = packed.addresses(self.heaps[rank] + self.packed_at, [ROW_BYTES])
        for peer, part in parts.items():
            addresses[peer] = part
        numbers = sent.placement.expert_rank, torch.from_numpy(packed.bases)
        kernels.push_rows(sent.x[rank], packed.routes(kernels, sent.ids[rank], *numbers), addresses)
        runs = [
            FarRun(peer, self.received_at + there * ROW_BYTES, self.packed_at + here * ROW_BYTES, count * ROW_BYTES)
            for peer in self.far
            for there, here, count in packed.runs(peer)
        ]
        if form.mistake == "wrong peer" and runs:
            runs[0] = runs[0]._replace(target=runs[0].target + ROW_BYTES)
        self.push(runs, PUSHED, form.parts)
        if form.quiet:
            self.rows(self.packed_at).fill_(POISON)
        self.wait(PUSHED, number + 1)
        signals.raise_if_behind(self.status, f"round {number}")
        if not torch.equal(self.rows(self.received_at).clone(), sent.received[rank]):
            self.wrong_rounds.append(number)
        return len(runs)

    def push(self, runs, slot, parts):
        form, wire, heap = self.form, self.wire, self.heaps[self.rank]
        table = make_runs(runs, len(self.heaps), "cpu", most_bytes=form.most_bytes)
        if slot == PUSHED and form.mistake in MISTAKES[:4]:
            broken_push[(len(self.heaps) * parts,)](
                *(table.table, table.starts, heap, heap, wire.rank, wire.num_ranks, wire.boards, wire.pes),
                *(wire.board, wire.lane(slot), 1, self.arrivals, self.status),
                MISTAKE=form.mistake,
                PARTS=parts,
            )
            return
        far_push.far_push(
            *(wire, table),
            source=Memory(heap, self.nbytes),
            region=Memory(heap, self.nbytes),
            slot=slot,
            parts=parts,
            quiet=form.quiet and form.mistake != "no quiet at the end",
            arrivals=self.arrivals,
            status=self.status,
        )

    def wait(self, slot, at_least):
        far_wait.far_wait(self.wire, slot, at_least, status=self.status, timeout_ns=TIMEOUT_NS)


def exchange(group, form):
    """One process: shared memory is the heaps, which the late network writes to.

    Returns: how many runs were put, rounds in which rows were not what was sent, what kernels called of the network.
    """
    num_ranks, nbytes = group.size, heap_bytes(group.size)
    transport = ShmTransport(group, gather_peers(group), 1)
    heaps = transport.addresses(transport.allocate(nbytes))
    try:
        with LateNetwork(form.seed * 100 + group.rank, heaps[::-1], num_ranks - 1 - group.rank, nbytes) as network:
            rank = FarRank(form, group.rank, heaps)
            num_runs = rank.run()
        # Nobody lets go of memory that is still put to.
        group.all_gather(None)
        return num_runs, rank.wrong_rounds, network.calls
    finally:
        transport.close()

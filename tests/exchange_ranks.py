"""Ranks for tests of failures, memory and lifecycle: their inputs, the oracle's answer, and what they leave behind.

`in_one_thread` gives the communicators of all ranks to a single thread, which then runs their phases in any order.
"""

import contextlib
import functools
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from moecomm import Communicator, LocalHub
from moecomm.testing import reference_combine, reference_dispatch, rows_with_origin, uniform
from moecomm.testing.compare import assert_bitwise_equal

HIDDEN, EXPERTS, TOPK = 16, 6, 2


def open_communicator(group, **options):
    """A small communicator; waits are short, because a test that has to wait has failed."""
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOPK, "timeout": timedelta(seconds=20)}
    return Communicator(group, **(sizes | options))


@dataclass(frozen=True)
class Batch:
    """What all ranks send in one exchange; every rank can make it, so nobody has to be told."""

    num_ranks: int
    seed: int
    dtype: torch.dtype = torch.float32

    def num_tokens(self, rank):
        return (5, 0, 8, 3)[(rank + self.seed) % 4]

    def x(self, rank):
        rows = rows_with_origin(rank, self.num_tokens(rank), HIDDEN, torch.float32) + self.seed
        return rows.to(self.dtype)

    def topk_idx(self, rank):
        return uniform(self.num_tokens(rank), EXPERTS, TOPK, seed=100 * self.seed + rank)

    def topk_weights(self, rank):
        return torch.rand(self.num_tokens(rank), TOPK, generator=torch.Generator().manual_seed(self.seed + rank))

    def send(self, comm, how="dispatch", **options):
        """Calls comm.dispatch (or dispatch_async) with this rank's part."""
        return getattr(comm, how)(self.x(comm.rank), self.topk_idx(comm.rank), **options)

    def everything(self):
        ranks = range(self.num_ranks)
        return [self.x(r) for r in ranks], [self.topk_idx(r) for r in ranks], [self.topk_weights(r) for r in ranks]

    @functools.cache  # noqa: B019 - a few small tensors, for the tests that check thousands of times
    def received(self, rank, weighted=False, layout="expert_major"):
        """The oracle's answer; not to be written to."""
        xs, idx, weights = self.everything()
        return reference_dispatch(
            xs, idx, weights if weighted else None, num_experts=EXPERTS, rank=rank, layout=layout, expert_alignment=1
        )

    def check_received(self, received, rank, *, weighted=False, layout="expert_major"):
        expected = self.received(rank, weighted, layout)
        for name in ("x", "topk_weights", "topk_idx", "num_tokens_per_expert", "offsets"):
            assert_bitwise_equal(getattr(received, name), getattr(expected, name), f"rank {rank}, {self}: {name}")

    @functools.cache  # noqa: B019
    def home(self, rank):
        """What combine gives for the rows as they came, without weights; not to be written to."""
        ys = [self.received(r).x for r in range(self.num_ranks)]
        return reference_combine(ys, self.everything()[1], num_experts=EXPERTS, rank=rank)

    def check_home(self, out, rank):
        assert_bitwise_equal(out, self.home(rank), f"rank {rank}, {self}: combine")


def check_exchange(comm, seed):
    """One dispatch and one combine of rows that know where they come from; what they leave in memory is poisoned."""
    batch = Batch(comm.num_ranks, seed)
    received = batch.send(comm, topk_weights=batch.topk_weights(comm.rank))
    batch.check_received(received, comm.rank, weighted=True)
    batch.check_home(comm.combine(received.x, received.handle), comm.rank)
    received.x.fill_(float("nan"))


def caught(call):
    """What a call raises, as plain values: (name of its type, message, peers). Its frames are gone afterwards."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error), getattr(error, "peers", ())
    return "nothing", "", ()


def left_behind():
    """Descriptors and mappings of moecomm in this process."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if "moecomm" in target and "memfd" in target:
                found.append(f"fd {fd}: {target}")
    found += [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:moecomm" in line]
    return found


@contextlib.contextmanager
def in_one_thread(num_ranks, **options):
    """The communicators of all ranks, by rank, for one thread to drive."""
    groups = LocalHub(num_ranks).groups()
    comms = [None] * num_ranks

    def construct(group):
        comms[group.rank] = open_communicator(group, **options)

    threads = [threading.Thread(target=construct, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    try:
        yield comms
    finally:
        for comm in comms:
            if comm is not None:
                comm.close()

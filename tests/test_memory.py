"""Receive memory: a steady state touches nothing new, blocks return whatever becomes of tensors, calls and
communicators, limits are address space only, and /dev/shm does not matter.
"""

import gc
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections import deque
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from exchange_ranks import (
    HIDDEN,
    TOPK,
    Batch,
    caught,
    check_exchange,
    in_one_thread,
    left_behind,
    open_communicator,
)
from interleavings import receive_all, run_in_turns

import moecomm
from moecomm import Communicator
from moecomm.testing import launch, uniform, zipf

MIB = 1 << 20


# -- steady state ------------------------------------------------------------------------------------------------------


WARM_UP = 10  # steps, the first of them the largest


def mapping_of(comm):
    return comm._exchanger.session.memory._mapping


def run_steadily(group, kept_alive, order, is_copied):
    """50 steps of dispatch and combine with other routing each time, while the last few results stay alive."""
    hidden, num_experts, num_topk = 512, 16, 4
    numbers = random.Random(f"{group.rank} {order}")
    kept, most_rows, history = deque(), 0, []
    with Communicator(
        group, num_experts=num_experts, hidden=hidden, num_topk=num_topk, memory_limit=64 * MIB, max_tokens_per_rank=8
    ) as comm:
        for step in range(50):
            num_tokens = numbers.randint(120, 150) if step else 160
            make = uniform if step % 2 else zipf
            idx = make(num_tokens, num_experts, num_topk, seed=100 * step + group.rank)
            x = torch.full((num_tokens, hidden), float(step))
            received = comm.dispatch(x, idx, torch.ones(idx.shape))
            most_rows = max(most_rows, received.x.shape[0])
            y = received.x * 1.0 if is_copied else received.x
            assert torch.equal(comm.combine(y, received.handle), x * num_topk)
            kept.append((step, received))
            if len(kept) > kept_alive:
                kept.rotate(-numbers.randrange(len(kept)) if order == "random" else 0)
                (kept.pop if order == "last" else kept.popleft)()
            assert all(bool((one.x == when).all()) for when, one in kept)
            del received, y
            history.append((comm.stats["receive_bytes_touched"], mapping_of(comm).resident_bytes()))
        assert comm.stats["receive_blocks_alive"] == len(kept)
        kept.clear()
        one = None
        assert comm.stats["receive_blocks_alive"] == 0, one
    # One tensor arrives while so many are alive, and another holds what combine copies.
    row_bytes = hidden * 4 + 4
    return history, most_rows * row_bytes * (kept_alive + 1 + is_copied)


@pytest.mark.parametrize("is_copied", [False, True], ids=["in place", "copied"])
@pytest.mark.parametrize(
    ("backend", "kept_alive", "order"),
    [
        *(("threads", *case) for case in ((0, "first"), (1, "first"), (3, "first"), (3, "last"), (3, "random"))),
        *(("processes", *case) for case in ((0, "first"), (3, "random"))),
    ],
)
def test_a_steady_state_keeps_using_the_same_pages(backend, kept_alive, order, is_copied):
    for rank, (history, most) in enumerate(launch(run_steadily, 2, kept_alive, order, is_copied, backend=backend)):
        touched, resident = zip(*history[WARM_UP:], strict=True)
        large_pages = 2 * MIB * (kept_alive + 2 + is_copied)  # each tensor may lie on one more, where there are any
        assert max(touched) <= 1.25 * most, f"rank {rank} touched {max(touched)}, its tensors have {most}"
        assert max(resident) <= 1.25 * most + large_pages, f"rank {rank}: {max(resident)} bytes are resident, of {most}"
        assert touched[-1] <= 1.1 * touched[20], f"rank {rank} goes on touching new pages: {touched}"


# -- blocks return -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_garbage_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(comm):
    return comm.stats["receive_blocks_alive"]


@pytest.mark.usefixtures("_no_garbage_collector")
def test_blocks_return_when_the_last_tensor_dies_in_any_order():
    with in_one_thread(2) as comms:
        batch = Batch(2, 2)
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
            results = [receive_all(comms, batch) for _ in range(4)]
            views = [one[0].x[1:, 2:].T for one in results]
            assert [alive(comm) for comm in comms] == [4, 4]
            for left, index in enumerate(order):
                results[index] = None
                assert alive(comms[0]) == 4 - left, "a view keeps its block"
                views[index] = None
                assert [alive(comm) for comm in comms] == [3 - left, 3 - left]


@pytest.mark.usefixtures("_no_garbage_collector")
def test_a_tensor_may_die_on_another_thread_after_close_and_after_the_communicator():
    with in_one_thread(2) as comms:
        batch = Batch(2, 2)
        boxes = [[one] for one in receive_all(comms, batch)]
        thread = threading.Thread(target=boxes[0].clear)
        thread.start()
        thread.join()
        assert [alive(comm) for comm in comms] == [0, 1]
        received = receive_all(comms, batch)
        for comm in comms:
            comm.close()
        assert [alive(comm) for comm in comms] == [1, 2], "the counters can still be asked"
        boxes[1].clear()
        expected = batch.received(0).x.clone()
        assert alive(comms[1]) == 1
        comms.clear()
        assert torch.equal(received[0].x, expected), "what was received stays readable"


def go_wrong(group):
    """Failures of every kind, with the collector off; then everything must be gone, although errors were kept."""
    gc.disable()
    comm = open_communicator(group, memory_limit=1 * MIB, timeout=timedelta(seconds=20))
    batch, odd = Batch(group.size, 2), group.rank == 1
    x, idx = batch.x(comm.rank), batch.topk_idx(comm.rank)
    received = batch.send(comm)
    too_many = torch.zeros(20_000, HIDDEN), torch.zeros(20_000, TOPK, dtype=torch.int64)
    seen = []
    for kind, call in (
        ("CallMismatch", partial(comm.dispatch, x.double() if odd else x, idx)),
        ("MemoryLimitExceeded", partial(comm.dispatch, *too_many)),
        ("ValueError" if odd else "PeerFailed", partial(comm.dispatch, x, idx + 99 if odd else idx)),
        ("ValueError" if odd else "PeerFailed", partial(comm.combine, received.x[odd:], received.handle)),
    ):
        seen.append((kind, caught(call)[0]))
        works = [batch.send(comm, "dispatch_async"), batch.send(comm, "dispatch_async")]
        for work in works:
            work.wait()
        del work, works
    in_vain = batch.send(comm, "dispatch_async", layout="flat" if odd else "expert_major")
    seen.append(("CallMismatch", caught(in_vain.wait)[0]))
    dropped = batch.send(comm, "dispatch_async", layout="flat" if odd else "expert_major")
    del dropped  # nobody waits for it; its error is nobody's
    check_exchange(comm, 3)
    seen.append((1, comm.stats["receive_blocks_alive"]))
    del received, call
    seen.append((0, comm.stats["receive_blocks_alive"]))
    comm.close()
    comm = in_vain = None
    left = left_behind()
    gc.enable()
    return seen, left


def test_nothing_is_kept_by_failed_calls():
    for seen, left in launch(go_wrong, 2, backend="processes"):
        for expected, got in seen:
            assert got == expected, seen
        assert left == []


def test_trim_gives_pages_back_and_what_is_alive_stays():
    with in_one_thread(2, memory_limit=64 * MIB, max_tokens_per_rank=8) as comms:
        batch = Batch(2, 2)
        kept = receive_all(comms, batch)
        large = [torch.zeros(100_000, HIDDEN), torch.zeros(100_000, TOPK, dtype=torch.int64)]
        works = [comm.dispatch_async(*large) for comm in comms]
        run_in_turns(works)
        del works
        nbytes = 2 * 100_000 * TOPK * HIDDEN * 4
        assert mapping_of(comms[0]).resident_bytes() > nbytes
        assert comms[0].trim() >= nbytes
        assert mapping_of(comms[0]).resident_bytes() <= 4 * MIB
        assert comms[0].stats["receive_bytes_touched"] <= MIB
        for rank, received in enumerate(kept):
            batch.check_received(received, rank)
        again = receive_all(comms, batch)
        for rank, received in enumerate(again):
            batch.check_received(received, rank)


# -- limits and address space ------------------------------------------------------------------------------------------


def be_sparse(group):
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    before = resident()
    with open_communicator(group, memory_limit=64 * physical) as comm:
        check_exchange(comm, 1)
        assert comm.stats["memory_limit"] == 64 * physical
        return resident() - before


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_limit_far_above_the_machines_memory_costs_none(backend):
    assert max(launch(be_sparse, 2, backend=backend)) < 64 * MIB


@pytest.mark.parametrize(("limit", "named"), [(0, "from 1 to"), (2**63, "from 1 to"), (1.5, "must be an int")])
def test_a_limit_that_is_none_is_refused(limit, named):
    with pytest.raises((ValueError, TypeError), match=f"memory_limit {named}|memory_limit must be {named}"):
        open_communicator(None, memory_limit=limit)


def lack_address_space(group, short_of_it):
    """Constructs while `short_of_it` ranks may not map much more than they have; then with a limit that fits."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    if group.rank in short_of_it:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 512 * MIB, old[1]))
    try:
        error = caught(lambda: open_communicator(group, memory_limit=1 << 33))
        comm = open_communicator(group, memory_limit=MIB, max_tokens_per_rank=8)
        check_exchange(comm, 1)
        comm.close()
        del comm
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
    return error, left_behind()


@pytest.mark.parametrize("short_of_it", [(0, 1, 2), (1,)], ids=["all ranks", "one rank"])
def test_too_little_address_space_is_named_on_every_rank_with_a_remedy(short_of_it):
    for (kind, text, _), left in launch(lack_address_space, 3, short_of_it, backend="processes"):
        assert kind == "TransportUnavailable", text
        assert "transport 'shm' is unavailable: rank" in text
        assert f"rank {short_of_it[0]} cannot make" in text or len(short_of_it) > 1
        assert "Cannot allocate memory" in text
        assert "smaller memory_limit" in text
        assert "ulimit -v" in text
        assert left == []


# -- /dev/shm ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import subprocess
import sys
import torch
from moecomm import Communicator
from moecomm.testing import launch, uniform

def exchange(group):
    # Each rank receives 100 MB, more than /dev/shm could hold.
    x = torch.full((1600, 8192), 1.0 + group.rank)
    idx = uniform(1600, 4, 2, seed=group.rank)
    with Communicator(group, num_experts=4, hidden=8192, num_topk=2) as comm:
        assert comm.transport_name == "shm"
        received = comm.dispatch(x, idx)
        assert torch.equal(comm.combine(received.x, received.handle), 2 * x)
        return received.x.numel() * 4

if __name__ == "__main__":
    for kind, mount in zip(sys.argv[1::2], sys.argv[2::2]):
        subprocess.run(mount, shell=True, check=True)
        print(kind, sum(launch(exchange, 2, backend="processes", timeout=60)), flush=True)
"""

KINDS = {
    "64 MB": "mount -t tmpfs -o size=64m tmpfs /dev/shm",
    "read-only": "mount -t tmpfs -o ro,size=64m tmpfs /dev/shm",
    "absent": "mount -t tmpfs tmpfs /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9",
}


def test_dev_shm_does_not_matter(tmp_path):
    unshare = shutil.which("unshare")
    attempt = [unshare, "-m", "sh", "-c", " && ".join(KINDS.values())]
    if not unshare or subprocess.run(attempt, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root, to mount another /dev/shm for a child process")
    script = tmp_path / "exchange.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [unshare, "-m", sys.executable, str(script), *(word for pair in KINDS.items() for word in pair)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(moecomm.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{kind} {2 * 1600 * 2 * 8192 * 4}" for kind in KINDS]

"""From construction to the end of the process: what is opened is closed again, in whatever order things go away."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchange_ranks import Batch, caught, check_exchange, in_one_thread, left_behind, open_communicator
from interleavings import run_in_turns

import moecomm
from moecomm import Communicator
from moecomm.errors import CommunicatorClosed
from moecomm.testing import RankDied, launch

BACKENDS = ["threads", "stepped", "processes"]


# -- many, one after the other -----------------------------------------------------------------------------------------


def holdings():
    """What a process holds of the system: descriptors, mappings, threads."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": threading.active_count(),
    }


def come_and_go(group, times, is_closed):
    gc.disable()
    history = []
    for number in range(times):
        comm = open_communicator(group, max_tokens_per_rank=8, memory_limit=1 << 20)
        if number % 50 == 0:
            check_exchange(comm, number)
            history.append(holdings())
        if is_closed:
            comm.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            comm = None
    gc.enable()
    return history, left_behind()


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "forgotten"])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_communicators_come_and_go_and_leave_nothing(backend, is_closed):
    times = 500 if is_closed else 120
    for history, left in launch(come_and_go, 2, times, is_closed, backend=backend, timeout=90):
        assert left == []
        for what, first in history[1].items():
            # Others' mappings come and go a little; 500 leaks would not.
            assert history[-1][what] <= first + 4, (what, history)


def test_a_hub_keeps_nothing_of_communicators_that_are_gone():
    with in_one_thread(2) as comms:
        hub = comms[0].group.hub
        assert len(hub._on_leave) == 2
    assert not hub._on_leave


# -- closing -----------------------------------------------------------------------------------------------------------


def close_and_call(group):
    with open_communicator(group) as comm:
        check_exchange(comm, 1)
        batch = Batch(group.size, 2)
        received = batch.send(comm)
        x = batch.x(comm.rank).requires_grad_()
        out = comm.combine(comm.dispatch(x, batch.topk_idx(comm.rank)).x, received.handle)
        group.all_gather(None)
    comm.close()
    comm.close()
    batch.check_received(received, comm.rank)
    calls = {
        "dispatch": lambda: batch.send(comm),
        "dispatch_async": lambda: batch.send(comm, "dispatch_async"),
        "cached dispatch": lambda: comm.dispatch(batch.x(comm.rank), handle=received.handle),
        "combine": lambda: comm.combine(received.x, received.handle),
        "combine_async": lambda: comm.combine_async(received.x, received.handle),
        "combine_buffer": lambda: comm.combine_buffer(received.handle, torch.float32),
        "trim": comm.trim,
        "backward": lambda: out.sum().backward(),
    }
    return {name: caught(call)[:2] for name, call in calls.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_close_every_call_says_so_and_what_was_received_stays(backend):
    for seen in launch(close_and_call, 2, backend=backend):
        for name, (kind, text) in seen.items():
            assert kind == "CommunicatorClosed", f"{name}: {kind}: {text}"
            assert "was closed before the call" in text


def test_the_context_manager_closes_also_after_an_exception():
    with pytest.raises(KeyError), open_communicator(None) as comm:
        raise KeyError
    with pytest.raises(CommunicatorClosed):
        comm.trim()


def test_a_forgotten_communicator_is_closed_with_a_warning():
    comm = open_communicator(None)
    Batch(1, 1).send(comm)
    with pytest.warns(ResourceWarning, match=r"Communicator\(rank=0, num_ranks=1, .*\) was not closed; use it as a"):
        del comm
    with pytest.raises(ValueError, match="hidden"):  # never constructed: nothing to forget
        Communicator(None, num_experts=1, hidden=0, num_topk=1)


def close_beside_the_dead(group):
    comm = open_communicator(group)
    check_exchange(comm, 1)
    work = Batch(group.size, 2).send(comm, "dispatch_async")
    group.all_gather(None)
    if group.rank == 1:
        os._exit(7)
    while not comm._exchanger.session.transport.gone():
        pass
    comm.close()
    return caught(work.wait)


def construct_beside_the_dead(group):
    if group.rank == 1:
        os._exit(7)
    return caught(lambda: open_communicator(group)), left_behind()


def test_a_rank_that_dies_during_construction_is_an_error_with_a_name():
    results = launch(construct_beside_the_dead, 3, backend="processes", return_exceptions=True, timeout=20)
    for rank in (0, 2):
        (kind, text, _), left = results[rank]
        assert kind == "TransportError", text
        assert f"rank {rank} of 3 cannot reach the others" in text
        assert left == []


def test_closing_needs_no_peer():
    results = launch(close_beside_the_dead, 3, backend="processes", return_exceptions=True)
    assert isinstance(results[1], RankDied)
    for rank in (0, 2):
        assert results[rank][:2] == (
            "CommunicatorClosed",
            "dispatch #2 was in flight when the communicator was closed",
        )


# -- several, and groups of every kind ---------------------------------------------------------------------------------


def two_at_once(group):
    first = open_communicator(group, max_in_flight=4)
    with open_communicator(group, max_in_flight=4) as second:
        batches = [Batch(group.size, seed) for seed in range(4)]
        one, two = ([batch.send(comm, "dispatch_async") for batch in batches[:2]] for comm in (first, second))
        # Within a communicator ranks may wait in any order; from one to the other all must go in the same.
        for comm, works in ((second, two), (first, one)):
            for batch, work in list(zip(batches[:2], works, strict=True))[:: -1 if group.rank % 2 else 1]:
                batch.check_received(work.wait(), comm.rank)
        check_exchange(second, 5)
        received = batches[2].send(first)
        error = caught(lambda: second.combine(received.x, received.handle))
        check_exchange(first, 6)
        first.close()
        check_exchange(second, 7)
    return error


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_communicators_do_not_disturb_each_other(backend):
    for kind, text, _ in launch(two_at_once, 3, backend=backend):
        assert kind == "ValueError"
        assert "handle: made by communicator" in text


def every_kind_of_group(group):
    from torch.distributed.device_mesh import init_device_mesh

    seen = []
    for given in (None, group, group.process_group, init_device_mesh("cpu", (group.size,))):
        with open_communicator(given) as comm:
            check_exchange(comm, len(seen))
            seen.append((comm.rank, comm.num_ranks))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    errors = [caught(lambda: open_communicator(mesh)), caught(lambda: open_communicator("ep"))]
    with open_communicator(mesh["ep"]) as comm:
        check_exchange(comm, 7)
        seen.append((comm.rank, comm.num_ranks))
    pairs = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    mine, other = pairs if group.rank in (0, 3) else pairs[::-1]
    with open_communicator(mine) as comm:
        check_exchange(comm, 8)
        seen.append((comm.rank, comm.num_ranks))
    errors.append(caught(lambda: open_communicator(other)))
    return seen, errors


def test_a_group_may_be_given_in_every_form():
    for rank, (seen, errors) in enumerate(launch(every_kind_of_group, 4, backend="processes")):
        assert seen == [(rank, 4)] * 4 + [(rank % 2, 2), (int(rank in (2, 3)), 2)]
        (_, two_dims, _), (kind, not_a_group, _), (_, not_member, _) = errors
        assert "a DeviceMesh must have one dimension, got 2; pass mesh['ep']" in two_dims
        assert kind == "TypeError"
        assert "must be a ProcessGroup, a DeviceMesh, a moecomm.Group or None, got str" in not_a_group
        assert "not a member" in not_member or "group" in not_member


def test_none_is_one_rank_where_torch_distributed_is_not_initialised():
    assert not dist.is_initialized()
    with open_communicator(None) as comm:
        assert (comm.rank, comm.num_ranks, comm.transport_name) == (0, 1, "local")
        check_exchange(comm, 2)


def outlive_the_process_group(group):
    comm = open_communicator(group)
    check_exchange(comm, 1)
    group.all_gather(None)
    dist.destroy_process_group()
    check_exchange(comm, 2)  # it needs the group for its construction only
    comm.close()
    return caught(lambda: Batch(2, 1).send(comm))[0]


def test_the_process_group_may_go_first():
    assert launch(outlive_the_process_group, 2, backend="processes") == ["CommunicatorClosed"] * 2


# -- forked children ---------------------------------------------------------------------------------------------------


def fork_and_read(group):
    """A child reads what was received, is refused calls, and lets go of everything in the worst manner."""
    comm = open_communicator(group)
    batch = Batch(group.size, 2)
    received = batch.send(comm)
    expected = received.x.tolist()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            is_same = received.x.tolist() == expected
            kind, text, _ = caught(lambda: batch.send(comm))
            warnings.simplefilter("error")
            del received
            comm.close()
            comm = None
            gc.collect()
            os.write(write, f"{is_same} {kind} {text}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read, "rb") as pipe:
        told = pipe.read().decode()
    group.all_gather(None)
    batch.check_received(received, comm.rank)
    check_exchange(comm, 3)
    comm.close()
    return told


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_read_but_not_speak_for_its_parent():
    for told in launch(fork_and_read, 2, backend="processes"):
        assert told.startswith("True CommunicatorClosed communicator "), told
        assert "from which this one was forked" in told


# -- the end of the interpreter ----------------------------------------------------------------------------------------

# Imports once; then every rank of every ending is a child that runs to the end of the script and of its interpreter.
SCRIPT = """
import gc, json, os, sys, warnings, weakref
import torch
import torch.distributed as dist
from moecomm import Communicator

endings, children, mine = json.loads(sys.argv[1]), [], None
places = [(name, rank) for name in endings for rank in range(2)]
for number, (name, rank) in enumerate(places):
    directory = f"{sys.argv[2]}/{number // 2}"
    os.makedirs(directory, exist_ok=True)
    pid = os.fork()
    if pid == 0:
        mine = name, rank
        for fd in (1, 2):
            os.dup2(os.open(f"{directory}/{rank}.{fd}", os.O_WRONLY | os.O_CREAT), fd)
        break
    children.append((name, rank, pid, directory))
if mine is None:
    report = []
    for name, rank, pid, directory in children:
        _, status = os.waitpid(pid, 0)
        report.append([name, rank, os.waitstatus_to_exitcode(status)])
        report[-1] += [open(f"{directory}/{rank}.{fd}").read() for fd in (1, 2)]
    print(json.dumps(report))
else:
    name, rank = mine
    if name != "forgotten":  # that warning is off by default, as in every Python
        warnings.simplefilter("error")
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 2), rank=rank, world_size=2)
    comm = Communicator(num_experts=4, hidden=8, num_topk=2)
    x = torch.ones(5, 8, requires_grad=True)
    received = comm.dispatch(x, torch.tensor([[0, 3]] * 5))
    out = comm.combine(received.x, received.handle)
    dist.barrier()
    group = weakref.ref(dist.group.WORLD)
    exec(endings[name])
    gc.collect()
    # gloo aborts a process whose interpreter ends before its group, now and then.
    print("done" if group() is None else "the group lives on")
"""

ENDINGS = {
    "in order": "comm.close(); dist.destroy_process_group()",
    "the group first": "dist.destroy_process_group(); comm.close()",
    "tensors last": "comm.close(); dist.destroy_process_group(); keep = [received, out, comm]",
    "closed at exit": "import atexit; atexit.register(comm.close); dist.destroy_process_group()",
    "in a destructor": (
        "class Model:\n    def __init__(self, comm):\n        self.comm = comm\n"
        "    def __del__(self):\n        self.comm.close()\nmodel = Model(comm)\ndist.destroy_process_group()"
    ),
    "collective": (
        "with Communicator(num_experts=4, hidden=8, num_topk=2, transport='collective') as second:\n"
        "    other = second.dispatch(x, torch.tensor([[0, 3]] * 5))\n"
        "    second.combine(other.x, other.handle)\n"
        "dist.destroy_process_group(); keep = [other, second]"
    ),
    "in flight": "work = comm.combine_async(received.x, received.handle); comm.close(); dist.destroy_process_group()",
    "forgotten": "dist.destroy_process_group()",
    "an exception": "dist.destroy_process_group()\nwith comm:\n    raise SystemExit(0)",
}


def test_the_interpreter_ends_quietly(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ranks = subprocess.Popen(
        [sys.executable, str(script), json.dumps(ENDINGS), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(moecomm.__file__).parents[1]), "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        report = json.loads(ranks.communicate(timeout=100)[0])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    assert len(report) == 2 * len(ENDINGS)
    for name, rank, code, out, err in report:
        expected = "" if name == "an exception" else "done\n"
        assert (code, out, err) == (0, expected, ""), f"{name}, rank {rank}"


def test_work_may_be_dropped():
    """Nobody waits for it; the next call carries it along, and its memory returns."""
    with in_one_thread(2) as comms:
        batch = Batch(2, 1)
        works = [batch.send(comm, "dispatch_async") for comm in comms]
        del works
        works = [batch.send(comm, "dispatch_async") for comm in comms]
        run_in_turns(works)
        del works
        assert [comm.stats["receive_blocks_alive"] for comm in comms] == [0, 0]

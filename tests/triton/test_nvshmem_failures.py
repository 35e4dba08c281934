"""What goes wrong between devices that put to each other: refusals, ranks that die or are stuck, and the end."""

import gc
import importlib.util
import os
import threading
import time

import pytest
import torch
from late_device import LateDevice, LateStream
from late_ranks import GIVE_UP, SIZES
from nvshmem_double import Double
from nvshmem_ranks import MEMORY, OwnDevice, opened, run

from moecomm import Communicator, MemoryLimitExceeded, PeerFailed, PeerLost, PeerTimeout, Topology, TransportUnavailable
from moecomm.kernels.registry import wire_kernels_for
from moecomm.testing import launch, uniform
from moecomm.testing.failures import RankDied
from moecomm.transports.ucx_library import find_library


def rows_of(rank, num_tokens=4):
    return torch.full((num_tokens, 24), float(rank + 1)), uniform(num_tokens, 6, 3, seed=rank)


def check_pair(comm):
    """A dispatch and a combine that bring back three times what was sent."""
    x, ids = rows_of(comm.rank)
    received = comm.dispatch(x, ids)
    assert torch.equal(comm.combine(received.x, received.handle), 3 * x)


# -- refused before anything is sent -----------------------------------------------------------------------------------


def refuse_and_go_on(group):
    device = OwnDevice(group)
    with opened(group, device, algorithm="direct", memory_limit=1 << 14) as comm:
        x, ids = rows_of(comm.rank)
        check_pair(comm)
        with pytest.raises(ValueError, match=r"mode 'low_latency' would take .* with a smaller max_tokens_per_rank"):
            comm.dispatch(x, ids, mode="low_latency")
        check_pair(comm)
        received = comm.dispatch(x, ids)
        with pytest.raises(ValueError, match="reduce: unknown 'per_node'; available: exact, per_host"):
            comm.combine(received.x, received.handle, reduce="per_node")
        if comm.rank == 1:
            ids[2, 1] = 6
        with pytest.raises((ValueError, PeerFailed), match=r"topk_idx\[2, 1\] = 6 is not an expert"):
            comm.dispatch(x, ids)
        del received
        check_pair(comm)
        # What leaves is packed in receive memory as well: 60 tokens arrive in half of it, and leave from more.
        x, ids = rows_of(comm.rank, 60)
        with pytest.raises(MemoryLimitExceeded, match="memory_limit of 16384 bytes"):
            comm.dispatch(x, ids)
        for _ in range(2):
            check_pair(comm)
        assert comm.stats["receive_bytes_alive"] == 0
    return Double.log[-5:]


def test_refused_calls_leave_the_ranks_in_step():
    assert run(refuse_and_go_on, 2, 1) == [["quiet", *["free"] * 3, "finish"]] * 2


def without_nvshmem(group, transport):
    with pytest.raises(TransportUnavailable) as caught:
        opened(group, OwnDevice(group), transport=transport)
    return caught.value.reason, caught.value.remedy


@pytest.mark.skipif(importlib.util.find_spec("nvshmem") is not None, reason="NVSHMEM is here")
def test_without_nvshmem_all_ranks_say_what_is_missing():
    for transport in ("nvshmem", "auto"):
        answers = launch(without_nvshmem, 2, transport, backend="processes", timeout=40)
        for reason, remedy in answers:
            assert "nvshmem: rank 0 (pid" in reason
            assert "NVSHMEM" in reason
            assert "pip install 'moecomm[nvshmem]'" in remedy
            assert ("nvlink: the GPU of rank" in reason) == (transport == "auto")


def test_a_grid_of_domains_on_one_device_goes_from_rank_to_rank():
    def grid(group):
        device = LateDevice()
        options = SIZES | {"transport": "local", "device": device, "topology": Topology.grid(1, 1)}
        with pytest.raises(ValueError, match="algorithm: 'hierarchical' puts to rails that have no address"):
            Communicator(group, **options, algorithm="hierarchical")
        with Communicator(group, **options) as comm:
            check_pair(comm)
            received = comm.dispatch(*rows_of(comm.rank))
            with pytest.raises(ValueError, match="reduce: 'per_host' sums where the rows are.*use 'exact'"):
                comm.combine(received.x, received.handle, reduce="per_host")
            assert "cuda cross between domains from rank to rank" in comm.explain()
            assert comm.topology.num_domains == 2
        device.end()

    launch(grid, 2, timeout=100)


# -- hosts that talk over UCX ------------------------------------------------------------------------------------------


def on_hosts(group):
    os.environ["MOECOMM_HOST_ID"] = f"host {min(1, group.rank)}"
    try:
        with opened(group, OwnDevice(group), transport="auto") as comm:
            check_pair(comm)
            return comm.topology.host_of, comm.topology.domain_of, comm._exchanger.session.transport.host.name
    finally:
        del os.environ["MOECOMM_HOST_ID"]


@pytest.mark.skipif(bool(find_library().problem), reason=find_library().problem or "UCX is here")
def test_between_hosts_the_processes_talk_over_ucx():
    assert run(on_hosts, 3, 2) == [((0, 1, 1), (0, 1, 1), "shm+ucx")] * 3


# -- ranks that are stuck, and ranks that die --------------------------------------------------------------------------


class Wire:
    """The product's kernels; a push that has something to put on rank 1 does something else from the second on."""

    def __init__(self, instead):
        self._kernels, self._instead, self._pushes = wire_kernels_for("triton"), instead, 0
        self.wait = self._kernels.wait

    def push(self, wire, runs, *arguments, **options):
        self._pushes += wire.rank == 1 and runs.most > 0
        if self._pushes < 2:
            self._kernels.push(wire, runs, *arguments, **options)
        else:
            self._instead()


def stuck(group):
    """Rank 1's device does nothing more in the combine; its host does not notice."""
    device = OwnDevice(group, wire_kernels=Wire(lambda: None))
    with (
        opened(group, device, timeout=GIVE_UP) as comm,
        pytest.raises((PeerTimeout, PeerFailed), match=r"the device of rank 1: counter at \d, expected \d"),
    ):
        make_calls(comm)
    device.end()


def make_calls(comm):
    """Some, without a look at what they give."""
    x, ids = rows_of(comm.rank)
    for _ in range(3):
        received = comm.dispatch(x, ids)
        comm.combine(received.x, received.handle)


def test_a_device_that_is_stuck_is_named_by_those_that_wait():
    run(stuck, 2, 1)


def die_while_putting(group):
    device = OwnDevice(group, wire_kernels=Wire(lambda: os._exit(3)))
    with device.using(LateStream(device.failures)), opened(group, device) as comm:
        with pytest.raises(PeerLost) as caught:
            make_calls(comm)
        began = time.monotonic()
    return caught.value.peers, time.monotonic() - began, Double.log


def test_a_rank_that_dies_in_a_call_is_named_and_closing_needs_it_not():
    (peers, seconds, log), died = run(die_while_putting, 2, 1, return_exceptions=True)
    assert isinstance(died, RankDied)
    assert peers == (1,)
    assert seconds < 10
    assert not {"free", "finish"} & set(log)  # both wait for all


class Endless:
    """On rank 0, the second push with something to put does not end: its peer is gone."""

    def __init__(self, rank):
        self._kernels, self._rank, self._pushes = wire_kernels_for("triton"), rank, 0
        self.wait = self._kernels.wait
        self.end = threading.Event()

    def push(self, wire, runs, *arguments, **options):
        self._pushes += runs.most > 0
        if self._pushes < 2:
            self._kernels.push(wire, runs, *arguments, **options)
        elif self._rank == 1:
            os._exit(3)
        else:
            self.end.wait(60)


def put_to_a_dead_rank(group):
    kernels = Endless(group.rank)
    device = OwnDevice(group, wire_kernels=kernels)
    stream = LateStream(device.failures)  # a host that gives it a wait does not wait itself
    with device.using(stream), opened(group, device) as comm, pytest.raises(PeerLost):
        make_calls(comm)
    kernels.end.set()
    return True


def test_a_put_that_never_ends_keeps_nobody_from_closing():
    survived, died = run(put_to_a_dead_rank, 2, 1, return_exceptions=True, timeout=50)
    assert survived is True
    assert isinstance(died, RankDied)


# -- tensors that outlive their communicator ---------------------------------------------------------------------------


def outlive(group):
    device = OwnDevice(group)
    comm = opened(group, device)
    x, ids = rows_of(group.rank)
    received = comm.dispatch(x, ids)
    expected = received.x.clone()
    if group.rank == 1:
        del received
    comm.close()
    del comm
    gc.collect()
    kept = "free" not in Double.log and "finish" not in Double.log
    group.all_gather(None)
    is_right = group.rank == 1 or torch.equal(received.x, expected)
    Double.log.clear()
    opened(group, device).close()  # rank 0 still has its rows
    still = Double.log.count("free"), Double.log.count("finish")
    if group.rank == 0:
        del received
    gc.collect()
    Double.log.clear()
    opened(group, device).close()
    device.end()
    return kept, is_right, still, Double.log.count("free"), Double.log.count("finish")


def test_symmetric_memory_stays_as_long_as_tensors_of_any_rank_lie_in_it():
    # Receive memory and six more regions each. These of the first's go back when the second begins, the rest when the
    # third does.
    assert run(outlive, 2, 1) == [(True, True, (6 + 7, 0), 1 + 7, 1)] * 2


def test_the_whole_of_it_fits_the_double():
    assert 3 * (MEMORY + MEMORY // 4) < 1 << 22  # a quarter of it is for low-latency calls

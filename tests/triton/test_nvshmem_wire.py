"""Kernels over the wire of transport nvshmem: its boards, PEs and symmetric memory, with a double below."""

import ctypes
import tempfile
from types import SimpleNamespace

import pytest
import torch
from late_network import LateNetwork
from nvshmem_double import HEAP_BYTES, Double, DoubleTransport

from moecomm.kernels.far_runs import FarRun, Memory, make_runs
from moecomm.kernels.triton import signals
from moecomm.kernels.triton.far_push import far_push
from moecomm.kernels.triton.far_wait import far_wait
from moecomm.testing import launch
from moecomm.transports.peers import gather_peers

PIECE, ROUNDS = 40, 3
TIMEOUT_NS = 20_000_000_000


def exchange(group, folder, parts):
    """In each round a rank sends two pieces to every rank: near ones store through pointers, far ones are put to."""
    Double.reset(folder)
    carrier, size, me = DoubleTransport(group, gather_peers(group), 1), group.size, group.rank
    region = carrier.allocate_symmetric(2 * PIECE * size)
    packed = carrier.allocate_symmetric(2 * PIECE)
    wire = carrier.make_wire(
        carrier.allocate_symmetric(2 * 8 * size), SimpleNamespace(torch_device=torch.device("cpu"))
    )
    heaps = Double.heaps()
    far = [rank for rank in range(size) if carrier.peer(region, rank) is None]
    places = [2 * PIECE * me, 2 * PIECE * me + PIECE]
    runs = make_runs(
        [FarRun(r, place, at, PIECE) for r in far for at, place in zip((0, PIECE), places, strict=True)], size, "cpu"
    )
    source, target = Memory(packed.address, packed.nbytes), Memory(region.address, region.nbytes)
    status, arrivals = signals.make_status(size, "cpu"), torch.zeros(size, dtype=torch.int32)
    found = []
    with LateNetwork(me, heaps, wire.pes[me].item(), HEAP_BYTES) as network:
        for number in range(1, ROUNDS + 1):
            data = bytes([10 * number + me]) * (2 * PIECE)
            ctypes.memmove(packed.address, data, 2 * PIECE)
            for rank in set(range(size)) - set(far):
                ctypes.memmove(carrier.peer(region, rank) + places[0], data, 2 * PIECE)
            options = {"slot": 0, "parts": parts, "arrivals": arrivals, "status": status}
            far_push(wire, runs, source=source, region=target, **options)
            far_wait(wire, 0, number, status=status, timeout_ns=TIMEOUT_NS)
            signals.raise_if_behind(status, f"round {number}")
            found.append(ctypes.string_at(region.address, region.nbytes))
            # Read before anybody writes again.
            far_push(wire, make_runs([], size, "cpu"), source=source, region=target, slot=1)
            far_wait(wire, 1, number, status=status, timeout_ns=TIMEOUT_NS)
        group.all_gather(None)
    carrier.close()
    return far, found, set(network.calls), Double.log


@pytest.mark.parametrize("parts", [1, 2])
def test_near_and_far_ranks_get_what_was_sent(parts):
    with tempfile.TemporaryDirectory() as folder:
        answers = launch(exchange, 3, folder, parts, backend="processes", timeout=100)
    expected = [b"".join(bytes([10 * n + rank]) * (2 * PIECE) for rank in range(3)) for n in range(1, ROUNDS + 1)]
    # PEs count backwards: the ranks 1 and 2 are the PEs 1 and 0, which address each other.
    assert [far for far, *_ in answers] == [[1, 2], [0], [0]]
    for _, found, calls, log in answers:
        assert found == expected
        assert ("put_signal" in calls) == (parts == 1)
        assert [call for call in log if call in ("free", "finish")] == ["free"] * 3 + ["finish"]

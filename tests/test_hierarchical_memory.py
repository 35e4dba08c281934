"""Memory between domains: rings bounded whatever the number of domains, mostly empty rows of which only some are
copied, early chunks that nobody takes.
"""

import contextlib

import pytest
import torch
from exchange_ranks import HIDDEN, Batch, caught, in_one_thread
from hierarchical_cases import per_host_home
from interleavings import receive_all, run_in_turns
from tiny_rings import tiny_rings

from moecomm import MemoryLimitExceeded, Topology
from moecomm.algorithms.channels import Channels
from moecomm.algorithms.hierarchical_dispatch import HierarchicalDispatch
from moecomm.testing.compare import assert_bitwise_equal

MIB = 1 << 20


class Sizes:
    """In place of a transport: what is asked for."""

    def __init__(self, rank):
        self.rank = rank
        self.nbytes = 0

    def allocate(self, nbytes):
        self.nbytes += nbytes
        raise EnoughSeen


class EnoughSeen(Exception):
    pass


def ring_bytes(topology, rank, entry_bytes):
    sizes = Sizes(rank)
    with pytest.raises(EnoughSeen):
        Channels(sizes, topology, entry_bytes)
    return sizes.nbytes


@pytest.mark.parametrize(
    "topology",
    [
        Topology.grid(1, 1),
        Topology.grid(8, 8),
        Topology.grid(*[1] * 72),
        Topology.grid(*[8] * 64),
        Topology.grid(1, 72),
        Topology.of_domains(72, 72, ranks_per_host=4),
    ],
    ids=lambda topology: f"{topology.num_ranks} ranks in {topology.num_domains}",
)
def test_all_rings_of_a_rank_take_32_mib(topology):
    entry_bytes = 7168 * 2 + 8 * 12  # one row of a large model with its ids and weights
    for rank in {0, topology.num_ranks // 2, topology.num_ranks - 1}:
        most_sources = max(len(topology.rail_sources(rank)) for rank in range(topology.num_ranks))
        # A chunk holds one row at least, and a ring four chunks.
        least = most_sources * 4 * (entry_bytes + 9 * 64)
        assert 0 < ring_bytes(topology, rank, entry_bytes) <= max(32 * MIB, least)


@pytest.mark.parametrize("credit_parts", [8, 1])
def test_early_chunks_that_nobody_takes_never_fill_a_ring_for_good(monkeypatch, credit_parts):
    """Calls that begin over rails and then go from rank to rank, many more than a ring has places."""
    monkeypatch.setattr(HierarchicalDispatch, "_send_early", lambda self, counts: self._traffic_out().send(3))
    topology = Topology.grid(2, 2)
    with tiny_rings(num_places=3, credit_parts=credit_parts), in_one_thread(4, topology=topology) as comms:
        hops = [comm._exchanger.session.hops for comm in comms]
        for number in range(30):
            direct = number % 5 != 0
            works = []
            for comm in comms:
                x = torch.full((6, HIDDEN), float(10 * number + comm.rank))
                # One expert: rails save nothing. Both ranks of the other domain: rails save half.
                idx = torch.tensor([[4] if direct else [3, 5]] if comm.rank < 2 else [[0] if direct else [0, 2]])
                works.append(comm.dispatch_async(x, idx.expand(6, -1).contiguous()))
            run_in_turns(works)
            went = {hop.choices["dispatch"].is_hierarchical for hop in hops}
            assert went == {not direct}, number
            sent = [comm._exchanger.session.algorithms["throughput"].channels._num_sent for comm in comms]
            assert all(count > 0 for one in sent for count in one.values())
            for work in works:
                assert set(work.wait().x.flatten().tolist()) <= {float(10 * number + rank) for rank in range(4)}


def test_rows_of_fixed_shape_are_shared_without_copying_their_padding():
    """A slab larger than the memory limit, with a few rows in it."""
    topology = Topology.grid(1, 1)
    options = {"max_tokens_per_rank": 4096, "memory_limit": 1 << 16, "topology": topology}
    with in_one_thread(2, **options) as comms:
        batch = Batch(2, 2)
        for layout in ("slab", "expert_major"):
            received = receive_all(comms, batch, mode="low_latency", layout=layout)
            outputs = [one.x.clone() for one in received]
            assert outputs[0].nbytes > 1 << 16
            wanted = [per_host_home(batch, rank, topology) for rank in range(2)]
            for rows, copies in ((outputs, 1), ([one.x for one in received], 0)):
                before = [comm.stats["copies"] for comm in comms]
                works = [
                    comm.combine_async(y, one.handle, reduce="per_host")
                    for comm, y, one in zip(comms, rows, received, strict=True)
                ]
                run_in_turns(works)
                for rank, work in enumerate(works):
                    assert_bitwise_equal(work.wait(), wanted[rank], f"{layout}, rank {rank}")
                assert [comm.stats["copies"] - old for comm, old in zip(comms, before, strict=True)] == [copies] * 2
            del received, outputs, rows, works
        assert [comm.stats["receive_bytes_alive"] for comm in comms] == [0, 0]
        assert [comm.stats["fixed_blocks_alive"] for comm in comms] == [0, 0]
        assert max(comm.stats["receive_bytes_peak"] for comm in comms) <= 1 << 16


def test_all_ranks_learn_who_lacks_memory_for_rows_of_fixed_shape():
    topology = Topology.grid(1, 1)
    with in_one_thread(2, max_tokens_per_rank=64, topology=topology) as comms:
        batch = Batch(2, 2)
        received = receive_all(comms, batch, mode="low_latency")
        outputs = [one.x.clone() for one in received]
        held = []
        with contextlib.suppress(MemoryLimitExceeded):
            while len(held) < 1000:
                held.append(comms[1].combine_buffer(received[1].handle, torch.float32))
        assert 0 < len(held) < 1000

        def combine():
            works = [
                comm.combine_async(y, one.handle, reduce="per_host")
                for comm, y, one in zip(comms, outputs, received, strict=True)
            ]
            run_in_turns(works)
            return works

        texts = [caught(work.wait) for work in combine()]
        assert texts[0] == texts[1]
        name, text, _ = texts[0]
        assert name == "MemoryLimitExceeded"
        assert "rank 1" in text
        assert "for low-latency calls" in text
        held.clear()
        for rank, work in enumerate(combine()):
            assert_bitwise_equal(work.wait(), per_host_home(batch, rank, topology), f"rank {rank}")

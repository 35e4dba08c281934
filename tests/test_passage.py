"""Parts that cross between domains: their senders and receivers agree where each lies, and none overlaps another."""

import pytest
import torch

from moecomm import Topology
from moecomm.algorithms.passage import to_homes, to_rails

GRIDS = [
    Topology.grid(1, 1),
    Topology.grid(2, 2),
    Topology.grid(3, 1),
    Topology.grid(1, 3, 2),
    Topology.grid(1, 1, 1, 1),
]
ARRAYS = (12, 8, 0)


def crossings_of(topology, factor=1):
    """`[R, D]`, with zeros among them."""
    numbers = torch.arange(topology.num_ranks * topology.num_domains, dtype=torch.int32)
    return (factor * (numbers * 7 % 5)).view(topology.num_ranks, topology.num_domains)


def kinds(topology):
    """What goes to rails, with and without one's own, and home; by name, a passage per rank."""
    crossings, ranks, domain_of = crossings_of(topology), range(topology.num_ranks), topology.domain_of
    far = [[peer for peer in ranks if domain_of[peer] != domain_of[rank]] for rank in ranks]
    return {
        "to rails": [to_rails(topology, rank, far[rank], crossings, ARRAYS) for rank in ranks],
        "to rails and myself": [
            to_rails(topology, rank, far[rank], crossings, ARRAYS, with_own=True) for rank in ranks
        ],
        "home": [to_homes(topology, rank, far[rank], crossings, ARRAYS) for rank in ranks],
        "home and back to myself": [
            to_homes(topology, rank, far[rank], crossings, ARRAYS, with_own=True) for rank in ranks
        ],
    }


@pytest.mark.parametrize("topology", GRIDS, ids=lambda grid: str(grid.domain_of))
def test_what_leaves_is_what_arrives(topology):
    for name, passages in kinds(topology).items():
        left = sorted(part._replace(packed=-1) for one in passages for part in one.leaving)
        assert left == sorted(part for one in passages for part in one.arriving), name
        for rank, passage in enumerate(passages):
            assert {part.sender for part in passage.leaving} <= {rank}
            assert {part.receiver for part in passage.arriving} == {rank} or not passage.arriving


@pytest.mark.parametrize("topology", GRIDS, ids=lambda grid: str(grid.domain_of))
def test_each_rank_asks_one_rail_per_domain_for_its_tokens_there_and_is_answered_by_it(topology):
    crossings, found = crossings_of(topology), kinds(topology)
    for rank in range(topology.num_ranks):
        asked = {
            topology.domain_of[part.receiver]: part.num_rows for part in found["to rails and myself"][rank].leaving
        }
        assert asked == dict(enumerate(crossings[rank].tolist()))
        rails = [part.receiver for part in found["to rails and myself"][rank].leaving]
        assert sorted(rails) == sorted(part.sender for part in found["home and back to myself"][rank].arriving)
        others = [part.receiver for part in found["to rails"][rank].leaving]
        assert others == rails[1:]  # those of the domains behind mine, in order; my own is the first
        assert sorted(others) == sorted(part.sender for part in found["home"][rank].arriving)
        assert rails[0] == rank


@pytest.mark.parametrize("topology", GRIDS, ids=lambda grid: str(grid.domain_of))
def test_parts_lie_apart_and_near_ones_are_not_packed(topology):
    for name, passages in kinds(topology).items():
        memory = {}
        for rank, passage in enumerate(passages):
            for run in passage.runs([1000 * peer for peer in range(topology.num_ranks)]):
                assert topology.domain_of[run.rank] != topology.domain_of[rank], name
                assert run.source + run.nbytes <= passage.leaving_bytes
                place = run.target - 1000 * run.rank
                assert 0 <= place <= passages[run.rank].arriving_bytes - run.nbytes
                for byte in range(place, place + run.nbytes):
                    assert memory.setdefault((run.rank, byte), rank) == rank, name
            for part in passage.leaving:
                is_near = topology.domain_of[part.receiver] == topology.domain_of[rank]
                blocks = [10**6 * (peer + 1) for peer in range(topology.num_ranks)]
                first = passage.sent_arrays(part, 10**9, blocks)[0]
                assert (first < 10**9) == is_near == (part.packed < 0)
                if is_near:
                    assert first == passages[part.receiver].received_arrays(part, blocks[part.receiver])[0]


def bytes_of(runs):
    """Where each byte goes that is put, (rank, target, source), once for each time."""
    return [(run.rank, run.target + byte, run.source + byte) for run in runs for byte in range(run.nbytes)]


@pytest.mark.parametrize("num_pieces", [1, 3, 4])
@pytest.mark.parametrize("topology", GRIDS[1:], ids=lambda grid: str(grid.domain_of))
def test_pieces_are_the_parts_and_what_is_passed_on_has_been_put(topology, num_pieces):
    crossings, ranks, domain_of = crossings_of(topology, 31), range(topology.num_ranks), topology.domain_of
    far = [[peer for peer in ranks if domain_of[peer] != domain_of[rank]] for rank in ranks]
    passages = [to_rails(topology, rank, far[rank], crossings, ARRAYS) for rank in ranks]
    offsets = [10**6 * rank for rank in ranks]
    there = set()
    for piece in range(num_pieces):
        for passage in passages:
            put = bytes_of(passage.piece(piece, num_pieces, offsets, 1))
            assert set(put) <= set(bytes_of(passage.runs(offsets)))
            places = {place[:2] for place in put}
            assert len(places) == len(put)
            assert not places & there
            there |= places
        for rank, passage in enumerate(passages):
            for part, share in passage.shares(passage.arriving, piece, num_pieces):
                rows, ids, _ = passage.received_arrays(part, offsets[rank])
                assert {(rank, rows + 12 * row + byte) for row in share for byte in range(12)} <= there
                assert {(rank, ids + byte) for byte in range(8 * part.num_rows)} <= there
    for passage in passages:
        for part in passage.arriving:
            shares = [
                dict(passage.shares(passage.arriving, piece, num_pieces)).get(part, range(0))
                for piece in range(num_pieces)
            ]
            assert [row for share in shares for row in share] == list(range(part.num_rows))


def test_pieces_are_about_equal_and_begin_with_the_next_domain():
    topology = Topology.grid(1, 1, 1, 1)
    crossings = torch.full((4, 4), 64, dtype=torch.int32)
    passage = to_rails(topology, 1, [0, 2, 3], crossings, ARRAYS)
    shares = [
        [(part.sender, share) for part, share in passage.shares(passage.arriving, piece, 4)] for piece in range(4)
    ]
    assert shares == [
        [(0, range(48))],
        [(0, range(48, 64)), (3, range(32))],
        [(2, range(16)), (3, range(32, 64))],
        [(2, range(16, 64))],
    ]

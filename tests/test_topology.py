"""Topology: numbering, rails, what is refused, and the drawing."""

import dataclasses
import pickle
import re
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecomm import Topology
from moecomm.topology_drawing import draw_topology


def numbered(labels):
    """Any labels, renumbered by first use."""
    order = {}
    return tuple(order.setdefault(label, len(order)) for label in labels)


topologies = st.integers(1, 24).flatmap(
    lambda size: st.builds(
        lambda hosts, domains: Topology(numbered(hosts), numbered(domains)),
        *[st.lists(st.integers(0, 5), min_size=size, max_size=size)] * 2,
    )
)


def test_a_grid():
    grid = Topology.grid(2, 2)
    assert (grid.num_ranks, grid.num_hosts, grid.num_domains) == (4, 2, 2)
    assert grid == Topology((0, 0, 1, 1), (0, 0, 1, 1))
    assert [grid.ranks_in(domain) for domain in range(2)] == [(0, 1), (2, 3)]
    assert [grid.ranks_on(host) for host in range(2)] == [(0, 1), (2, 3)]
    assert [grid.local_index(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [[grid.rail(rank, domain) for domain in range(2)] for rank in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [grid.rail_sources(rank) for rank in range(4)] == [(2,), (3,), (0,), (1,)]


def test_three_ranks_and_one():
    uneven = Topology.grid(3, 1)
    assert [uneven.rail(rank, 1) for rank in range(4)] == [3, 3, 3, 3]
    assert [uneven.rail(rank, 0) for rank in range(4)] == [0, 1, 2, 0]
    assert [uneven.rail_sources(rank) for rank in range(4)] == [(3,), (), (), (0, 1, 2)]


def test_one_rank():
    alone = Topology.grid(1)
    assert (alone.num_ranks, alone.num_hosts, alone.num_domains) == (1, 1, 1)
    assert (alone.rail(0, 0), alone.rail_sources(0), alone.ranks_on(0)) == (0, (), (0,))


def test_72_ranks_in_one_domain():
    rack = Topology.of_domains(72, ranks_per_host=4)
    assert (rack.num_ranks, rack.num_hosts, rack.num_domains) == (72, 18, 1)
    assert rack.ranks_on(17) == (68, 69, 70, 71)
    assert [rack.local_index(rank) for rank in range(72)] == list(range(72))
    assert all(rack.rail(rank, 0) == rank and rack.rail_sources(rank) == () for rank in range(72))
    racks = Topology.of_domains(72, 72, ranks_per_host=4)
    assert [racks.rail(rank, 1) for rank in range(72)] == list(range(72, 144))


def test_domains_may_be_parts_of_a_host():
    parts = Topology.of_domains(2, 1, 2, ranks_per_host=3)
    assert (parts.host_of, parts.domain_of) == ((0, 0, 0, 1, 1), (0, 0, 1, 2, 2))


def test_interleaved_ranks():
    mixed = Topology((0, 1, 0, 1), (0, 1, 0, 1))
    assert [mixed.ranks_in(domain) for domain in range(2)] == [(0, 2), (1, 3)]
    assert [mixed.local_index(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [mixed.rail(rank, 1 - rank % 2) for rank in range(4)] == [1, 0, 3, 2]
    assert [mixed.rail_sources(rank) for rank in range(4)] == [(1,), (0,), (3,), (2,)]


@given(topologies)
def test_each_domain_serves_every_far_rank_once_and_evenly(topology):
    sources = {rank: set(topology.rail_sources(rank)) for rank in range(topology.num_ranks)}
    for domain in range(topology.num_domains):
        inside = topology.ranks_in(domain)
        assert inside == tuple(sorted(rank for rank, where in enumerate(topology.domain_of) if where == domain))
        assert [topology.local_index(rank) for rank in inside] == list(range(len(inside)))
        for other in range(topology.num_domains):
            rails = [topology.rail(rank, domain) for rank in topology.ranks_in(other)]
            if other == domain:
                assert tuple(rails) == inside
                continue
            load = Counter({rank: 0 for rank in inside})
            load.update(rails)
            assert set(load) == set(inside)
            assert max(load.values()) - min(load.values()) <= 1
            for rank, rail in zip(topology.ranks_in(other), rails, strict=True):
                assert [there for there in inside if rank in sources[there]] == [rail]
    for rank, found in sources.items():
        assert topology.rail_sources(rank) == tuple(sorted(found))
        assert all(topology.domain_of[source] != topology.domain_of[rank] for source in found)
    on_hosts = [rank for host in range(topology.num_hosts) for rank in topology.ranks_on(host)]
    assert sorted(on_hosts) == list(range(topology.num_ranks))


def test_it_is_a_value():
    grid = Topology([0, 1], [0, 1], ["a", "b"])
    assert (grid.host_of, grid.host_names, grid.host_name(1)) == ((0, 1), ("a", "b"), "b")
    assert Topology.grid(1, 1).host_name(1) == "host 1"
    assert grid == Topology.grid(1, 1)
    assert hash(grid) == hash(Topology.grid(1, 1))
    assert grid != Topology((0, 1), (0, 0))
    assert grid.rail_sources(0) == (1,)
    assert pickle.loads(pickle.dumps(grid)).host_names == ("a", "b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        grid.host_of = (0, 0)


@pytest.mark.parametrize(
    ("host_of", "domain_of", "message"),
    [
        ((), (), "host_of must name at least one rank, got none"),
        ((0, 0), (0,), "one entry per rank each, got 1 and 2"),
        ((0, 2), (0, 1), "host_of must be numbered 0, 1, ... by first rank: rank 1 has 2, where at most 1"),
        ((1, 0), (0, 0), "rank 0 has 1, where at most 0"),
        ((0, 0), (0, -1), "domain_of must be numbered 0, 1, ... by first rank: rank 1 has -1"),
        ((0, 0.0), (0, 0), "host_of: rank 1 has 0.0, which is no int"),
        ((0, True), (0, 0), "host_of: rank 1 has True, which is no int"),
        ((0, 0), "00", "domain_of: rank 0 has '0', which is no int"),
    ],
)
def test_wrong_numbers_are_refused(host_of, domain_of, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Topology(host_of, domain_of)


def test_wrong_names_and_sizes_are_refused():
    with pytest.raises(ValueError, match="one entry per host, got 1 for 2 hosts"):
        Topology((0, 1), (0, 1), ("a",))
    for names in ("ab", (1, 2)):
        with pytest.raises(ValueError, match="host_names must be texts, one per host"):
            Topology((0, 1), (0, 1), names)
    for sizes in ((2, 0), (2, -1), (2, 1.0), (True,)):
        with pytest.raises(ValueError, match=f"ranks_per_host must be integers of at least 1, got {sizes[-1]}"):
            Topology.grid(*sizes)
    with pytest.raises(ValueError, match="ranks_per_host must have at least one entry"):
        Topology.grid()
    with pytest.raises(ValueError, match="ranks_per_domain must have at least one entry"):
        Topology.of_domains(ranks_per_host=4)
    with pytest.raises(ValueError, match="ranks_per_host must be integers of at least 1, got 0"):
        Topology.of_domains(72, ranks_per_host=0)


def test_what_is_not_there_is_refused():
    grid = Topology.grid(2, 1)
    for ask in (grid.local_index, grid.rail_sources, lambda rank: grid.rail(rank, 0)):
        for rank in (-1, 3):
            with pytest.raises(ValueError, match=rf"rank must be in \[0, 3\), got {rank}"):
                ask(rank)
    for domain in (-1, 2):
        with pytest.raises(ValueError, match=rf"domain must be in \[0, 2\), got {domain}"):
            grid.rail(0, domain)
        with pytest.raises(ValueError, match=rf"domain must be in \[0, 2\), got {domain}"):
            grid.ranks_in(domain)
    for ask in (grid.ranks_on, grid.host_name):
        with pytest.raises(ValueError, match=r"host must be in \[0, 2\), got 2"):
            ask(2)


def body(topology, width=80):
    """The lines of the drawing between its sentences, blanks made single."""
    return [" ".join(line.split()) for line in draw_topology(topology, width).split("\n\n")[1].splitlines()]


def test_a_drawing_has_domains_as_lines_and_rails_as_columns():
    assert body(Topology.grid(2, 2)) == ["local index 0 1", "domain 0 host 0 0 1", "domain 1 host 1 2 3"]
    assert body(Topology.grid(3, 1))[2] == "domain 1 host 1 3 (3)(3)"
    assert body(Topology((0, 1, 0, 1), (0, 1, 0, 1), ("a", "b")))[1:] == [
        "domain 0 host 0 a 0 2",
        "domain 1 host 1 b 1 3",
    ]
    assert str(Topology.grid(2, 2)).startswith("4 ranks on 2 hosts; 2 domains")
    assert "in brackets" in str(Topology.grid(3, 1))
    assert str(Topology.grid(1)).startswith("1 rank on 1 host; 1 domain")
    assert "Rails" not in str(Topology.grid(4))


def test_a_drawing_of_a_rack_has_a_line_per_host():
    lines = body(Topology.of_domains(72, ranks_per_host=4))
    assert lines[:3] == ["local index 0 1 2 3", "domain 0 host 0 0 1 2 3", "host 1 +4 4 5 6 7"]
    assert lines[-1] == "host 17 +68 68 69 70 71"
    assert len(lines) == 19


@given(topologies, st.integers(40, 120))
def test_a_drawing_shows_every_rank_once_within_its_width(topology, width):
    names = tuple(f"node-{host}.a-long-name.example.com" for host in range(topology.num_hosts))
    named = dataclasses.replace(topology, host_names=names)
    drawn = draw_topology(named, width)
    assert max(map(len, drawn.splitlines())) <= width
    title, *lines = drawn.split("\n\n")[1].splitlines()
    left = title.index("0") - len(str(topology.num_ranks - 1))
    ranks = [int(cell) for line in lines for cell in re.sub(r"\(\d+\)", " ", line[left:]).split()]
    assert sorted(ranks) == list(range(topology.num_ranks))


def test_the_documentation_shows_the_drawing_as_it_is():
    shown = Topology((0, 0, 0, 1, 1), (0, 0, 0, 1, 1), ("node-a", "node-b"))
    drawn = textwrap.indent(draw_topology(shown, 78), "  ")
    page = Path(__file__).parents[1] / "docs" / "multi-host.md"
    assert drawn in page.read_text(encoding="utf-8")

"""All ranks take the same transport, though each sees for itself only."""

import threading

import pytest

from moecomm import LocalHub, TransportUnavailable
from moecomm.transports.peers import Peer
from moecomm.transports.registry import choose, choose_together
from moecomm.transports.shm import ShmTransport
from moecomm.transports.ucx import UcxTransport


def peer(rank, uid, **others):
    return Peer(rank, 100 + rank, f"p{rank}", "kernel", "pid:1", uid, "node", "cpu", in_process=False, **others)


def on_all_ranks(name, peers):
    """What each rank chooses, or the error that it raises."""
    found = [None] * len(peers)

    def rank(group):
        try:
            found[group.rank] = choose_together(name, group, peers)
        except TransportUnavailable as error:
            found[group.rank] = error

    threads = [threading.Thread(target=rank, args=(group,)) for group in LocalHub(len(peers)).groups()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(one is not None for one in found)
    return found


@pytest.fixture
def ucx_everywhere(monkeypatch):
    """As if UCX were installed: whom it reaches follows from what the peers say."""
    monkeypatch.setattr(UcxTransport, "probe", lambda me, peers: [one.ucx_problem or None for one in peers])


def test_root_does_not_choose_what_the_others_cannot(ucx_everywhere):
    """Root may open another user's memory, who may not open root's."""
    peers = [peer(0, uid=0), peer(1, uid=7), peer(2, uid=7)]
    assert choose("auto", peers[0], peers).transport is ShmTransport
    assert choose("auto", peers[1], peers).transport is not ShmTransport
    choices = on_all_ranks("auto", peers)
    assert len({one.transport for one in choices}) == 1
    for one in choices:
        assert one.transport is not ShmTransport
        assert "belongs to user 0, rank 1 to user 7" in one.refusals["shm"] or "rank 2" in one.refusals["shm"]


def test_none_chooses_what_one_cannot():
    peers = [peer(0, uid=0), peer(1, uid=7)]
    errors = on_all_ranks("shm", peers)
    assert all(isinstance(error, TransportUnavailable) for error in errors)
    assert all("rank 0 (pid 100 on node) belongs to user 0, rank 1 to user 7" in str(error) for error in errors)


def test_a_library_that_one_rank_lacks_is_chosen_by_none(monkeypatch):
    """Nobody but the rank itself knows."""

    def probe(me, peers):
        return ["no library here." if me.rank == 1 else None for _ in peers]

    monkeypatch.setattr(UcxTransport, "probe", probe)
    for error in on_all_ranks("ucx", [peer(0, uid=0), peer(1, uid=0), peer(2, uid=0)]):
        assert isinstance(error, TransportUnavailable)
        assert "no library here." in str(error)


def test_the_usual_choice_is_made_at_once():
    peers = [peer(rank, uid=3) for rank in range(3)]
    assert {one.transport for one in on_all_ranks("auto", peers)} == {ShmTransport}

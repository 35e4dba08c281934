"""The shipped contracts, held against everything that is registered."""

import pytest

from moecomm.testing.contracts import World, transport
from moecomm.transports.registry import transport_names

WORLDS_OF = {
    "local": [World("threads", "local"), World("stepped", "local")],
    "shm": [World("processes", "shm")],
}


def worlds():
    return [world for name in transport_names() for world in WORLDS_OF[name]]


def test_every_transport_is_held_to_the_contract():
    assert set(transport_names()) <= set(WORLDS_OF)


@pytest.mark.parametrize("check", transport.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("world", worlds(), ids=str)
def test_transport(world, check):
    check(world)

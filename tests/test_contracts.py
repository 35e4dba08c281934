"""The shipped contracts, held against everything that is registered."""

import pytest
from host_worlds import HostsWorld

from moecomm import _C
from moecomm.algorithms.registry import exchange_names
from moecomm.codecs.registry import codec_names, make_codec
from moecomm.kernels.registry import available_kernels, kernels_for
from moecomm.testing.contracts import World, algorithm, capacity, codec, domains, kernels, low_latency, transport
from moecomm.transports.registry import transport_names
from moecomm.transports.ucx_library import find_library

WORLDS_OF = {
    "local": [World("threads", "local", rank_counts=(1, 2, 3, 4)), World("stepped", "local")],
    "shm": [World("processes", "shm", rank_counts=(1, 2, 3, 4))],
    "nvlink": [World("processes", "nvlink", rank_counts=(2,))],
    "shm+ucx": [HostsWorld("processes", "shm+ucx", rank_counts=(2, 3, 4), per_host=2)],
    "ucx": [World("processes", "ucx", rank_counts=(1, 2, 3))],
    "nvshmem": [],  # needs GPUs; tests/test_nvshmem_transport.py holds it to the contract over a double
}
TRANSPORT_WORLDS = [world for name in transport_names() for world in WORLDS_OF[name]]
# Exchanges over nvlink take tensors of a device: tests/triton/test_late_device.py.
EXCHANGE_WORLDS = [world for world in TRANSPORT_WORLDS if world.transport != "nvlink"]
EXCHANGE_WORLDS.append(World("processes", "collective", rank_counts=(1, 2, 4)))


def runnable(worlds):
    """The worlds as parameters; what needs UCX is skipped where there is none."""
    no_ucx = find_library().problem
    skip = pytest.mark.skipif(bool(no_ucx), reason=no_ucx or "UCX is here")
    return [pytest.param(world, marks=[skip] if "ucx" in world.transport else [], id=str(world)) for world in worlds]


def name_of(check):
    return check.__name__.removeprefix("check_")


def test_every_transport_is_held_to_the_contract():
    assert set(transport_names()) <= set(WORLDS_OF)
    assert set(exchange_names()) == {"auto", "collective", *WORLDS_OF}
    assert {world.transport for world in TRANSPORT_WORLDS} == set(WORLDS_OF) - {"nvshmem"}


@pytest.mark.parametrize("check", transport.CHECKS, ids=name_of)
@pytest.mark.parametrize("world", runnable(TRANSPORT_WORLDS))
def test_transport(world, check):
    check(world)


@pytest.mark.parametrize("check", algorithm.CHECKS, ids=name_of)
@pytest.mark.parametrize("world", runnable(EXCHANGE_WORLDS))
def test_exchange(world, check):
    check(world)


@pytest.mark.parametrize("check", capacity.CHECKS, ids=name_of)
@pytest.mark.parametrize("world", runnable(EXCHANGE_WORLDS))
def test_capacity(world, check):
    check(world)


@pytest.mark.parametrize("check", low_latency.CHECKS, ids=name_of)
@pytest.mark.parametrize("world", runnable(EXCHANGE_WORLDS))
def test_low_latency(world, check):
    check(world)


@pytest.mark.parametrize("check", domains.CHECKS, ids=name_of)
@pytest.mark.parametrize("world", runnable(EXCHANGE_WORLDS))
def test_domains(world, check):
    check(world)


@pytest.mark.parametrize("check", codec.CHECKS, ids=name_of)
@pytest.mark.parametrize("name", codec_names())
def test_codec(name, check):
    check(make_codec(name))


@pytest.mark.parametrize("check", kernels.CHECKS, ids=name_of)
@pytest.mark.parametrize("instruction_set", ["generic", "avx2", "avx512"])
# The Triton kernels are held to it in tests/triton.
@pytest.mark.parametrize("name", [name for name in available_kernels() if name not in ("reference", "triton")])
def test_kernels(name, instruction_set, check):
    if not _C.cpu_features()[instruction_set]:
        pytest.skip(f"this processor has no {instruction_set}")
    _C.set_instruction_set(instruction_set)
    try:
        check(kernels_for(name))
    finally:
        _C.set_instruction_set("auto")

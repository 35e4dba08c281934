"""Puts of transport `ucx` that need no message: when they are chosen, their order and end, the memory they go to."""

import ctypes
import random

import pytest
from one_sided_worlds import WIRES, OneSided, OneSidedWorld, wire
from ucx_ranks import MIB, SEGMENT, address_of, needs_ucx, open_transport, pattern, run, wait

import moecomm
from moecomm.testing.contracts import algorithm, low_latency, transport
from moecomm.transports.ucx_lanes import is_one_sided

# -- when they are chosen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lanes", "wanted"),
    [
        (["rc_mlx5"], True),
        (["rc_verbs", "tcp"], True),
        (["dc_mlx5", "ud_mlx5"], True),
        (["srd"], True),
        (["ugni_rdma", "ugni_smsg"], True),
        (["tcp", "cma"], True),
        (["posix", "xpmem"], True),
        (["sysv", "knem"], True),
        (["tcp"], False),
        (["ud_verbs"], False),
        (["ud_mlx5", "tcp"], False),
        (["posix"], False),
        (["sysv", "self"], False),
        (["a transport of tomorrow"], False),
        ([], False),
    ],
)
def test_the_decision_by_the_names_of_transports(lanes, wanted):
    assert is_one_sided(lanes) is wanted


@needs_ucx
@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize(("one_sided", "wanted"), [(None, False), (False, False), (True, True)])
def test_what_is_chosen_and_said(name, one_sided, wanted):
    way = "one-sided from 65536 bytes on" if wanted else "messages"
    for rank, (lines, num_one_sided) in enumerate(run(put_and_tell, 3, name, one_sided)):
        others = [other for other in range(3) if other != rank]
        assert lines == [f"to ranks {others[0]}, {others[1]}: {way} ({name})"]
        assert (num_one_sided > 0) is wanted


def put_and_tell(group, name, one_sided):
    with wire(name, one_sided, 65_536):
        opened = open_transport(group)
    region = opened.allocate(3 * MIB)
    data = pattern(MIB, group.rank)
    other = (group.rank + 1) % group.size
    for number in range(1, 4):
        opened.put(region, group.rank * MIB, address_of(data), MIB, other)
        opened.signal_all(0, 1)
        wait(opened, 0, number)
    before = (group.rank - 1) % group.size
    assert ctypes.string_at(region.address + before * MIB, MIB) == pattern(MIB, before)
    group.all_gather(None)
    told = opened.describe_wires(), opened._wire.num_one_sided(other)
    opened.close()
    return told


@needs_ucx
def test_a_communicator_says_how_bytes_get_to_far_ranks():
    told = run(OneSided(explain, "tcp"), 2)
    assert told == ["to rank 1: one-sided from 1 bytes on (tcp)", "to rank 0: one-sided from 1 bytes on (tcp)"]


def explain(group):
    with moecomm.Communicator(group, num_experts=2, hidden=8, num_topk=1, transport="ucx") as comm:
        return comm.explain().splitlines()[1].strip()


@needs_ucx
def test_who_gives_no_key_gets_messages():
    run(put_to_the_withholding, 2)


def put_to_the_withholding(group):
    """Rank 0 wants to put one-sided, rank 1 does not let it."""
    with wire("tcp", group.rank == 0):
        opened = open_transport(group)
    region = opened.allocate(MIB)
    for number in range(1, 4):
        data = pattern(MIB, number)
        if group.rank == 0:
            opened.put(region, 0, address_of(data), MIB, 1)
        opened.signal_all(0, 1)
        wait(opened, 0, number)
        if group.rank == 1:
            assert ctypes.string_at(region.address, MIB) == data
        group.all_gather(None)
    assert [opened._wire.num_one_sided(1 - group.rank), opened._wire.registered_bytes()] == [0, 0]
    opened.close()


# -- the contracts -----------------------------------------------------------------------------------------------------


WORLDS = [OneSidedWorld("processes", "ucx", rank_counts=(2, 3), wire=name) for name in WIRES]


@needs_ucx
@pytest.mark.parametrize("check", transport.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_transport(world, check):
    check(world)


@needs_ucx
@pytest.mark.parametrize("check", algorithm.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_exchange(check):
    check(WORLDS[0])


@needs_ucx
@pytest.mark.parametrize("check", low_latency.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_low_latency(check):
    check(WORLDS[0])


# -- order -------------------------------------------------------------------------------------------------------------


@needs_ucx
@pytest.mark.parametrize("name", WIRES)
def test_a_signal_never_overtakes_puts_of_either_kind(name):
    run(OneSided(put_at_random, name, 20_000), 3, 30)


def put_at_random(group, num_rounds):
    """Each round: poison my memory, say so, and put parts of random sizes at random places to every other rank."""
    opened = open_transport(group)
    share = 2 * SEGMENT // group.size + 333  # odd, across the segments
    region = opened.allocate(share * group.size)
    others = [rank for rank in range(group.size) if rank != group.rank]
    for number in range(1, num_rounds + 1):
        ctypes.memset(region.address, 0xFF, region.nbytes)
        opened.signal_all(1, 1)
        wait(opened, 1, number)
        numbers = random.Random(f"{group.rank} {number}")
        content = plan(group.rank, number, share)
        for rank in others:
            for offset, data in numbers.sample(content, len(content)):
                source = ctypes.create_string_buffer(data, len(data))
                place = share * group.rank + offset
                if (offset, data) == content[-1] and number % 2:
                    opened._put(region, place, ctypes.addressof(source), len(data), rank, 2, 1)
                else:
                    opened.put(region, place, ctypes.addressof(source), len(data), rank)
                ctypes.memset(source, 0xEE, len(data))  # what is sent is what was there
            opened.signal(rank, 0)
        opened.signal(group.rank, 0)
        if number % 7 == 0:
            opened.flush()
        wait(opened, 0, number)
        for source in others:
            for offset, data in plan(source, number, share):
                got = ctypes.string_at(region.address + share * source + offset, len(data))
                assert got == data, f"round {number}: {len(data)} bytes at {offset} from rank {source}"
    assert all(opened._wire.num_one_sided(rank) > 0 for rank in others)
    group.all_gather(None)
    opened.close()


def plan(source, number, share):
    """(offset, bytes) of what a rank puts in a round: disjoint, small and large in turn."""
    numbers = random.Random(f"{source} {number} plan")
    parts, offset = [], numbers.randrange(99)
    while True:
        length = numbers.choice([1, 7, 300, 19_999, 20_000, 70_001, 262_145, 700_000, MIB + 5])
        if offset + length > share:
            return parts
        parts.append((offset, bytes([numbers.randrange(255)]) * length))
        offset += length + numbers.randrange(400_000)


@needs_ucx
@pytest.mark.parametrize("name", WIRES)
def test_flush_returns_when_the_bytes_are_there(name):
    run(OneSided(flush_and_look, name), 2)


def flush_and_look(group):
    opened = open_transport(group)
    region = opened.allocate(4 * MIB)
    for number in range(3):
        data = pattern(3 * MIB + 3, number)
        opened.put(region, 5, address_of(data), len(data), 1 - group.rank)
        opened.flush()
        group.all_gather(None)  # not through the transport
        assert ctypes.string_at(region.address + 5, len(data)) == data
        group.all_gather(None)
    assert opened._wire.num_one_sided(1 - group.rank) > 0
    opened.close()

"""The contract of a transport: regions, puts, counters, waits with deadlines, departures."""

from __future__ import annotations

import ctypes
import os
import signal as signals
import time
from collections.abc import Callable

from moecomm.groups import Group
from moecomm.testing.compare import expect
from moecomm.testing.contracts.world import World
from moecomm.testing.failures import RankDied
from moecomm.transports.base import Region, Transport, WaitOutcome
from moecomm.transports.peers import gather_peers
from moecomm.transports.registry import transport_class

__all__ = ["CHECKS"]

_NUM_SLOTS = 4
_PATIENCE = 20.0  # seconds; for waits that must succeed


def open_transport(group: Group, name: str) -> Transport:
    """Makes the transport that a check runs on."""
    return transport_class(name)(group, gather_peers(group), _NUM_SLOTS)


def check_probe_reaches_its_own_ranks(world: World) -> None:
    """Ranks that the transport is for can be reached; the remedy is a sentence."""
    world.run(_probe, world.several)


def _probe(group: Group, name: str) -> None:
    peers = gather_peers(group)
    answers = transport_class(name).probe(peers[group.rank], peers)
    expect(answers == [None] * group.size, f"probe: {answers}")
    remedy = transport_class(name).remedy()
    expect(remedy.endswith("."), f"remedy is not a sentence: {remedy!r}")


def check_regions_are_symmetric_and_zero(world: World) -> None:
    """Every rank has a zeroed part of the asked size under the same index, whatever the size."""
    world.run(_regions, world.several)


def _regions(group: Group, name: str) -> None:
    transport = open_transport(group, name)
    regions = [transport.allocate(nbytes) for nbytes in (1, 4096, 100_001)]
    for region in regions:
        expect(not any(_read(region, 0, region.nbytes)), f"region {region.index} is not zero")
    indices = [region.index for region in regions]
    expect(len(set(indices)) == 3, f"indices repeat: {indices}")
    everyone = group.all_gather([(region.index, region.nbytes) for region in regions])
    expect(all(one == everyone[0] for one in everyone), f"regions differ between ranks: {everyone}")
    transport.close()


def check_puts_arrive_where_they_were_sent(world: World) -> None:
    """Bytes put at any offset and of any length are there once the later signal is, and nothing else changes."""
    for num_ranks in world.rank_counts:
        world.run(_puts, num_ranks)


def _puts(group: Group, name: str) -> None:
    transport = open_transport(group, name)
    lengths = (0, 1, 3, 64, 1000)
    stride = sum(lengths) + len(lengths)  # a byte between neighbours stays zero
    region = transport.allocate(stride * group.size)
    for rank in range(group.size):
        offset = stride * group.rank
        for length in lengths:
            data = ctypes.create_string_buffer(_pattern(group.rank, rank, length), max(1, length))
            transport.put(region, offset, ctypes.addressof(data), length, rank)
            transport.flush()
            offset += length + 1
        transport.signal(rank, 0)
    _wait(transport, 0, 1)
    for source in range(group.size):
        offset = stride * source
        for length in lengths:
            got = _read(region, offset, length + 1)
            wanted = _pattern(source, group.rank, length) + b"\0"
            expect(got == wanted, f"{length} bytes from rank {source} arrived as {got[:16]!r}, not {wanted[:16]!r}")
            offset += length + 1
    group.all_gather(None)
    transport.close()


def check_puts_outside_the_region_are_refused(world: World) -> None:
    """A put that would write outside the region raises ValueError and writes nothing."""
    world.run(_puts_outside, min(2, world.several))


def _puts_outside(group: Group, name: str) -> None:
    transport = open_transport(group, name)
    region = transport.allocate(64)
    data = ctypes.create_string_buffer(64)
    for offset, length in ((-1, 8), (60, 5), (65, 0), (1 << 63, 1)):
        try:
            transport.put(region, offset, ctypes.addressof(data), length, group.rank)
        except ValueError:
            continue
        expect(False, f"a put of {length} bytes at {offset} of 64 was accepted")
    transport.close()


def check_pointers_lead_to_the_peer(world: World) -> None:
    """Where a peer's part has an address here, it is that peer's memory; my own part always has one."""
    world.run(_pointers, world.several)


def _pointers(group: Group, name: str) -> None:
    transport = open_transport(group, name)
    region = transport.allocate(4096)
    expect(transport.peer(region, group.rank) == region.address, "peer(my rank) is not the region's address")
    ctypes.memset(region.address, group.rank + 1, 4096)
    group.all_gather(None)
    for rank in range(group.size):
        address = transport.peer(region, rank)
        if transport.capabilities.addressable:
            expect(address is not None, f"addressable, but rank {rank} has no address")
        if address is not None:
            got = ctypes.string_at(address + 4095, 1)[0]
            expect(got == rank + 1, f"the address of rank {rank} shows {got}")
    group.all_gather(None)
    transport.close()


def check_counters_add_up_per_source(world: World) -> None:
    """Each source has a lane of its own in each slot; values add; the slot is reached when the slowest lane is."""
    world.run(_counters, world.several)


def _counters(group: Group, name: str) -> None:
    transport = open_transport(group, name)
    for rank in range(group.size):
        transport.signal(rank, 1, 5)
        transport.signal(rank, 1, group.rank)
        transport.signal(rank, 3, 1 << 40)
    transport.signal_all(2, 7)
    _wait(transport, 1, 5)
    _wait(transport, 3, 1 << 40)
    _wait(transport, 2, 7)
    group.all_gather(None)
    for source in range(group.size):
        lanes = [transport.lane(slot, source) for slot in range(4)]
        expect(lanes == [0, 5 + source, 7, 1 << 40], f"lanes of rank {source}: {lanes}")
    group.all_gather(None)
    transport.close()


def check_traffic_ends_a_wait(world: World) -> None:
    """A signal of any rank in any of several counters ends a wait for traffic; without one it lasts its time."""
    world.run(_traffic, min(2, world.several))


def _traffic(group: Group, name: str) -> None:
    transport = open_transport(group, name)
    slots = range(1, 3)
    expect(transport.traffic(slots) == 0, f"traffic before any signal: {transport.traffic(slots)}")
    expect(not transport.wait_traffic(slots, 0, 0.05), "a wait for traffic ended without traffic")
    group.all_gather(None)
    expected = 0
    for slot, n in ((2, 3), (1, 10)):
        for rank in range(group.size):
            transport.signal(rank, 0, 1)  # of another counter, which does not count
            transport.signal(rank, slot, n)
        expected += n * group.size
        while (seen := transport.traffic(slots)) < expected:
            expect(transport.wait_traffic(slots, seen, _PATIENCE), "the signals do not come")
        group.all_gather(None)
    expect(transport.traffic(slots) == 13 * group.size, f"traffic: {transport.traffic(slots)}")
    transport.close()


def check_post_reaches_everyone(world: World) -> None:
    """The same bytes at the same offset of every rank, then the signal."""
    for num_ranks in world.rank_counts:
        world.run(_post, num_ranks)


def _post(group: Group, name: str) -> None:
    transport = open_transport(group, name)
    region = transport.allocate(64 * group.size)
    data = ctypes.create_string_buffer(_pattern(group.rank, 0, 64), 64)
    transport.post(region, 64 * group.rank, ctypes.addressof(data), 64, 2, 3)
    _wait(transport, 2, 3)
    for source in range(group.size):
        expect(_read(region, 64 * source, 64) == _pattern(source, 0, 64), f"what rank {source} posted is not here")
    group.all_gather(None)
    transport.close()


def check_post_reaches_those_that_are_named(world: World) -> None:
    """Given ranks, no other gets the bytes or the signal."""
    world.run(_post_to, world.several)


def _post_to(group: Group, name: str) -> None:
    transport = open_transport(group, name)
    region = transport.allocate(64 * group.size)
    data = ctypes.create_string_buffer(_pattern(group.rank, 0, 64), 64)
    following = (group.rank + 1) % group.size
    transport.post(region, 64 * group.rank, ctypes.addressof(data), 64, 2, 3, (following,))
    transport.signal_all(0, 1)
    _wait(transport, 0, 1)
    for source in range(group.size):
        is_mine = (source + 1) % group.size == group.rank
        wanted = _pattern(source, 0, 64) if is_mine else bytes(64)
        expect(_read(region, 64 * source, 64) == wanted, f"from rank {source} came what was not sent")
        expect(transport.lane(2, source) == 3 * is_mine, f"rank {source} signalled {transport.lane(2, source)}")
    group.all_gather(None)
    transport.close()


def check_counters_of_neighbours_can_be_read(world: World) -> None:
    """Where a peer's memory has an address here, one can wait for what others signal to it; its going ends the wait."""
    world.run(_neighbours, world.several)


def _neighbours(group: Group, name: str) -> None:
    transport = open_transport(group, name)
    region = transport.allocate(64)
    last = group.size - 1
    near = [rank for rank in range(group.size) if rank != group.rank and transport.peer(region, rank) is not None]
    lanes = [(rank, source) for rank in near for source in range(group.size)]
    expect(not lanes or transport.wait_at(1, lanes, 1, 0.0) is WaitOutcome.TIMEOUT, "nobody has signalled")
    group.all_gather(None)
    for rank in range(group.size):
        transport.signal(rank, 1, group.rank + 1)
    if near:
        expect(transport.wait_at(1, lanes, 1, _PATIENCE) is WaitOutcome.REACHED, "the neighbours' signals do not come")
    seen = [transport.lane_at(1, rank, source) for rank, source in lanes]
    expect(seen == [source + 1 for _, source in lanes], f"lanes {lanes} are {seen}")
    group.all_gather(None)
    if group.rank == last:
        transport.close()
        return
    if last in near:
        outcome = transport.wait_at(1, [(last, 0)], 2, _PATIENCE)
        expect(outcome is WaitOutcome.LOST, f"waiting at a rank that has gone ended with {outcome}")
        expect(transport.wait_at(1, [(last, 0)], 1, _PATIENCE) is WaitOutcome.REACHED, "it was signalled before")
    transport.close()


def check_a_signal_never_overtakes_its_puts(world: World) -> None:
    """Many rounds: what a peer put before it signalled is there when the signal is."""
    world.run(_ping_pong, min(2, world.several), 300)


def _ping_pong(group: Group, name: str, num_rounds: int) -> None:
    transport = open_transport(group, name)
    region = transport.allocate(2 * 2048 * group.size)
    for number in range(1, num_rounds + 1):
        # Two halves in turn: a peer may already write for the next round.
        half = number % 2 * 2048 * group.size
        data = ctypes.create_string_buffer(bytes([number % 251]) * 2048, 2048)
        for rank in range(group.size):
            transport.put(region, half + 2048 * group.rank, ctypes.addressof(data), 2048, rank)
            transport.signal(rank, 0)
        transport.flush()
        _wait(transport, 0, number)
        got = set(_read(region, half, 2048 * group.size))
        expect(got == {number % 251}, f"round {number}: bytes {sorted(got)} instead of {number % 251}")
    group.all_gather(None)
    transport.close()


def check_a_wait_ends_at_its_deadline(world: World) -> None:
    """A counter that nobody raises ends the wait with TIMEOUT, not much before or after the time asked for."""
    world.run(_deadline, min(2, world.several), world.backend == "stepped")


def _deadline(group: Group, name: str, stepped: bool) -> None:
    transport = open_transport(group, name)
    before = time.monotonic()
    outcome = transport.wait(1, 1, 0.2)
    seconds = time.monotonic() - before
    expect(outcome is WaitOutcome.TIMEOUT, f"waiting in vain ended with {outcome}")
    # Stepped ranks do not sleep: when nobody can go on, nobody ever will.
    expect(stepped or 0.15 < seconds < 5.0, f"a wait of 0.2 s took {seconds:.3f} s")
    expect(transport.lane(1, group.rank) == 0, "a wait changed its counter")
    group.all_gather(None)
    transport.close()


def check_closing_is_idempotent_and_seen(world: World) -> None:
    """After a peer has closed, it is gone and a wait for it ends with LOST; closing twice is fine."""
    world.run(_departure, min(2, world.several))


def _departure(group: Group, name: str) -> None:
    transport = open_transport(group, name)
    if group.rank == group.size - 1:
        transport.close()
        transport.close()
        return
    outcome = transport.wait(0, 1, _PATIENCE)
    expect(outcome is WaitOutcome.LOST, f"waiting for a rank that has closed ended with {outcome}")
    expect(transport.gone() == [group.size - 1], f"gone: {transport.gone()}")
    transport.close()
    transport.close()


def check_a_dead_process_is_seen(world: World) -> None:
    """A rank whose process is killed is gone within 2 s; a wait for it ends with LOST. Processes only."""
    if world.backend != "processes" or world.several < 2:
        return
    results = world.run(_death, world.several, return_exceptions=True)
    expect(isinstance(results[-1], RankDied), f"the rank that killed itself: {results[-1]!r}")
    for rank, seconds in enumerate(results[:-1]):
        expect(isinstance(seconds, float), f"rank {rank}: {seconds!r}")
        expect(seconds < 2.0, f"rank {rank} noticed after {seconds:.2f} s")


def _death(group: Group, name: str) -> float:
    transport = open_transport(group, name)
    group.all_gather(None)
    if group.rank == group.size - 1:
        os.kill(os.getpid(), signals.SIGKILL)
    before = time.monotonic()
    outcome = transport.wait(0, 1, _PATIENCE)
    expect(outcome is WaitOutcome.LOST, f"waiting for a dead rank ended with {outcome}")
    # A rank that has noticed, and closed, may be gone for this one before the dead one is.
    while group.size - 1 not in transport.gone():
        expect(time.monotonic() - before < _PATIENCE, f"gone: {transport.gone()}")
        time.sleep(0.01)
    seconds = time.monotonic() - before
    transport.close()
    return seconds


def _wait(transport: Transport, slot: int, at_least: int) -> None:
    outcome = transport.wait(slot, at_least, _PATIENCE)
    expect(outcome is WaitOutcome.REACHED, f"waiting for slot {slot} to reach {at_least} ended with {outcome}")


def _read(region: Region, offset: int, nbytes: int) -> bytes:
    return ctypes.string_at(region.address + offset, nbytes)


def _pattern(source: int, target: int, length: int) -> bytes:
    return bytes((31 * source + 7 * target + i) % 255 + 1 for i in range(length))


CHECKS: tuple[Callable[[World], None], ...] = (
    check_probe_reaches_its_own_ranks,
    check_regions_are_symmetric_and_zero,
    check_puts_arrive_where_they_were_sent,
    check_puts_outside_the_region_are_refused,
    check_pointers_lead_to_the_peer,
    check_counters_add_up_per_source,
    check_traffic_ends_a_wait,
    check_post_reaches_everyone,
    check_post_reaches_those_that_are_named,
    check_counters_of_neighbours_can_be_read,
    check_a_signal_never_overtakes_its_puts,
    check_a_wait_ends_at_its_deadline,
    check_closing_is_idempotent_and_seen,
    check_a_dead_process_is_seen,
)

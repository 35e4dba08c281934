"""Ranks of several hosts: the transport's contract over real links, and what happens when links or hosts fail."""

import ctypes
import signal
import subprocess
import time

import pytest
from multi_host import RanksOnHosts, begun

from moecomm.testing.contracts import algorithm, low_latency, transport
from moecomm.testing.hosts import PREFIX, Hosts, ip, remove_leftovers, why_not
from moecomm.transports.base import WaitOutcome
from moecomm.transports.peers import gather_peers
from moecomm.transports.registry import choose, transport_class
from moecomm.transports.ucx_library import find_library

PATIENCE = 20.0


@pytest.fixture(scope="module")
def ranks():
    reason = find_library().problem or why_not()
    if reason:
        pytest.skip(reason)
    with Hosts((1, 1)) as hosts, RanksOnHosts(hosts, "ucx") as made:
        yield made


def test_namespaces_of_a_test_that_was_killed_are_removed(ranks):
    ended = subprocess.Popen(["true"])
    ended.wait()
    name = f"{PREFIX}-{ended.pid}-test-0"
    ip("netns", "add", name)
    inside = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "60"])
    while not ip("netns", "pids", name):
        time.sleep(0.01)
    remove_leftovers()
    left = ip("netns", "list")
    assert name not in left
    assert ranks.hosts.namespace(0) in left
    assert inside.wait(timeout=10) == -signal.SIGKILL


CHECKS = [*transport.CHECKS, algorithm.check_against_the_oracle, low_latency.check_against_the_oracle]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.__module__}-{check.__name__}".split(".")[-1])
def test_the_contract_holds_between_hosts(ranks, check):
    check(ranks)


def test_hosts_are_told_apart(ranks):
    """In namespaces of one machine the kernel is the same; without the given identity `shm` would be chosen."""
    assert ranks.run(choose_a_transport, 2) == ["shm+ucx", "shm+ucx"]


def choose_a_transport(group, _):
    peers = gather_peers(group)
    choice = choose("auto", peers[group.rank], peers)
    assert "runs on another host" in choice.refusals["shm"], choice.refusals
    return choice.transport.name


def test_a_link_that_is_down_for_a_second_is_survived(ranks):
    def outage():
        ranks.hosts.unplug(1)
        time.sleep(1.0)
        ranks.hosts.plug(1)

    longest = ranks.run(exchange_until_told, 2, 1.5, meanwhile=outage)
    # That long at least no round can have ended.
    assert min(longest) > 0.5, f"the outage was not seen: {longest}"


def exchange_until_told(group, name, seconds):
    """Rounds of a put and a signal each way; rank 0 says in its bytes when the last has come. The longest round."""
    transport = transport_class(name)(group, gather_peers(group), 2)
    region = transport.allocate(2 * 100_000)
    other = 1 - group.rank
    longest, number, end, is_last = 0.0, 0, time.monotonic() + seconds, False
    while not is_last:
        if number == 10:
            begun()
        number += 1
        before = time.monotonic()
        half = number % 2 * 100_000
        mark = 255 if group.rank == 0 and before > end else number % 200
        data = bytes([mark]) * 100_000
        transport.put(region, half, ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value, len(data), other)
        transport.signal_all(0, 1)
        outcome = transport.wait(0, number, PATIENCE)
        assert outcome is WaitOutcome.REACHED, f"round {number}: {outcome}"
        got = set(ctypes.string_at(region.address + half, 100_000))
        assert got <= {number % 200, 255}, f"round {number}: {got}"
        assert len(got) == 1, f"round {number}: {got}"
        is_last = 255 in got or mark == 255
        longest = max(longest, time.monotonic() - before)
    group.all_gather(None)
    transport.close()
    return longest


def test_a_link_that_stays_down_ends_the_wait_at_its_deadline(ranks):
    try:
        outcomes = ranks.run(exchange_until_late, 2, meanwhile=lambda: ranks.hosts.unplug(1))
    finally:
        ranks.hosts.plug(1)
        ranks.stop()  # the ranks' group has lost its connections, too
    assert outcomes == ["TIMEOUT", "TIMEOUT"]


def exchange_until_late(group, name):
    transport = transport_class(name)(group, gather_peers(group), 2)
    number, outcome = 0, WaitOutcome.REACHED
    while outcome is WaitOutcome.REACHED:
        if number == 10:
            begun()
        number += 1
        transport.signal_all(0, 1)
        outcome = transport.wait(0, number, 2.0)
    transport.close()  # needs no peer
    return outcome.name

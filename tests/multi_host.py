"""Hosts within one machine: network namespaces joined by a switch, with ranks that live in them.

switch namespace   bridge ---- port0 ---- port1 ...
                                 |          |            pairs of virtual Ethernet devices
host namespaces                eth0       eth0           10.77.0.1, 10.77.0.2, ...

Needs root. Ranks are warm processes, as those of `moecomm.testing.launch`; they meet by gloo over the same links. What
UCX could use between processes of one machine is switched off: hosts have only TCP between them.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import secrets
import shutil
import socket
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

from moecomm.testing.failures import RankDied

PREFIX = "moecomm"
PORT = 29500
START_TIMEOUT = 60.0
BEGUN = "begun"
READY = "ready"

channel_to_the_test = None  # of a rank


def ip(*arguments):
    """Calls `ip`; RuntimeError with what it said if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=20)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def why_not():
    """The sentence why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the program `ip` (iproute2) is missing"
    name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}-try"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "bridge", "type", "bridge")
        finally:
            ip("netns", "delete", name)
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}"
    return None


def remove_leftovers():
    """Removes namespaces of test processes that have ended without doing so."""
    for line in ip("netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{PREFIX}-") and not Path("/proc", name.split("-")[1]).exists():
            ip("netns", "delete", name)


class Hosts:
    """Some hosts and their links; also a world that contract checks can be run on. A context manager.

    Arguments:
        num_hosts: how many.
        ranks_per_host: how many ranks live on each; one by default.
        transport: what checks are given as the transport's name.
    """

    backend = "processes"

    def __init__(self, num_hosts, transport, ranks_per_host=None):
        self.num_hosts = num_hosts
        self.transport = transport
        self.host_of = [host for host, count in enumerate(ranks_per_host or [1] * num_hosts) for _ in range(count)]
        self.rank_counts = (len(self.host_of),)
        self.several = len(self.host_of)
        self._tag = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"
        self._switch = f"{self._tag}-switch"
        self._made = []
        self._workers = []

    def __enter__(self):
        remove_leftovers()
        try:
            self._make(self._switch)
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._switch, "link", "set", "bridge", "up")
            for host in range(self.num_hosts):
                name = self.namespace(host)
                self._make(name)
                end = ("peer", "name", f"port{host}", "netns", self._switch)
                ip("-n", name, "link", "add", "eth0", "type", "veth", *end)
                ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge")
                self.plug(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.stop()
        # The devices go with the namespaces.
        while self._made:
            with contextlib.suppress(RuntimeError):
                ip("netns", "delete", self._made.pop())

    def _make(self, name):
        ip("netns", "add", name)
        self._made.append(name)

    def namespace(self, host):
        return f"{self._tag}-{host}"

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def plug(self, host):
        ip("-n", self._switch, "link", "set", f"port{host}", "up")

    def unplug(self, host):
        """Pulls the host's cable; addresses, routes and connections stay."""
        ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def run(self, fn, num_ranks, *args, return_exceptions=False, meanwhile=None, timeout=40.0):
        """Calls `fn(group, transport, *args)` on every host; see `moecomm.testing.launch`.

        `meanwhile()` is called here when all ranks have called `begun()`. After a failure the ranks are replaced.
        """
        assert num_ranks == len(self.host_of), f"{num_ranks} ranks, but the hosts have {len(self.host_of)}"
        if not self._workers:
            self._start()
        for worker in self._workers:
            worker.channel.send((fn, (self.transport, *args)))
        deadline = time.monotonic() + timeout
        if meanwhile is not None:
            said = [worker.answer(deadline - time.monotonic()) for worker in self._workers]
            assert said == [BEGUN] * num_ranks, said
            meanwhile()
        answers = [worker.answer(deadline - time.monotonic()) for worker in self._workers]
        failures = [answer for answer in answers if isinstance(answer, Exception)]
        if failures:
            self.stop()
        if failures and not return_exceptions:
            raise failures[0]
        return answers

    def _start(self):
        try:
            self._workers = [Worker(self, rank) for rank in range(len(self.host_of))]
            for worker in self._workers:
                assert worker.answer(START_TIMEOUT) == READY
        except BaseException:
            self.stop()
            raise

    def stop(self):
        """Ends the ranks."""
        while self._workers:
            self._workers.pop().end()


class Worker:
    """One rank, seen from the test."""

    def __init__(self, hosts, rank):
        self.rank = rank
        mine, theirs = socket.socketpair()
        with theirs:
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts.host_of)),
                "MASTER_ADDR": hosts.address(0),
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
                "MOECOMM_HOST_ID": hosts.namespace(hosts.host_of[rank]),
                "UCX_TLS": "tcp",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            }
            program = f"import multi_host; multi_host.work({theirs.fileno()})"
            command = ["ip", "netns", "exec", hosts.namespace(hosts.host_of[rank]), sys.executable, "-c", program]
            self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        self.channel = multiprocessing.connection.Connection(mine.detach())

    def answer(self, timeout):
        """What the rank says next; a `RankDied` or `TimeoutError` if nothing, the error that it raised."""
        try:
            if not self.channel.poll(max(0.0, timeout)):
                return TimeoutError(f"rank {self.rank} has not answered in time")
            return pickle.loads(self.channel.recv_bytes())
        except (EOFError, ConnectionResetError):
            return RankDied(self.process.wait(timeout=10))

    def end(self):
        self.process.kill()
        self.process.wait(timeout=10)
        self.channel.close()


def begun():
    """Says that a rank is in the midst of it; for functions that are called with `meanwhile`."""
    channel_to_the_test.send(BEGUN)


def work(descriptor):
    """The life of a rank: joins the group, then does what it is told until the test's end closes."""
    import torch
    import torch.distributed as dist

    from moecomm.groups import TorchGroup

    torch.set_num_threads(1)
    global channel_to_the_test
    channel = channel_to_the_test = multiprocessing.connection.Connection(descriptor)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    group = TorchGroup(dist.group.WORLD)
    channel.send(READY)
    while True:
        try:
            fn, args = channel.recv()
        except EOFError:
            return
        try:
            answer = fn(group, *args)
        except Exception:  # noqa: BLE001 - whatever it is, the test is to see it
            answer = AssertionError(f"rank {group.rank}: {traceback.format_exc()}")
        channel.send(answer)

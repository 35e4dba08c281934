"""Hosts within one machine: network namespaces joined by a switch, their links limited where that is asked for.

    switch namespace   bridge ---- port0 ---- port1 ...
                                     |          |            pairs of virtual Ethernet devices
    host namespaces                eth0       eth0           10.77.0.1, 10.77.0.2, ...

Needs root. Programs are started in a host as a user would start them, by torchrun or mpirun. Hosts have only TCP
between them: what UCX could use between processes of one machine is switched off, and shared memory is refused because
each host says who it is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, final

__all__ = ["INTERFACE", "PREFIX", "Hosts", "ip", "remove_leftovers", "why_not"]

PREFIX = "moecomm"
INTERFACE = "eth0"
# As networks of clusters have it; of 1 Gbit/s TCP then has 99 % (with 1500 bytes: 95.6 %).
MTU = 9000
# A bucket below 64 KiB would cut the large packets that TCP makes into ones of the MTU, which costs a core and a third
# of the rate; a larger one lets so many bytes pass at once after a pause, which counts in short exchanges.
BURST = "96kb"
# What the queue of a limited link holds before it drops packets, as time: two hosts may send to a third at once.
QUEUE = "50ms"
# How TCP finds its rate: the way that every Linux has and lets a namespace choose. What the machine happens to use may
# not suit: `bbr` sends at the rate that it last saw, so a connection that is left alone on a link fills it only slowly
# (docs/numbers.md).
CONGESTION = "reno"
_ENDING_SECONDS = 5.0


def _call(program: str, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=20)
    if done.returncode != 0:
        raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def ip(*arguments: str) -> str:
    """Calls the program `ip`; returns what it printed.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    return _call("ip", *arguments)


def _set_congestion(namespace: str) -> None:
    # Of the namespace in which it is opened; it holds for IPv6, too.
    text = f"echo {CONGESTION} > /proc/sys/net/ipv4/tcp_congestion_control"
    _call("ip", "netns", "exec", namespace, "sh", "-c", text)


def why_not(*, limits: bool = False) -> str:
    """The sentence why there can be no hosts here, or nothing.

    Arguments:
        limits: whether links are to be limited.
    """
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}."
    if os.geteuid() != 0:
        return "network namespaces need root."
    for program in ("ip", "tc", "unshare") if limits else ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"the program `{program}` is missing (iproute2, util-linux)."
    name = _tag() + "-try"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "bridge", "type", "bridge")
            _set_congestion(name)
            if limits:
                _call("tc", "-n", name, *_limit("lo", "1gbit"))
        finally:
            ip("netns", "delete", name)
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}."
    return ""


def remove_leftovers() -> None:
    """Removes namespaces whose makers have ended without doing so, and ends the processes in them."""
    for line in ip("netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{PREFIX}-") and not Path("/proc", name.split("-")[1]).exists():
            _end_processes(name)
            ip("netns", "delete", name)


def _tag() -> str:
    return f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"


def _limit(device: str, rate: str) -> list[str]:
    bucket = ["tbf", "rate", rate, "burst", BURST, "latency", QUEUE]
    return ["qdisc", "replace", "dev", device, "root", *bucket]


def _processes(namespace: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", namespace).split()]


def _end_processes(namespace: str) -> None:
    deadline = time.monotonic() + _ENDING_SECONDS
    while (pids := _processes(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


@final
class Hosts:
    """Some hosts and their links; a context manager. What is left in them at its end is killed.

    Arguments:
        ranks_per_host: how many ranks live on each host; they are numbered host by host.
        rate: of every link, in each direction, as `tc` writes it, such as `1gbit`; None = unlimited.
        own_cores: each host has an equal share of the cores for itself, if there are enough of them.

    Attributes:
        num_hosts, num_ranks: how many.
        host_of: by rank, the host it lives on.

    Raises:
        RuntimeError: namespaces or limits cannot be made; see `why_not`.
    """

    def __init__(self, ranks_per_host: Sequence[int], *, rate: str | None = None, own_cores: bool = False) -> None:
        self.ranks_per_host = tuple(ranks_per_host)
        self.num_hosts = len(self.ranks_per_host)
        self.host_of = [host for host, count in enumerate(self.ranks_per_host) for _ in range(count)]
        self.num_ranks = len(self.host_of)
        self._rate = rate
        self._own_cores = own_cores
        self._tag = _tag()
        self._switch = f"{self._tag}-switch"
        self._made: list[str] = []

    def __enter__(self) -> Hosts:
        remove_leftovers()
        try:
            self._make(self._switch)
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            for host in range(self.num_hosts):
                name, port = self.namespace(host), f"port{host}"
                self._make(name)
                end = ("peer", "name", port, "netns", self._switch)
                ip("-n", name, "link", "add", INTERFACE, "mtu", str(MTU), "type", "veth", *end)
                ip("-n", self._switch, "link", "set", port, "mtu", str(MTU), "master", "bridge")
                ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", INTERFACE, "up")
                _set_congestion(name)
                self.plug(host)
            ip("-n", self._switch, "link", "set", "bridge", "up")
            if self._rate is not None:
                self.limit(self._rate)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The devices go with the namespaces, and these with the last process in them.
        while self._made:
            name = self._made.pop()
            with contextlib.suppress(RuntimeError):
                _end_processes(name)
                ip("netns", "delete", name)

    def _make(self, name: str) -> None:
        ip("netns", "add", name)
        self._made.append(name)

    # -- links -----------------------------------------------------------------------------------------------------

    def namespace(self, host: int) -> str:
        """The name of a host's network namespace; `MOECOMM_HOST_ID` of what runs there, too."""
        return f"{self._tag}-{host}"

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return f"10.77.0.{host + 1}"

    def limit(self, rate: str | None) -> None:
        """Limits every link in each direction, or lifts the limits."""
        for host in range(self.num_hosts):
            for namespace, device in ((self.namespace(host), INTERFACE), (self._switch, f"port{host}")):
                if rate is not None:
                    _call("tc", "-n", namespace, *_limit(device, rate))
                elif self._rate is not None:
                    _call("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")
        self._rate = rate

    def plug(self, host: int) -> None:
        """Puts the host's cable in again."""
        ip("-n", self._switch, "link", "set", f"port{host}", "up")

    def unplug(self, host: int) -> None:
        """Pulls the host's cable; addresses, routes and connections stay."""
        ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def sent_bytes(self, host: int) -> int:
        """Bytes that have left the host so far, as its interface counts them."""
        file = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        # `ip netns exec` mounts the namespace's own /sys.
        return int(_call("ip", "netns", "exec", self.namespace(host), "cat", file))

    # -- processes ---------------------------------------------------------------------------------------------------

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Starts a program in a host, in a process group of its own.

        Arguments:
            host: where.
            command: the program and its arguments.
            env: variables in addition to this process's; those that tell hosts apart are set here.
            stdout, stderr: where its output goes, as `subprocess` has it; None = where that of this process goes.
            pass_fds: descriptors that it inherits.
        """
        return subprocess.Popen(
            [*self._enter(host), *command],
            env={**os.environ, **(env or {}), **self.environment(host)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )

    def _enter(self, host: int) -> list[str]:
        """Makes a program run in a host, under the host's own name."""
        rename = f'hostname host{host} && exec "$@"'
        command = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", "sh", "-c", rename, "sh"]
        cores = self.cores(host)
        return [*command, "taskset", "--cpu-list", ",".join(map(str, cores))] if cores else command

    def cores(self, host: int) -> list[int]:
        """The cores that the host has for itself; none: all hosts share all cores."""
        cores = sorted(os.sched_getaffinity(0)) if self._own_cores else []
        each = len(cores) // self.num_hosts
        return cores[host * each :][:each]

    def environment(self, host: int) -> dict[str, str]:
        """Variables of programs in a host."""
        paths = [*sys.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        return {
            "MOECOMM_HOST_ID": self.namespace(host),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "UCX_TLS": "tcp",
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
        }

    def torchrun(self, host: int, port: int, *program: str) -> list[str]:
        """The command that starts a host's ranks of a Python program; to be started on every host.

        Arguments:
            host: where it will be started.
            port: where the ranks meet on host 0.
            program: file or `-m`, module; then its arguments.
        """
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(self.num_hosts), "--nproc-per-node", str(self.ranks_per_host[host])),
            *("--node-rank", str(host), "--master-addr", self.address(0), "--master-port", str(port)),
            *program,
        ]

    def mpirun(self, directory: Path, port: int, *program: str) -> list[str]:
        """The command that starts the ranks of a Python program on all hosts by Open MPI; to be started on host 0.

        Arguments:
            directory: an empty one, where the script lies by which it enters the other hosts.
            port: where the ranks meet on host 0 for `torch.distributed`.
            program: file or `-m`, module; then its arguments.
        """
        agent = directory / "enter"
        lines = ["#!/bin/sh", "address=$1; shift", 'case "$address" in']
        for host in range(self.num_hosts):
            variables = [f"{name}={value}" for name, value in self.environment(host).items()]
            enter = shlex.join(["env", *variables, *self._enter(host), "sh", "-c"])
            lines.append(f'{self.address(host)}) exec {enter} "$*" ;;')
        lines += ['*) echo "no host $address" >&2; exit 1 ;;', "esac", ""]
        agent.write_text("\n".join(lines))
        agent.chmod(0o700)
        places = [f"{self.address(host)}:{count}" for host, count in enumerate(self.ranks_per_host)]
        settings = {
            "plm_rsh_agent": str(agent),
            "oob_tcp_if_include": INTERFACE,
            "btl_tcp_if_include": INTERFACE,
            "btl": "self,vader,tcp",
            "pml": "ob1",
            # All hosts share the cores of this machine.
            "mpi_yield_when_idle": "1",
        }
        return [
            *("mpirun", "--allow-run-as-root", "--bind-to", "none", "--host", ",".join(places)),
            *(text for name, value in settings.items() for text in ("--mca", name, value)),
            *("-x", f"MASTER_ADDR={self.address(0)}", "-x", f"MASTER_PORT={port}"),
            *(sys.executable, *program),
        ]

    def processes(self, host: int) -> list[int]:
        """Ids of the processes that run in a host."""
        return _processes(self.namespace(host))

    def kill(self, host: int) -> None:
        """Ends all processes of a host at once."""
        _end_processes(self.namespace(host))

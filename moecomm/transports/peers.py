"""Who the ranks are: facts about a process from which each transport can tell whether it reaches it."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import uuid
from pathlib import Path

from moecomm.devices.base import DeviceIdentity
from moecomm.groups import Group, LocalGroup, SoloGroup

__all__ = ["Peer", "gather_peers", "my_identity"]

_PROCESS_TOKEN = uuid.uuid4().hex
_token_lock = threading.Lock()
_token_pid = os.getpid()
_CPU = DeviceIdentity()


@dataclasses.dataclass(frozen=True)
class Peer:
    """One rank's identity.

    Attributes:
        rank: index in the group.
        pid: process id, as the process sees it.
        process: token that is unique to the process.
        host: token that is unique to the running kernel (boot id), so equal names on different hosts do not mislead;
            MOECOMM_HOST_ID overrides it, for containers of one machine that are to count as several hosts.
        pid_namespace: process ids mean the same within one.
        uid: user id.
        hostname: for messages.
        device_type: kind of device of the tensors it will pass.
        in_process: the group consists of threads of one process.
        ucx_problem: the sentence why UCX cannot be used in this process; empty if it can, or if nobody has looked
            because the ranks share a host.
        device: which device it is, and what that reaches.
        machine: token of the running kernel, whatever MOECOMM_HOST_ID says: ranks of one machine share its cores.
        nvshmem_problem: the sentence why NVSHMEM cannot be used in this process; empty if it can, or if nobody has
            looked because the tensors are not on CUDA.
    """

    rank: int
    pid: int
    process: str
    host: str
    pid_namespace: str
    uid: int
    hostname: str
    device_type: str
    in_process: bool
    ucx_problem: str = ""
    device: DeviceIdentity = _CPU
    machine: str = ""
    nvshmem_problem: str = ""


def _process_token() -> str:
    """A token for this process; a forked child gets its own."""
    global _PROCESS_TOKEN, _token_pid
    with _token_lock:
        if _token_pid != os.getpid():
            _PROCESS_TOKEN, _token_pid = uuid.uuid4().hex, os.getpid()
        return _PROCESS_TOKEN


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def my_identity(group: Group, device_type: str = "cpu", device: DeviceIdentity = _CPU) -> Peer:
    """This process as a member of `group`."""
    try:
        pid_namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        pid_namespace = ""
    machine = _read("/proc/sys/kernel/random/boot_id") or socket.gethostname()
    return Peer(
        rank=group.rank,
        pid=os.getpid(),
        process=_process_token(),
        host=os.environ.get("MOECOMM_HOST_ID") or machine,
        pid_namespace=pid_namespace,
        uid=os.getuid(),
        hostname=socket.gethostname(),
        device_type=device_type,
        in_process=isinstance(group, (LocalGroup, SoloGroup)),
        device=device,
        machine=machine,
    )


def gather_peers(group: Group, device_type: str = "cpu", device: DeviceIdentity = _CPU) -> list[Peer]:
    """Every rank's identity, by rank. Collective."""
    me = my_identity(group, device_type, device)
    peers: list[Peer] = group.all_gather(me)
    if len({(peer.host, peer.pid_namespace, peer.uid) for peer in peers}) > 1:
        # All must know who has UCX, to choose alike. Where shared memory reaches, it is not even loaded.
        from moecomm.transports.ucx_library import find_library

        me = dataclasses.replace(me, ucx_problem=find_library().problem)
        peers = group.all_gather(me)
    if device_type == "cuda":
        from moecomm.transports import nvshmem_engine

        peers = group.all_gather(dataclasses.replace(me, nvshmem_problem=nvshmem_engine.problem_here()))
    return peers

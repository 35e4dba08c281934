"""Transport `shm`: processes of one host. Anonymous files (memfd) mapped by everybody; futex waits.

Nothing has a name: when the last process ends, however it ends, the memory is gone. /dev/shm is not used, so its size
does not matter.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

from moecomm import _C
from moecomm.errors import TransportUnavailable
from moecomm.transports.addressable import AddressableTransport
from moecomm.transports.base import Capabilities
from moecomm.transports.peers import Peer

__all__ = ["ShmTransport"]


class ShmTransport(AddressableTransport):
    """Processes of one host, CPU tensors."""

    name = "shm"
    capabilities = Capabilities(device_types=("cpu",), addressable=True)

    @classmethod
    def probe(cls, me: Peer, peers: Sequence[Peer]) -> list[str | None]:
        return [cls._refusal(me, peer) for peer in peers]

    @staticmethod
    def _refusal(me: Peer, peer: Peer) -> str | None:
        who = f"rank {peer.rank} (pid {peer.pid} on {peer.hostname})"
        if not sys.platform.startswith("linux"):
            return f"shared memory without a name (memfd) needs Linux, this is {sys.platform}."
        if peer.host != me.host:
            return f"{who} runs on another host than rank {me.rank} ({me.hostname})."
        if peer.pid_namespace != me.pid_namespace:
            return f"{who} is in another process namespace (container) than rank {me.rank}."
        if peer.uid != me.uid and me.uid != 0:
            return f"{who} belongs to user {peer.uid}, rank {me.rank} to user {me.uid}."
        if peer.rank != me.rank and peer.process == me.process:
            return f"{who} is a thread of the same process."
        return None

    @classmethod
    def remedy(cls) -> str:
        return "Run all ranks as processes of one user, on one host and in one container, on Linux."

    def _map(self, nbytes: int) -> list[_C.Mapping]:
        own, no_memory = None, ""
        try:
            own = _C.Mapping.create_shared("moecomm", nbytes)
        except OSError as error:
            no_memory = self.refused(nbytes, error)
        offers = self.group.all_gather((no_memory, own.fd if own else -1))
        no_memory = next((text for text, _ in offers if text), "")
        if own is None or no_memory:
            raise self.no_memory(no_memory)
        mappings, problem, no_memory = [], "", ""
        for rank, (_, fd) in enumerate(offers):
            try:
                pid = self.peers[rank].pid
                mappings.append(own if rank == self.rank else _C.Mapping.open_peer(pid, fd, nbytes))
            except OSError as error:
                no_memory = self.refused(nbytes, error) if error.errno == errno.ENOMEM else no_memory
                problem = f"rank {self.rank} cannot map the memory of rank {rank}: {error}."
                break
        # Nobody lets go of the descriptor before everybody has opened it, and all succeed or all refuse.
        outcomes = [outcome for outcome in self.group.all_gather((problem, no_memory)) if outcome[0]]
        own.close_fd()
        for problem, no_memory in outcomes:
            raise self.no_memory(no_memory) if no_memory else TransportUnavailable(self.name, problem, self.remedy())
        return mappings

    def _pids(self) -> list[int]:
        return [0 if peer.rank == self.rank else peer.pid for peer in self.peers]

"""Transport `shm`: processes of one host. Anonymous files (memfd) mapped by everybody; futex waits.

Nothing has a name: when the last process ends, however it ends, the memory is gone. /dev/shm is not used, so its size
does not matter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moecomm import _C
from moecomm.transports.addressable import AddressableTransport
from moecomm.transports.base import Capabilities
from moecomm.transports.peers import Peer
from moecomm.transports.shared_memory import map_shared

__all__ = ["ShmTransport"]


class ShmTransport(AddressableTransport):
    """Processes of one host, CPU tensors."""

    name = "shm"
    capabilities = Capabilities(device_types=("cpu",), addressable=True)

    @classmethod
    def probe(cls, me: Peer, peers: Sequence[Peer]) -> list[str | None]:
        return [cls.refusal(me, peer) for peer in peers]

    @staticmethod
    def refusal(me: Peer, peer: Peer) -> str | None:
        """The sentence why one rank cannot open another one's memory, or None."""
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
        mappings = map_shared(self, nbytes, range(self.num_ranks))
        return [mapping for mapping in mappings if mapping is not None]

    def _pids(self) -> list[int]:
        return [0 if peer.rank == self.rank else peer.pid for peer in self.peers]

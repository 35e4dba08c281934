"""Transports whose peers have no addresses, made from those that have: what is put arrives as late as it may."""

import ctypes

from moecomm.transports.base import Capabilities
from moecomm.transports.local import LocalTransport

PATHS = {
    "far-local": "far_transports:FarLocalTransport",
    "pairs-local": "far_transports:PairsLocalTransport",
}


class _Far:
    """Puts wait here until a signal to the same rank, before which they must arrive; then they arrive in reverse order.

    Ranks in the same part of `domain_size` ranks keep their addresses.
    """

    domain_size = 1

    def __init__(self, *arguments):
        self._late = {}
        super().__init__(*arguments)

    def _is_far(self, rank):
        return rank != self.rank and rank // self.domain_size != self.rank // self.domain_size

    def peer(self, region, rank):
        return None if self._is_far(rank) else super().peer(region, rank)

    def put(self, region, offset, address, nbytes, rank):
        if not 0 <= offset <= region.nbytes - nbytes:
            raise ValueError(f"put: [{offset}, {offset + nbytes}) is outside the region of {region.nbytes} bytes")
        self._late.setdefault(rank, []).append((region, offset, ctypes.string_at(address, nbytes)))

    def signal(self, rank, slot, n=1):
        for region, offset, data in reversed(self._late.pop(rank, [])):
            ctypes.memmove(self.addresses(region)[rank] + offset, data, len(data))
        super().signal(rank, slot, n)

    def post(self, region, offset, address, nbytes, slot, n, ranks=None):
        for rank in self._everyone() if ranks is None else ranks:
            self.put(region, offset, address, nbytes, rank)
            self.signal(rank, slot, n)

    def signal_all(self, slot, n):
        for rank in self._everyone():
            self.signal(rank, slot, n)


class FarLocalTransport(_Far, LocalTransport):
    name = "far-local"
    capabilities = Capabilities(device_types=("cpu",), addressable=False)


class PairsLocalTransport(FarLocalTransport):
    """Two neighbours can address each other, as on hosts of two ranks."""

    name = "pairs-local"
    domain_size = 2

"""Worlds whose ranks put one-sided, whatever the wire; support for tests of transport `ucx`.

Where the wire is TCP, or memory that UCX has not made, UCX carries such puts in messages of its own. They come as late,
and in as little order, as those of a network card.
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass

from moecomm.testing.contracts import World
from moecomm.transports.ucx import UcxTransport

WIRES = {
    "tcp": {"UCX_TLS": "tcp"},
    # Endpoints that must see a peer die do not use shared memory unless they are told.
    "posix": {"UCX_TLS": "posix,self", "UCX_POSIX_ERROR_HANDLING": "y"},
}


@contextmanager
def wire(name, one_sided=True, least_bytes=1):
    """Transports `ucx` made inside use that wire and put so."""
    before = UcxTransport.one_sided, UcxTransport.one_sided_bytes
    os.environ.update(WIRES[name])
    UcxTransport.one_sided, UcxTransport.one_sided_bytes = one_sided, least_bytes
    try:
        yield
    finally:
        UcxTransport.one_sided, UcxTransport.one_sided_bytes = before
        for variable in WIRES[name]:
            del os.environ[variable]


class OneSided:
    """A function of a rank, called with transports that put one-sided over a wire."""

    def __init__(self, fn, name, least_bytes=1):
        self.fn, self.name, self.least_bytes = fn, name, least_bytes

    def __call__(self, group, *arguments):
        with wire(self.name, least_bytes=self.least_bytes):
            return self.fn(group, *arguments)


@dataclass(frozen=True)
class OneSidedWorld(World):
    """Processes that put every byte one-sided."""

    wire: str = "tcp"

    def run(self, fn, num_ranks, *args, return_exceptions=False):
        return super().run(OneSided(fn, self.wire), num_ranks, *args, return_exceptions=return_exceptions)

    def __str__(self):
        return f"{self.transport}-one-sided-{self.wire}"

"""Worlds whose ranks believe to be on several hosts; support for tests of transports that tell hosts apart."""

import os
from dataclasses import dataclass

from moecomm.testing.contracts import World
from moecomm.transports.ucx_library import find_library


class OnHosts:
    """A function of a rank, called with ranks spread over hosts of `per_host` ranks."""

    def __init__(self, fn, per_host):
        self.fn = fn
        self.per_host = per_host

    def __call__(self, group, *arguments):
        os.environ["MOECOMM_HOST_ID"] = f"host {group.rank // self.per_host}"
        try:
            return self.fn(group, *arguments)
        finally:
            del os.environ["MOECOMM_HOST_ID"]


@dataclass(frozen=True)
class HostsWorld(World):
    """Processes on hosts of `per_host` ranks each; the last may have fewer."""

    per_host: int = 2

    def run(self, fn, num_ranks, *args, return_exceptions=False):
        return super().run(OnHosts(fn, self.per_host), num_ranks, *args, return_exceptions=return_exceptions)

    def __str__(self):
        return f"{self.transport}-hosts-of-{self.per_host}"


def why_not_ucx():
    """Why UCX cannot be used here, or an empty text."""
    return find_library().problem

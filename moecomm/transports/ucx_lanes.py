"""Which transports of UCX write to a peer's memory by themselves: a pure decision by names."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["is_one_sided"]

# Those whose hardware, or kernel, writes without the peer's doing. Not here: tcp and ud_*, over which UCX sends
# messages of its own, and posix and sysv, which reach only memory that UCX itself has made.
_ONE_SIDED = frozenset({"rc_verbs", "rc_mlx5", "dc_mlx5", "srd", "ugni_rdma", "cma", "knem", "xpmem"})


def is_one_sided(lanes: Collection[str]) -> bool:
    """Whether large puts are better one-sided than as messages.

    Arguments:
        lanes: names, as UCX calls them, of the transports that carry what goes to one peer.
    """
    return not _ONE_SIDED.isdisjoint(lanes)

"""Bytes that leave hosts in one operation: what moecomm's counters say, and what the interfaces saw.

Linux counts what passes an interface as packets are handed to it, headers included; large packets that TCP has not cut
yet count one header. What bypasses the kernel (RDMA) is not seen there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moecomm.bench.barrier import Barrier

__all__ = ["Traffic", "count_traffic", "interfaces", "sent_by_interfaces"]

_INTERFACES = Path("/sys/class/net")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank.

    Attributes:
        sent: payload put to ranks of other hosts.
        forwarded: payload passed on inside the host for ranks of others.
    """

    sent: int
    forwarded: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent - earlier.sent, self.forwarded - earlier.forwarded)


def interfaces(root: Path = _INTERFACES) -> list[Path]:
    """Interfaces that lead out of this host: network cards, and where there are none all but loopback."""
    found = sorted(path for path in root.glob("*") if path.name != "lo") if root.is_dir() else []
    cards = [path for path in found if (path / "device").exists()]
    return cards or found


def sent_by_interfaces(root: Path = _INTERFACES) -> int | None:
    """Bytes that this host has sent so far, None where nobody counts them."""
    counters = [path / "statistics" / "tx_bytes" for path in interfaces(root)]
    values = [int(path.read_text()) for path in counters if path.is_file()]
    return sum(values) if values else None


def count_traffic(
    operation: Callable[[], object], barrier: Barrier, counters: Callable[[], Traffic | None]
) -> dict[str, int | None]:
    """Bytes of one operation on this rank; all ranks call this together.

    Arguments:
        operation: carries rows; is called once.
        barrier: over all ranks; its own signals are counted by the interfaces, too.
        counters: of the backend, as they are; None where it does not count.

    Returns:
        `sent`, `forwarded` of this rank, `wire` of its host; None where it is not known.
    """
    before = counters()
    barrier.wait()
    wire_before = sent_by_interfaces()
    barrier.wait()
    operation()
    barrier.wait()
    wire = sent_by_interfaces()
    barrier.wait()
    after = counters()
    moved = None if before is None or after is None else after - before
    return {
        "sent": None if moved is None else moved.sent,
        "forwarded": None if moved is None else moved.forwarded,
        "wire": None if wire is None or wire_before is None else wire - wire_before,
    }

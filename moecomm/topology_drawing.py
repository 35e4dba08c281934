"""The drawing of a topology in plain text: a line per domain (or per host of one), a column per local index."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from moecomm.topology import Topology

__all__ = ["draw_topology"]

_NARROWEST = 40
_SHORTEST_NAME = 8
_MOST_COLUMNS = 16
_TITLE = "local index"


class _Line(NamedTuple):
    """Ranks of one domain on one host, of consecutive local indices."""

    domain: int
    host: int
    first: int  # local index
    cells: list[str]


def draw_topology(topology: Topology, width: int = 80) -> str:
    """Draws hosts, domains, ranks, local indices and rails.

    Arguments:
        topology: what to draw.
        width: columns that the text may take; below 40 counts as 40.

    Returns:
        Lines joined by line breaks, ASCII but for the names of hosts, no trailing blanks.
    """
    width = max(width, _NARROWEST)
    largest = max(len(topology.ranks_in(domain)) for domain in range(topology.num_domains))
    cell = len(str(topology.num_ranks - 1)) + 2
    domain_width = len(f"domain {topology.num_domains - 1}")
    spans_hosts = len(set(zip(topology.domain_of, topology.host_of, strict=True))) > topology.num_domains
    # Lines that do not begin with local index 0 say with which, as "+4"; where there are any, they need room.
    for room in (0, len(str(largest)) + 3):
        hosts = _host_labels(topology, width - domain_width - 3 - room - min(largest, 8) * cell)
        left = max(len(_TITLE) + 1, domain_width + 2 + max(map(len, hosts)) + room + 1)
        columns = _num_columns(largest, (width - left) // cell)
        if largest <= columns and not spans_hosts:
            break
    lines = [line for domain in range(topology.num_domains) for line in _lines(topology, domain, columns, largest)]
    shown = max(len(line.cells) for line in lines)
    text = [*_summary(topology, width), ""]
    text.append(_TITLE.ljust(left) + "".join(f"{column} ".rjust(cell) for column in range(shown)))
    before = None
    for line in lines:
        is_new = before is None or before.domain != line.domain
        domain = f"domain {line.domain}" if is_new else ""
        host = hosts[line.host] if before is None or is_new or before.host != line.host else ""
        offset = f"+{line.first} " if line.first else ""
        head = f"{domain.ljust(domain_width)}  {host}".ljust(left - len(offset)) + offset
        text.append(head + "".join(one.rjust(cell) for one in line.cells))
        before = line
    text += ["", *_explained(topology, columns, largest, width)]
    return "\n".join(line.rstrip() for line in text).rstrip()


def _host_labels(topology: Topology, room: int) -> list[str]:
    labels = [f"host {host}" for host in range(topology.num_hosts)]
    if not topology.host_names:
        return labels
    longest = max(_SHORTEST_NAME, room - max(map(len, labels)) - 2)
    names = [name if len(name) <= longest else name[: longest - 3] + "..." for name in topology.host_names]
    return [f"{label}  {name}" for label, name in zip(labels, names, strict=True)]


def _num_columns(largest: int, most: int) -> int:
    """Columns of ranks: all if they fit, else a power of two, which hosts and racks are counted in."""
    most = max(1, min(_MOST_COLUMNS, most))
    return largest if largest <= most else 1 << (most.bit_length() - 1)


def _lines(topology: Topology, domain: int, columns: int, largest: int) -> list[_Line]:
    """The lines of a domain; where the largest fits on one, smaller ones show who serves the indices they lack."""
    ranks = topology.ranks_in(domain)
    lines: list[_Line] = []
    for index, rank in enumerate(ranks):
        host = topology.host_of[rank]
        if not lines or lines[-1].host != host or len(lines[-1].cells) == columns:
            lines.append(_Line(domain, host, index, []))
        lines[-1].cells.append(f"{rank} ")
    if len(lines) == 1 and largest <= columns:
        lines[0].cells.extend(f"({ranks[index % len(ranks)]})" for index in range(len(ranks), largest))
    return lines


def _summary(topology: Topology, width: int) -> list[str]:
    counts = [(topology.num_ranks, "rank"), (topology.num_hosts, "host"), (topology.num_domains, "domain")]
    ranks, hosts, domains = (f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)
    return textwrap.wrap(f"{ranks} on {hosts}; {domains} of ranks that address each other's memory.", width)


def _explained(topology: Topology, columns: int, largest: int, width: int) -> list[str]:
    if topology.num_ranks == 1:
        return []
    if topology.num_domains == 1:
        return ["One domain: there are no rails."]
    text = "Rails: what a rank sends to another domain goes to the rank of its own local index there."
    smallest = min(len(topology.ranks_in(domain)) for domain in range(topology.num_domains))
    if smallest < largest:
        brackets = " (in brackets)" if largest <= columns else ""
        text += f" Where a domain has fewer ranks, they serve the further indices in turn{brackets}."
    return textwrap.wrap(text, width)

"""Topology: on which hosts the ranks are, which of them address each other's memory, and which rails join the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from moecomm.topology_drawing import draw_topology

__all__ = ["Topology"]


@dataclasses.dataclass(frozen=True)
class Topology:
    """Where the ranks are.

    A *domain* is a set of ranks that address each other's memory: by shared memory on CPU, by NVLink on GPU. It may be
    a host, part of one (containers), or span hosts (72 GPUs behind one switch). What travels to another domain goes to
    one of its ranks: the *rail* of its sender there.

    Two topologies are equal if hosts and domains are; names do not count.

    Arguments:
        host_of: per rank the number of its host; hosts are numbered by their first rank: 0, 1, ...
        domain_of: per rank the number of its domain, numbered the same way.
        host_names: per host a name for messages; empty: host 0, host 1, ...

    Raises:
        ValueError: there is no rank; lengths that differ; numbers that are no integers or not in order of first use.
    """

    host_of: tuple[int, ...]
    domain_of: tuple[int, ...]
    host_names: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("host_of", "domain_of"):
            object.__setattr__(self, name, _numbered(name, getattr(self, name)))
        if len(self.domain_of) != len(self.host_of):
            raise ValueError(
                f"domain_of and host_of must have one entry per rank each, got {len(self.domain_of)} and "
                f"{len(self.host_of)}"
            )
        given: Any = self.host_names
        if isinstance(given, str) or not all(isinstance(name, str) for name in given):
            raise ValueError(f"host_names must be texts, one per host, got {given!r}")
        names: tuple[str, ...] = tuple(given)
        if names and len(names) != self.num_hosts:
            raise ValueError(f"host_names must have one entry per host, got {len(names)} for {self.num_hosts} hosts")
        object.__setattr__(self, "host_names", names)

    @classmethod
    def grid(cls, *ranks_per_host: int) -> Topology:
        """Ranks in order, one domain per host: `grid(2, 2)`, or uneven, `grid(3, 1)`.

        Raises:
            ValueError: no host, or one without ranks.
        """
        host_of = _repeated("ranks_per_host", ranks_per_host)
        return cls(host_of, host_of)

    @classmethod
    def of_domains(cls, *ranks_per_domain: int, ranks_per_host: int) -> Topology:
        """Ranks in order, hosts of equal size (the last may be smaller): `of_domains(72, ranks_per_host=4)`.

        Raises:
            ValueError: no domain, or a size below 1.
        """
        domain_of = _repeated("ranks_per_domain", ranks_per_domain)
        _check_size("ranks_per_host", ranks_per_host)
        return cls(tuple(rank // ranks_per_host for rank in range(len(domain_of))), domain_of)

    @property
    def num_ranks(self) -> int:
        """R: ranks over all hosts."""
        return len(self.host_of)

    @property
    def num_hosts(self) -> int:
        """Hosts with at least one rank."""
        return len(self._ranks_on)

    @property
    def num_domains(self) -> int:
        """Domains; 1 where all ranks address each other."""
        return len(self._ranks_in)

    def ranks_in(self, domain: int) -> tuple[int, ...]:
        """The ranks of a domain, ascending."""
        return self._ranks_in[_in_range("domain", domain, self.num_domains)]

    def ranks_on(self, host: int) -> tuple[int, ...]:
        """The ranks of a host, ascending."""
        return self._ranks_on[_in_range("host", host, self.num_hosts)]

    def local_index(self, rank: int) -> int:
        """The index of `rank` among the ranks of its domain."""
        return self._local_index[_in_range("rank", rank, self.num_ranks)]

    def rail(self, rank: int, domain: int) -> int:
        """The rank of `domain` that serves `rank`: of the same local index, modulo the size of the domain.

        Smaller domains so share their ranks among those of a larger one as evenly as can be. In its own domain a rank
        serves itself.
        """
        there = self.ranks_in(domain)
        return there[self.local_index(rank) % len(there)]

    def rail_sources(self, rank: int) -> tuple[int, ...]:
        """The ranks of other domains whose rail into the domain of `rank` is `rank`, ascending."""
        return self._rail_sources[_in_range("rank", rank, self.num_ranks)]

    def host_name(self, host: int) -> str:
        """The name of a host for messages; `host 0` where it has none."""
        _in_range("host", host, self.num_hosts)
        return self.host_names[host] if self.host_names else f"host {host}"

    def __str__(self) -> str:
        """A drawing in plain text, 80 columns wide: hosts, domains, ranks, local indices, rails."""
        return draw_topology(self)

    @cached_property
    def _ranks_in(self) -> tuple[tuple[int, ...], ...]:
        return _members(self.domain_of)

    @cached_property
    def _ranks_on(self) -> tuple[tuple[int, ...], ...]:
        return _members(self.host_of)

    @cached_property
    def _local_index(self) -> tuple[int, ...]:
        index = {rank: i for ranks in self._ranks_in for i, rank in enumerate(ranks)}
        return tuple(index[rank] for rank in range(self.num_ranks))

    @cached_property
    def _rail_sources(self) -> tuple[tuple[int, ...], ...]:
        sources: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for rank, home in enumerate(self.domain_of):
            for domain in range(self.num_domains):
                if domain != home:
                    sources[self.rail(rank, domain)].append(rank)
        return tuple(map(tuple, sources))


def _numbered(name: str, numbers: Sequence[int]) -> tuple[int, ...]:
    """The numbers as a tuple, once they are known to be integers that count up from 0 in order of first use."""
    found = tuple(numbers)
    if not found:
        raise ValueError(f"{name} must name at least one rank, got none")
    used = 0
    for rank, number in enumerate(found):
        if type(number) is not int:
            raise ValueError(f"{name}: rank {rank} has {number!r}, which is no int")
        if not 0 <= number <= used:
            raise ValueError(
                f"{name} must be numbered 0, 1, ... by first rank: rank {rank} has {number}, where at most {used} can "
                "stand"
            )
        used = max(used, number + 1)
    return found


def _members(numbers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Per number the ranks that have it, ascending."""
    members: list[list[int]] = [[] for _ in range(max(numbers) + 1)]
    for rank, number in enumerate(numbers):
        members[number].append(rank)
    return tuple(map(tuple, members))


def _repeated(name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not sizes:
        raise ValueError(f"{name} must have at least one entry, got none")
    for size in sizes:
        _check_size(name, size)
    return tuple(number for number, size in enumerate(sizes) for _ in range(size))


def _check_size(name: str, size: int) -> None:
    if type(size) is not int or size < 1:
        raise ValueError(f"{name} must be integers of at least 1, got {size!r}")


def _in_range(name: str, number: int, end: int) -> int:
    if not 0 <= number < end:
        raise ValueError(f"{name} must be in [0, {end}), got {number}")
    return number

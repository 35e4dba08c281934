"""What one run of the benchmark measures: sizes, routing, who takes part, and how long it may take."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from moecomm.algorithms.registry import exchange_names
from moecomm.codecs.registry import codec_names
from moecomm.topology import Topology

__all__ = ["DTYPES", "MODES", "ROUTINGS", "BenchConfig", "Routing", "parse_routing", "parse_tokens"]

# Bytes per element of the row types that can be combined.
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
MODES = ("throughput", "low_latency")

# Name -> what it means; the parameter it takes after a colon: its default (None = takes none), lowest and highest.
ROUTINGS: dict[str, tuple[str, float | None, float, float]] = {
    "uniform": ("every token's experts drawn evenly", None, 0.0, 0.0),
    "zipf": ("few popular experts; the parameter is the load of the busiest expert over the mean load", 1.5, 1.0, 1e6),
    "hot": ("every token chooses expert 0, and others evenly", None, 0.0, 0.0),
    "masked": ("uniform, with this share of the routes replaced by -1", 0.3, 0.0, 1.0),
    "limited": ("every token's experts drawn evenly from those of so many hosts, drawn evenly", 1.0, 1.0, 1e6),
}


@dataclass(frozen=True)
class Routing:
    """A kind of routing and its parameter (`None` where the kind takes none)."""

    kind: str
    parameter: float | None = None

    def __str__(self) -> str:
        return self.kind if self.parameter is None else f"{self.kind}:{self.parameter:g}"


def parse_routing(text: str) -> Routing:
    """Read `uniform`, `zipf:1.5`, `hot`, `masked:0.3` or `limited:1`; a parameter left out has its default.

    Raises:
        ValueError: unknown kind, a parameter where none is taken, or one that is no number or out of range.
    """
    kind, colon, rest = text.partition(":")
    if kind not in ROUTINGS:
        raise ValueError(f"routing {text!r} is unknown; available: {', '.join(sorted(ROUTINGS))}")
    _, default, lowest, highest = ROUTINGS[kind]
    if default is None:
        if colon:
            raise ValueError(f"routing {kind!r} takes no parameter, got {text!r}")
        return Routing(kind)
    if not colon:
        return Routing(kind, default)
    try:
        value = float(rest)
    except ValueError:
        raise ValueError(f"the parameter of routing {text!r} is not a number") from None
    if not lowest <= value <= highest:
        raise ValueError(f"the parameter of routing {text!r} must be from {lowest:g} to {highest:g}, got {value:g}")
    if kind == "limited" and value != int(value):
        raise ValueError(f"the parameter of routing {text!r} must be a whole number of hosts")
    return Routing(kind, value)


def parse_tokens(text: str) -> tuple[int, ...]:
    """Read `4096` or a list such as `1,8,32`: tokens per rank, each at least 1.

    Raises:
        ValueError: an item that is not a whole number, or less than 1.
    """
    items = []
    for item in text.split(","):
        try:
            value = int(item)
        except ValueError:
            raise ValueError(f"tokens {text!r}: {item!r} is not a whole number") from None
        if value < 1:
            raise ValueError(f"tokens {text!r}: each must be at least 1, got {value}")
        items.append(value)
    return tuple(items)


@dataclass(frozen=True)
class BenchConfig:
    """One run of the benchmark.

    Arguments:
        ranks: processes that exchange rows.
        tokens: tokens per rank; one case is measured for each number.
        hidden: elements per row.
        experts: experts over all ranks.
        topk: experts per token.
        dtype: of the rows; a key of `DTYPES`.
        mode: of our dispatch; one of `MODES`.
        transport, codec: of our communicator.
        routing: how experts are chosen.
        backends: who takes part, in the order of the turns: `moecomm`, `gloo`, `mpi`, `throughput` (moecomm in that
            mode, to compare its low-latency mode with), `direct`, `hierarchical` and `per_host` (moecomm with that
            algorithm, or that sum, between hosts), or `module:Class` of a dispatcher of your own (see
            `moecomm.bench.dispatchers`).
        competitors: `framework` = competitors written as frameworks write them; `tuned` = with reused buffers and the
            fastest reduction that torch alone gives.
        check: hold the answers of all backends to the oracle.
        bound: measure the memory bound.
        iterations: at most so many timed iterations per case; `None` = as many as `seconds` allow.
        warmup: untimed iterations before them.
        seconds: time budget of the whole run's timed parts, divided evenly among the cases.
        threads: torch threads per rank; `None` = cores / ranks, at least 1.
        seed: of rows, weights and routing.
        timeout: seconds after which a run that has not ended is ended with an error.
        host_of: by rank, the number of the host it lives on, from 0; empty = not known, taken for one host.
    """

    ranks: int = 2
    tokens: tuple[int, ...] = (4096,)
    hidden: int = 7168
    experts: int = 256
    topk: int = 8
    dtype: str = "bfloat16"
    mode: str = "throughput"
    transport: str = "auto"
    codec: str = "none"
    routing: Routing = dataclasses.field(default_factory=lambda: Routing("uniform"))
    backends: tuple[str, ...] = ("moecomm",)
    competitors: str = "framework"
    check: bool = True
    bound: bool = True
    iterations: int | None = None
    warmup: int = 1
    seconds: float = 30.0
    threads: int | None = None
    seed: int = 0
    timeout: float = 900.0
    host_of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        at_least_one = (("ranks", self.ranks), ("hidden", self.hidden), ("experts", self.experts), ("topk", self.topk))
        for name, value in at_least_one:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError(f"tokens must be one or more numbers of at least 1, got {self.tokens}")
        for name, text, allowed in (
            ("dtype", self.dtype, tuple(DTYPES)),
            ("mode", self.mode, MODES),
            ("transport", self.transport, exchange_names()),
            ("codec", self.codec, codec_names()),
            ("competitors", self.competitors, ("framework", "tuned")),
        ):
            if text not in allowed:
                raise ValueError(f"{name} {text!r} is unknown; available: {', '.join(allowed)}")
        if not self.backends or len(set(self.backends)) != len(self.backends):
            raise ValueError(f"backends must be one or more different names, got {self.backends}")
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0, got {self.warmup}")
        if self.seconds <= 0 or self.timeout <= 0:
            raise ValueError(f"seconds and timeout must be positive, got {self.seconds} and {self.timeout}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if self.host_of and len(self.host_of) != self.ranks:
            raise ValueError(f"host_of must have one entry for each of {self.ranks} ranks, got {self.host_of}")
        num_hosts = self.topology.num_hosts
        if self.host_of and self.routing.kind == "limited" and int(self.routing.parameter or 1) > num_hosts:
            raise ValueError(f"routing {self.routing} wants more hosts per token than the {num_hosts} there are")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.hidden * DTYPES[self.dtype]

    @property
    def topology(self) -> Topology:
        """On which hosts the ranks are; a host counts as one domain."""
        host_of = self.host_of or (0,) * self.ranks
        return Topology(host_of, host_of)

    @property
    def torch_threads(self) -> int:
        """Threads of torch per rank: as configured, or an equal share of a host's cores, at least 1."""
        topology = self.topology
        most = max(len(topology.ranks_on(host)) for host in range(topology.num_hosts))
        return self.threads or max(1, len(os.sched_getaffinity(0)) // most)

    def as_dict(self) -> dict[str, Any]:
        """The configuration as plain values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BenchConfig:
        """The reverse of `as_dict`, also after a trip through JSON."""
        fields = dict(values)
        fields["routing"] = Routing(**fields["routing"])
        fields["tokens"] = tuple(fields["tokens"])
        fields["backends"] = tuple(fields["backends"])
        fields["host_of"] = tuple(fields["host_of"])
        return cls(**fields)

"""From what the ranks left to records: one per case, operation and backend; the objects of `--json`.

Bytes of a record (its payload):

    dispatch   rows that a rank receives, one per route (expert-major), its own included, x row bytes
    combine    rows that come back to a rank, one per route of its tokens, x row bytes
    pair       the sum of both

of the rank that has most. GB/s = bytes / median time of the slowest rank, 1 GB = 1e9 bytes.

In low-latency mode the floor of dispatch and combine is one one-way signal and the memory bound; of the pair, both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moecomm.bench.config import BenchConfig
from moecomm.bench.hops import Hops, make_hops
from moecomm.bench.measure import BOUND, IDLE, OPS, SIGNAL
from moecomm.bench.statistics import Summary, summarise

__all__ = ["Record", "as_json", "make_records"]

# One-way signals that an operation cannot do without.
_NUM_SIGNALS = {"dispatch": 1, "combine": 1, "pair": 2}


@dataclass(frozen=True)
class Record:
    """One line of the table.

    Arguments:
        op: `dispatch`, `combine` or `pair`.
        backend: who did it; transport, codec, layout: how.
        tokens: per rank.
        summary: the times.
        bytes: payload as stated on top; local_bytes: the part of it that a rank sends to itself.
        bound_us: median time of the memory bound, `None` if it was not measured.
        floor_us: low latency: what no exchange can be faster than, see floor.py; `None` if it was not measured.
        signal_us: low latency: one one-way signal, which is part of the floor.
        python_us: low latency: moecomm's own time per operation, without peers and rows.
        idle: low latency: times of the idle loop that lasts as long as moecomm's pair.
        ratio: this backend's median over moecomm's, `None` if moecomm took no part.
        wrong: wrong elements over all ranks and checks, `None` if nothing was checked.
        memory: most bytes of receive memory that a rank has touched, in this case or before, where the backend knows.
        hops: what crossed between hosts; None on one host.
    """

    op: str
    backend: str
    transport: str
    codec: str
    layout: str
    tokens: int
    summary: Summary
    bytes: int
    local_bytes: int
    bound_us: float | None
    floor_us: float | None
    signal_us: float | None
    python_us: float | None
    idle: Summary | None
    ratio: float | None
    wrong: int | None
    memory: int | None
    hops: Hops | None = None

    @property
    def gbps(self) -> float:
        """Payload per time, in 1e9 bytes per second."""
        return self.bytes / 1e3 / self.summary.median_us

    @property
    def bound_gbps(self) -> float | None:
        """Payload per time of the memory bound, in 1e9 bytes per second."""
        return None if self.bound_us is None else self.bytes / 1e3 / self.bound_us

    @property
    def bound_fraction(self) -> float | None:
        """The time of the memory bound over the time taken: 1 = as fast as memory allows."""
        return None if self.bound_us is None else self.bound_us / self.summary.median_us

    @property
    def floor_ratio(self) -> float | None:
        """The time taken over the floor: 1 = nothing but the signals and the bytes."""
        return None if self.floor_us is None else self.summary.median_us / self.floor_us


def make_records(config: BenchConfig, results: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Reduce the results of all ranks.

    Arguments:
        config: the run.
        results: by rank, what `moecomm.bench.launch.run_ranks` returned.

    Returns:
        Records by case, then operation, then backend in the order of `config.backends`.
    """
    records = []
    for index, tokens in enumerate(config.tokens):
        cases = [result["cases"][index] for result in results]
        bounds = _bounds(cases) if config.bound else {}
        signal = _median_us(cases, SIGNAL, "one_way")
        idle = summarise([case["nanoseconds"][IDLE]["pair"] for case in cases]) if _has(cases, IDLE) else None
        payloads = [_payload(config, case["payload"]) for case in cases]
        for op in OPS:
            ours: float | None = None
            summaries = {
                about["name"]: summarise([case["nanoseconds"][about["name"]][op] for case in cases])
                for about in results[0]["backends"]
            }
            if "moecomm" in summaries:
                ours = summaries["moecomm"].median_us
            # The rank with most bytes, and the local part of that same rank.
            largest = max(payloads, key=lambda payload: payload[op][0])[op]
            for about in results[0]["backends"]:
                name = about["name"]
                records.append(
                    Record(
                        op=op,
                        backend=name,
                        transport=about["transport"],
                        codec=about["codec"],
                        layout=about["layout"],
                        tokens=tokens,
                        summary=summaries[name],
                        bytes=largest[0],
                        local_bytes=largest[1],
                        bound_us=bounds.get(op),
                        floor_us=None if signal is None else bounds[op] + signal * _NUM_SIGNALS[op],
                        signal_us=signal,
                        python_us=_python_us(results, op),
                        idle=idle,
                        ratio=None if ours is None else summaries[name].median_us / ours,
                        wrong=sum(case["wrong"][name][op] for case in cases) if config.check else None,
                        memory=max((case["memory"][name] for case in cases if name in case["memory"]), default=None),
                        hops=make_hops(config, cases, name, op, summaries[name].median_us),
                    )
                )
    return records


def as_json(config: BenchConfig, record: Record) -> dict[str, Any]:
    """A record as an object of the JSON file; times in microseconds, rates in 1e9 bytes per second."""
    summary = record.summary
    return {
        "op": record.op,
        "mode": config.mode,
        "backend": record.backend,
        "transport": record.transport,
        "codec": record.codec,
        "world_size": config.ranks,
        "tokens": record.tokens,
        "hidden": config.hidden,
        "experts": config.experts,
        "topk": config.topk,
        "dtype": config.dtype,
        "routing": str(config.routing),
        "layout": record.layout,
        "competitors": config.competitors,
        "seed": config.seed,
        "iterations": summary.iterations,
        "median_us": summary.median_us,
        "p99_us": summary.p99_us,
        "min_us": summary.min_us,
        "rank_median_us": list(summary.rank_median_us),
        "skew": summary.skew,
        "bytes": record.bytes,
        "local_bytes": record.local_bytes,
        "gbps": record.gbps,
        "bound_gbps": record.bound_gbps,
        "bound_fraction": record.bound_fraction,
        "floor_us": record.floor_us,
        "floor_ratio": record.floor_ratio,
        "signal_us": record.signal_us,
        "python_us": record.python_us,
        "idle_median_us": None if record.idle is None else record.idle.median_us,
        "idle_p99_us": None if record.idle is None else record.idle.p99_us,
        "ratio": record.ratio,
        "wrong": record.wrong,
        "receive_memory_bytes": record.memory,
        "hosts": list(config.topology.host_of),
        **_hops_as_json(record.hops),
    }


def _hops_as_json(hops: Hops | None) -> dict[str, Any]:
    values: dict[str, Callable[[Hops], Any]] = {
        "needed_bytes": lambda hops: hops.needed,
        "sent_bytes": lambda hops: hops.sent,
        "wire_bytes": lambda hops: hops.wire,
        "forwarded_bytes": lambda hops: hops.forwarded,
        "wire_ratio": lambda hops: hops.wire_ratio,
        "wire_gbps": lambda hops: hops.wire_gbps,
        "link_gbps": lambda hops: hops.link_gbps,
        "link_fraction": lambda hops: hops.link_fraction,
        "hop_us": lambda hops: hops.hop_us,
        "hop_ratio": lambda hops: hops.hop_ratio,
    }
    return {name: None if hops is None else value(hops) for name, value in values.items()}


def _has(cases: Sequence[Mapping[str, Any]], name: str) -> bool:
    return name in cases[0]["nanoseconds"]


def _median_us(cases: Sequence[Mapping[str, Any]], name: str, op: str) -> float | None:
    if not _has(cases, name):
        return None
    return summarise([case["nanoseconds"][name][op] for case in cases]).median_us


def _python_us(results: Sequence[Mapping[str, Any]], op: str) -> float | None:
    """Of the slowest rank; None in throughput mode."""
    times = [result["python"] for result in results if result.get("python")]
    if not times:
        return None
    parts = ("dispatch", "combine") if op == "pair" else (op,)
    slowest: int = max(sum(time[part] for part in parts) for time in times)
    return slowest / 1e3


def _bounds(cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    medians = {
        op: summarise([case["nanoseconds"][BOUND][op] for case in cases]).median_us for op in ("dispatch", "combine")
    }
    return medians | {"pair": medians["dispatch"] + medians["combine"]}


def _payload(config: BenchConfig, rows: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Bytes of each operation at one rank, and the local part of them."""
    dispatch = (rows["received"] * config.row_bytes, rows["received_local"] * config.row_bytes)
    combine = (rows["routed"] * config.row_bytes, rows["routed_local"] * config.row_bytes)
    return {
        "dispatch": dispatch,
        "combine": combine,
        "pair": (dispatch[0] + combine[0], dispatch[1] + combine[1]),
    }

"""Measures exchanges between hosts and prints the targets as a table: `python benchmarks/hosts.py` (as root).

The hosts are network namespaces of this machine, each with its share of the cores, joined by links of 1 Gbit/s in each
direction (docs/multi-host.md). `moecomm bench` runs in them, started by mpirun where Open MPI is there and by torchrun
where not; three times:

    exchange     1024 tokens per rank x 2048, top-8 of 32 experts: moecomm as it chooses, `direct` (from rank to rank),
                 `per_host` (sums per host on the way home), gloo, Open MPI
    limited      the same with a router that gives each token experts of one host only
    low_latency  8 tokens per rank in low-latency mode, links unlimited

About four minutes on two quiet cores. Every answer is checked; status 1 if one is wrong or a run failed, 2 if there can
be no hosts here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moecomm.bench.mpi import mpirun
from moecomm.bench.report import format_us
from moecomm.cli.console import Column, Console
from moecomm.errors import TransportUnavailable
from moecomm.testing.hosts import Hosts, why_not
from moecomm.transports.ucx_library import find_library

PARTS = ("exchange", "limited", "low_latency")
# What starting the ranks, checking answers and counting bytes may take beside the timed part.
START_SECONDS = 120.0
LOG_LINES = 40
PORT = 29510


class RunFailed(Exception):
    """A run ended with an error; the message holds the end of what it printed."""


@dataclass(frozen=True)
class Found:
    """Records of one part, as `moecomm bench --json` writes them."""

    records: list[dict[str, Any]]

    def get(self, op: str, backend: str) -> dict[str, Any] | None:
        """The record of one operation of one backend, None if it took no part."""
        return next((one for one in self.records if (one["op"], one["backend"]) == (op, backend)), None)

    def figure(self, op: str, backend: str, name: str, text: Callable[[float], str]) -> str:
        """One field as text."""
        record = self.get(op, backend)
        return "not measured" if record is None or record[name] is None else text(record[name])

    def quotient(self, op: str, theirs: str, ours: str) -> str:
        """Their median over ours, and both."""
        first, second = self.get(op, theirs), self.get(op, ours)
        if first is None or second is None:
            return "not measured"
        medians = first["median_us"], second["median_us"]
        return f"{medians[0] / medians[1]:.3g} ({format_us(medians[0])} / {format_us(medians[1])})"


def arguments(part: str, args: argparse.Namespace, others: Sequence[str]) -> list[str]:
    """What `moecomm bench` is given for one part."""
    sizes = ["--hidden", str(args.hidden), "--experts", str(args.experts), "--topk", str(args.topk)]
    sizes += ["--competitors", args.competitors]
    if args.iterations is not None:
        sizes += ["--iterations", str(args.iterations)]
    if part == "low_latency":
        return [*sizes, "--tokens", "8", "--mode", "low_latency", "--against", ",".join(others)]
    against = ["direct", "per_host", *others]
    if part == "limited":
        sizes += ["--routing", "limited:1"]
        against = ["direct", "per_host", *(name for name in others if name == "gloo")]
    return [*sizes, "--tokens", str(args.tokens), "--against", ",".join(against)]


def measure(hosts: Hosts, bench: Sequence[str], seconds: float, *, by_mpi: bool, port: int, console: Console) -> Found:
    """Run `moecomm bench` over the hosts, show what it prints, and give what it found.

    Raises:
        RunFailed: it failed, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="moecomm-hosts-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        timeout = seconds + START_SECONDS
        figures = ["--seconds", str(seconds), "--timeout", str(timeout), "--json", str(folder / "figures.json")]
        program = ("-m", "moecomm", "bench", *bench, *figures)
        where = [0] if by_mpi else range(hosts.num_hosts)
        commands = [
            hosts.mpirun(folder, port, *program) if by_mpi else hosts.torchrun(h, port, *program) for h in where
        ]
        logs = [(folder / f"out-{host}.txt", folder / f"errors-{host}.txt") for host in where]
        processes = []
        for host, command, (out, errors) in zip(where, commands, logs, strict=True):
            streams = [stack.enter_context(path.open("wb")) for path in (out, errors)]
            processes.append(hosts.start(host, command, stdout=streams[0], stderr=streams[1]))
        statuses = wait_for_all(processes, timeout)
        for host in range(hosts.num_hosts):
            hosts.kill(host)
        shown = logs[0][0].read_text(errors="replace").splitlines()
        console.line("\n".join(line for line in shown if not line.startswith("figures written to")))
        if not (folder / "figures.json").exists():
            tails = ["\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:]) for _, path in logs]
            raise RunFailed(f"moecomm bench ended with {statuses} (None = not in time):\n" + "\n".join(tails))
        return Found(json.loads((folder / "figures.json").read_text()))


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    """Their exit statuses; None for those that run longer. One that fails ends the wait."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in processes]
        if all(status is not None for status in statuses) or any(status not in (None, 0) for status in statuses):
            break
        time.sleep(0.05)
    return [process.poll() for process in processes]


def targets(found: dict[str, Found]) -> list[list[str]]:
    """What, how much, and what was found."""
    nothing = Found([])
    exchange, limited = found.get("exchange", nothing), found.get("limited", nothing)
    low = found.get("low_latency", nothing)
    ratio, share = "{:.3f}".format, "{:.2f}".format

    def fewer_bytes() -> str:
        free, bound = exchange.get("dispatch", "moecomm"), limited.get("dispatch", "moecomm")
        if free is None or bound is None or None in (free["wire_bytes"], bound["wire_bytes"]):
            return "not measured"
        return f"{bound['wire_bytes'] / free['wire_bytes']:.2f} ({bound['wire_bytes']} / {free['wire_bytes']})"

    return [
        [
            "dispatch: bytes on the interface / needed",
            "at most 1.05",
            exchange.figure("dispatch", "moecomm", "wire_ratio", ratio),
        ],
        ["dispatch: share of the link's rate", "0.9", exchange.figure("dispatch", "moecomm", "link_fraction", share)],
        ["dispatch: gloo / ours", "3.5", exchange.quotient("dispatch", "gloo", "moecomm")],
        ["combine, per_host: gloo / ours", "3.5", exchange.quotient("combine", "gloo", "per_host")],
        ["low latency, 8 tokens, pair: Open MPI / ours", "1", low.quotient("pair", "mpi", "moecomm")],
        ["dispatch: time / slow hop alone", "at most 1.1", exchange.figure("dispatch", "moecomm", "hop_ratio", share)],
        ["dispatch: Open MPI / ours", "-", exchange.quotient("dispatch", "mpi", "moecomm")],
        ["dispatch: direct / ours", "-", exchange.quotient("dispatch", "direct", "moecomm")],
        ["combine, exact order: gloo / ours", "-", exchange.quotient("combine", "gloo", "moecomm")],
        [
            "combine, per_host: bytes on the interface / needed",
            "-",
            exchange.figure("combine", "per_host", "wire_ratio", ratio),
        ],
        ["combine, per_host: time / slow hop alone", "-", exchange.figure("combine", "per_host", "hop_ratio", share)],
        ["one host per token: bytes of dispatch / without a limit", "-", fewer_bytes()],
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", default="2,2", help="ranks on each host")
    add("--rate", default="1gbit", help="of every link in each direction, as tc writes it")
    add("--own-cores", action=argparse.BooleanOptionalAction, default=True, help="divide the cores among the hosts")
    add("--tokens", type=int, default=1024, help="per rank, of the exchange")
    add("--hidden", type=int, default=2048, help="elements per row")
    add("--experts", type=int, default=32, help="over all ranks")
    add("--topk", type=int, default=8, help="experts per token")
    add("--seconds", type=float, default=150.0, help="timed part of all runs together")
    add("--iterations", type=int, help="timed iterations of each run at most; default: what the time allows")
    add("--competitors", default="framework", help="framework or tuned, see docs/benchmark.md")
    add("--only", choices=PARTS, action="append", help="one part; may be given several times")
    add("--json", type=Path, metavar="FILE", help="also write all records and the targets as JSON")
    args = parser.parse_args()
    # So that hosts are taken down when this is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(rich=False)
    reason = find_library().problem or why_not(limits=True)
    if reason:
        console.error(reason)
        return 2
    try:
        mpirun()
        others, by_mpi = ["gloo", "mpi"], True
    except TransportUnavailable as error:
        console.warning(f"without MPI: {error}")
        others, by_mpi = ["gloo"], False
    parts = args.only or list(PARTS)
    shares = {"exchange": 0.6, "limited": 0.2, "low_latency": 0.2}
    found: dict[str, Found] = {}
    has_failed = False
    with Hosts([int(count) for count in args.ranks.split(",")], rate=args.rate, own_cores=args.own_cores) as hosts:
        for number, part in enumerate(parts):
            hosts.limit(None if part == "low_latency" else args.rate)
            console.heading(f"{part}: links {'unlimited' if part == 'low_latency' else args.rate}")
            seconds = args.seconds * shares[part] / sum(shares[one] for one in parts)
            bench = arguments(part, args, others)
            try:
                found[part] = measure(hosts, bench, seconds, by_mpi=by_mpi, port=PORT + number, console=console)
            except RunFailed as error:
                console.error(str(error))
                has_failed = True
    rows = targets(found)
    console.table([Column(name) for name in ("what", "at least", "found")], rows, title="Targets between hosts")
    wrong = sum(record["wrong"] or 0 for one in found.values() for record in one.records)
    if found:
        console.line("all answers are right" if not wrong else f"{wrong} wrong elements")
    if args.json is not None:
        records = [{"part": part, **record} for part, one in found.items() for record in one.records]
        table = [{"what": what, "target": target, "found": value} for what, target, value in rows]
        args.json.write_text(json.dumps({"records": records, "targets": table}, indent=2) + "\n")
        console.line(f"figures written to {args.json}")
    return 1 if wrong or has_failed else 0


if __name__ == "__main__":
    sys.exit(main())

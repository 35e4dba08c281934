"""`moecomm bench`: measure dispatch and combine here, against other ways of doing it and against memory.

By itself it starts its ranks on this host. Started by torchrun or mpirun, on one host or many, each process is a rank.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moecomm.cli.console import Console
from moecomm.errors import TransportUnavailable

if TYPE_CHECKING:
    from moecomm.bench.config import BenchConfig
    from moecomm.bench.launched import Launched

__all__ = ["HELP", "add_arguments", "run"]

HELP = "measure dispatch and combine, against gloo, MPI and the memory bound, with answers checked"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `moecomm bench`."""
    add = parser.add_argument
    add("--ranks", type=int, help="processes; default: 2, under torchrun or mpirun those that it has started")
    add("--tokens", default="4096", help="tokens per rank; a list such as 1,8,32 measures each")
    add("--hidden", type=int, default=7168, help="elements per row")
    add("--experts", type=int, default=256, help="experts over all ranks")
    add("--topk", type=int, default=8, help="experts per token")
    add("--dtype", default="bfloat16", help="bfloat16, float16, float32 or float64")
    add("--mode", default="throughput", help="throughput or low_latency")
    add("--routing", default="uniform", help="uniform, zipf:MAX_OVER_MEAN, hot, masked:FRACTION or limited:HOSTS")
    add(
        "--against",
        default="",
        help="competitors, separated by commas: gloo, mpi, throughput (to low latency), direct, hierarchical and "
        "per_host (between hosts), or module:Class of your own",
    )
    add("--competitors", default="framework", help="framework = written as frameworks do; tuned = with reused buffers")
    add("--transport", default="auto", help="of moecomm, one of those that `moecomm info` lists")
    add("--codec", default="none", help="of moecomm: number format of rows on the wire")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="hold all answers to the oracle")
    add("--bound", action=argparse.BooleanOptionalAction, default=True, help="measure the memory bound")
    add("--iterations", type=int, help="timed iterations at most; default: what --seconds allow")
    add("--warmup", type=int, default=1, help="untimed iterations before")
    add("--seconds", type=float, default=30.0, help="time for the timed part, over all sizes")
    add("--threads", type=int, help="torch threads per rank; default: cores / ranks")
    add("--seed", type=int, default=0, help="of rows, weights and routing")
    add("--timeout", type=float, default=900.0, help="seconds after which the run is ended with an error")
    add("--json", type=Path, metavar="FILE", help="also write the figures as JSON; - = standard output, without table")
    add("--plot", type=Path, metavar="FILE", help="also draw them (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; 1 if any answer was wrong."""
    from moecomm.bench.launch import run_ranks
    from moecomm.bench.launched import launched_as, run_launched
    from moecomm.bench.plot import plot
    from moecomm.bench.records import as_json, make_records
    from moecomm.bench.report import print_explanation, print_header, print_table

    to_stdout = args.json is not None and str(args.json) == "-"
    launched = launched_as()
    stream = sys.stderr if to_stdout else sys.stdout
    # Launchers show the output of many processes line by line, even where it looks like a terminal.
    console = (
        Console(stream) if launched is None else Console(stream if launched.rank == 0 else io.StringIO(), rich=False)
    )
    config = _config(args, console, launched)
    if launched is None:
        print_header(console, config)
        with console.progress("bench", 1.0) as bar:
            results = run_ranks(config, progress=bar.update)
    else:
        with console.progress("bench", 1.0) as bar:
            found = run_launched(
                config, launched, begin=lambda known: print_header(console, known), progress=bar.update
            )
        if found is None:
            return 0
        config, results = found
    records = make_records(config, results)
    print_table(console, records)
    print_explanation(console, config, results)
    if args.json is not None:
        text = json.dumps([as_json(config, record) for record in records], indent=2) + "\n"
        if to_stdout:
            sys.stdout.write(text)
        else:
            args.json.write_text(text)
            console.line(f"figures written to {args.json}")
    if args.plot is not None:
        plot(config, records, args.plot)
        console.line(f"plot written to {args.plot}")
    return 1 if any(record.wrong for record in records) else 0


def _config(args: argparse.Namespace, console: Console, launched: Launched | None) -> BenchConfig:
    from moecomm.bench.config import BenchConfig, parse_routing, parse_tokens
    from moecomm.bench.dispatchers import dispatcher_class
    from moecomm.bench.mpi import mpirun

    against = [name for name in args.against.split(",") if name]
    for name in against:
        dispatcher_class(name)
    if "mpi" in against:
        try:
            mpirun()
            if launched is not None and not launched.by_mpi:
                raise TransportUnavailable("mpi", "the ranks were started by torchrun.", "start them by mpirun.")
        except TransportUnavailable as error:
            console.warning(f"skipped: {error}")
            against.remove("mpi")
    taken: dict[str, Callable[[Any], Any]] = {"tokens": parse_tokens, "routing": parse_routing}
    names = "tokens hidden experts topk dtype mode transport codec routing competitors check bound iterations"
    names += " warmup seconds threads seed timeout"
    values = {name: taken.get(name, _same)(getattr(args, name)) for name in names.split()}
    if launched is not None and args.ranks not in (None, launched.num_ranks):
        raise ValueError(f"--ranks {args.ranks} was given, but {launched.num_ranks} ranks were started")
    ranks = launched.num_ranks if launched is not None else 2 if args.ranks is None else args.ranks
    # On which hosts launched ranks are is known when they have met.
    host_of = (0,) * ranks if launched is None else ()
    return BenchConfig(ranks=ranks, backends=("moecomm", *against), host_of=host_of, **values)


def _same(value: Any) -> Any:
    return value

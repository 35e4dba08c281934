"""Checks the Triton kernels on a GPU and measures them beside the project's goals: `python benchmarks/gpu/run.py`.

Parts, each in a process of its own, so that a kernel that hangs or spoils the device ends its part alone:
    checks       every kernel against the reference: fresh random inputs, poisoned outputs
    rows         push and combine of 8 virtual ranks against a device copy
    low_latency  dispatch and combine of 8 virtual ranks against a signal and the copy of their bytes
    gemm         the grouped GEMM against torch's, a dense product, and reading the weights
    layer        a layer, forward and backward, against plain torch
    links        dispatch and combine between processes, a GPU each, against NCCL; two on one GPU over CUDA IPC

The time of `--seconds` is shared out among the parts (printed); a part begins no case behind its own share. On a first
run much of it goes into compiling kernels and choosing tile shapes: both are kept on disk, so a second run has time
for all cases.

Exit status: 0; 1 if an answer was wrong or something broke; 2 without a GPU, unless `--interpret` is given: then the
checks, or the one part that `--only` names, run on the CPU on tiny shapes, by Triton's interpreter. That rehearses a
part; its times say nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import report
import torch
from context import Context
from report import Record
from sizes import FULL, QUICK, TINY
from timing import Timer

from moecomm.cli.console import Console

__all__ = ["PARTS", "main"]

PARTS = {"checks": 0.28, "rows": 0.11, "low_latency": 0.13, "gemm": 0.29, "layer": 0.08, "links": 0.11}
"""Each part's share of the time; what one does not need, or takes too much, is shared out among the later ones."""

_GRACE_SECONDS = 40.0  # for starting a part, and for the case that is under way when its time is over
_CASES = 600  # one measurement takes this part of all the time, at most a second


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    # Before CUDA starts: virtual ranks wait for each other, each on a stream, which must not share a hardware queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    console = Console(sys.stderr if args.json == "-" else sys.stdout)
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        device = torch.device("cpu")
    elif not torch.cuda.is_available():
        console.error("there is no CUDA GPU here; --interpret runs the checks on the CPU, on tiny shapes")
        return 2
    else:
        device = torch.device("cuda", torch.cuda.current_device())
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    parts = [args.only] if args.only else ["checks"] if args.interpret else list(PARTS)
    found = report.facts(device) | {"seed": seed, "seconds": args.seconds}
    begin = time.monotonic()
    if args.part_seconds is not None:
        return 1 if report.is_bad(_run(parts[0], args, seed, device, console)) else 0
    console.pairs([(name, str(value)) for name, value in found.items()])
    records: list[Record] = []
    if len(parts) > 1:
        for part, seconds in _shared_out(begin + args.seconds):
            console.line(f"{part}: at most {seconds:.0f} s", style="bold")
            records += _in_a_process(part, seconds, args, seed)
    else:
        records += _run(parts[0], args, seed, device, console)
    columns, lines = report.table(records)
    console.table(columns, lines, title=f"{found['device']}, {time.monotonic() - begin:.0f} s")
    console.line(report.verdict(records), style="bold")
    if args.json == "-":
        sys.stdout.write(report.to_json(found, records) + "\n")
    elif args.json:
        Path(args.json).write_text(report.to_json(found, records) + "\n", encoding="utf-8")
    return 1 if report.is_bad(records) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS), help="one part, in this process")
    parser.add_argument("--seconds", type=float, help="for all parts; 290, or 100 with --quick")
    parser.add_argument("--quick", action="store_true", help="one model, balanced loads, fewer sizes")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there; - = standard output")
    parser.add_argument("--seed", type=int, help="of all inputs; by default a new one every time")
    parser.add_argument(
        "--interpret", action="store_true", help="no GPU: the checks, or --only another part, on the CPU"
    )
    parser.add_argument("--part-seconds", type=float, help=argparse.SUPPRESS)  # one part of a run of all
    args = parser.parse_args(arguments)
    if args.seconds is None:
        args.seconds = 100.0 if args.quick else 290.0
    if args.seconds <= 0:
        parser.error(f"--seconds must be above 0, got {args.seconds:g}")
    return args


def _run(part: str, args: argparse.Namespace, seed: int, device: torch.device, console: Console) -> list[Record]:
    """A part in this process. Its module is imported only now: Triton looks at the environment when it is imported."""
    seconds = args.seconds if args.part_seconds is None else args.part_seconds

    def tell(record: Record) -> None:
        # As they come, so that nothing is lost where the part is ended from outside.
        console.line("  ".join(cell for cell in report.table([record])[1][0] if cell))
        if args.part_seconds is not None:
            whole = Path(f"{args.json}.new")
            whole.write_text(report.to_json({}, context.records), encoding="utf-8")
            whole.replace(args.json)

    context = Context(
        part=part,
        timer=Timer(device),
        sizes=TINY if args.interpret else QUICK if args.quick else FULL,
        seed=seed,
        case_seconds=min(1.0, args.seconds / _CASES),
        deadline=time.monotonic() + seconds,
        tell=tell,
    )
    context.attempt(part, "", lambda: importlib.import_module(part).run(context))
    return context.records


def _shared_out(end: float) -> Iterator[tuple[str, float]]:
    """Each part, with its share of the time that is left when its turn comes."""
    shares = dict(PARTS)
    for part in PARTS:
        left = max(0.0, end - time.monotonic())
        yield part, left * shares[part] / sum(shares.values())
        del shares[part]


def _in_a_process(part: str, seconds: float, args: argparse.Namespace, seed: int) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--only", part, "--json", str(path)]
        command += ["--part-seconds", str(seconds), "--seed", str(seed), "--seconds", str(args.seconds)]
        command += ["--quick"] if args.quick else []
        note = None
        try:
            output = sys.stderr if args.json == "-" else None
            limit = seconds + _GRACE_SECONDS
            status = subprocess.run(command, timeout=limit, check=False, stdout=output).returncode
            if status not in (0, 1):
                note = f"the part ended with status {status}"
        except subprocess.TimeoutExpired:
            note = f"the part had not ended {_GRACE_SECONDS:.0f} s behind its time"
        records = report.merged(path.read_text(encoding="utf-8")) if path.exists() else []
        if note is None and not records:
            note = "the part found nothing"
        return records if note is None else [*records, report.unmeasured(part, part, "", note, is_error=True)]


if __name__ == "__main__":
    sys.exit(main())

"""`moecomm info`: what was built, what the machine has, which transports answer here, what would help the others.

Started on several ranks (by torchrun), it also says where they are and what carries their bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from moecomm.cli.console import Column, Console
from moecomm.cli.facts import OTHER_HOSTS

__all__ = ["HELP", "add_arguments", "run"]

HELP = "say what was built, which transports answer here and what would help the others"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `moecomm info`."""
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for all ranks to meet, under torchrun")


def run(args: argparse.Namespace) -> int:
    """Print the facts; 1 if the native part is missing. Of several ranks the first one prints."""
    from moecomm.cli.facts import collect
    from moecomm.cli.ranks import collect_ranks, print_ranks
    from moecomm.cli.rendezvous import started_group

    with started_group(args.timeout) as group:
        ranks = collect_ranks(group)
        if group.rank > 0:
            return 0
    facts = {**collect(), "ranks": ranks}
    if args.json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        console = Console()
        _print(console, facts)
        print_ranks(console, facts["ranks"])
    return 0 if facts["native"]["built"] else 1


def _print(console: Console, facts: dict[str, Any]) -> None:
    about = facts["moecomm"]
    console.line(f"moecomm {about['version']}", style="bold")
    cuda = f", CUDA {about['cuda']}, {about['cuda_devices']} device(s)" if about["cuda"] else ""
    pairs = [
        ("installed in", about["location"]),
        ("python", f"{about['python']}, torch {about['torch']}{cuda}, numpy {about['numpy']}"),
        ("gloo", "yes" if about["gloo"] else "no: this torch is built without it"),
    ]
    console.pairs([*pairs, *_native(facts["native"])])

    console.heading("Machine")
    console.pairs(_machine(facts["machine"]))

    console.heading("Limits")
    console.pairs(
        [
            (name, f"{_limit(one['soft'])}, at most {_limit(one['hard'])}: {one['meaning']}")
            for name, one in facts["limits"].items()
        ]
    )

    columns = [Column("transport", style="bold"), Column("answers"), Column("whom it reaches, or why not", wraps=True)]
    rows = [row for transport in facts["transports"] for row in _transport(transport)]
    console.table(columns, rows, title="Transports, in the order in which they are asked")

    console.heading("Environment")
    environment = facts["environment"]
    console.pairs(list(environment.items()) or [("MOECOMM_*", "none set")])

    console.heading("GPUs")
    console.pairs(_gpus(facts["gpu"]))

    rows = []
    for part in facts["optional"]:
        rows.append([part["name"], part["version"] or "-", part["gives"]])
        if part["version"] is None:
            rows.append(["", "", f"to get it: {part['remedy']}"])
    columns = [Column("part", style="bold"), Column("version"), Column("gives", wraps=True)]
    console.table(columns, rows, title="Optional parts")


def _transport(transport: dict[str, Any]) -> list[list[str]]:
    """The rows of a transport: whom it reaches, and each reason why not once."""
    rows, refuses = [], transport["refuses"]
    is_partial = transport["crosses_hosts"] and OTHER_HOSTS in refuses
    if transport["answers"]:
        crosses = transport["crosses_hosts"] and not is_partial and OTHER_HOSTS not in transport["reaches"]
        others = ", between hosts too" if crosses else ""
        devices = ", ".join(transport["device_types"])
        rows.append([transport["name"], "yes", f"{' and '.join(transport['reaches'])} ({devices} tensors{others})"])
        # Of one that answers, only that it does not reach what it is for.
        refuses = {OTHER_HOSTS: refuses[OTHER_HOSTS]} if is_partial else {}
    who_of: dict[str, list[str]] = {}
    for who, reason in refuses.items():
        who_of.setdefault(reason, []).append(who)
    for reason, who in who_of.items():
        is_all = not transport["answers"] and len(who_of) == 1
        rows.append([transport["name"], "no", reason if is_all else f"{', '.join(who)}: {reason}"])
    if refuses:
        rows.append(["", "", f"remedy: {transport['remedy']}"])
    return rows


def _native(native: dict[str, Any]) -> list[tuple[str, str]]:
    if not native["built"]:
        return [("native part", f"missing: {native['reason']}\nremedy: {native['remedy']}")]
    sets = native["instruction_sets"]
    available = ", ".join(name for name, there in sets.items() if there)
    lacking = ", ".join(name for name, there in sets.items() if not there)
    chosen = f"{native['instruction_set']} (of {available}" + (f"; not here: {lacking})" if lacking else ")")
    return [
        ("native part", f"{native['file']}, {native['compiler'] or 'compiler unknown'}"),
        ("instruction set", chosen),
    ]


def _gpus(gpu: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [(f"device {n}", f"{one['name']}, capability {one['capability']}") for n, one in enumerate(gpu["devices"])]
    pairs = pairs or [("devices", "none")]
    missing = [f"{one['what']}\n  remedy: {one['remedy']}" for one in gpu["missing"]]
    return [*pairs, ("missing", "\n".join(missing) if missing else "nothing")]


def _machine(machine: dict[str, Any]) -> list[tuple[str, str]]:
    cores = f"{machine['cores']}"
    if machine["physical_cores"] is not None:
        cores += f" ({machine['physical_cores']} physical)"
    cores += f", this process may use {_ranges(machine['affinity'])}"
    if machine["cpu_quota"] is not None:
        cores += f", for {machine['cpu_quota']:g} cores' worth of time"
    pairs = [
        ("system", f"{machine['system']}, {machine['architecture']}"),
        ("processor", machine["processor"]),
        ("cores", f"{cores}; load average {machine['load_average']:.2f}"),
    ]
    if machine["memory_bytes"] is not None:
        pairs.append(
            ("memory", f"{_size(machine['memory_bytes'])}, {_size(machine['memory_available_bytes'])} available")
        )
    if machine["dev_shm_bytes"] is not None:
        free = f"{_size(machine['dev_shm_bytes'])}, {_size(machine['dev_shm_free_bytes'])} free"
        pairs.append(("/dev/shm", f"{free} (moecomm does not need it)"))
    return pairs


def _size(count: int) -> str:
    """Bytes in binary units."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _ranges(numbers: list[int]) -> str:
    """Sorted whole numbers in short: [0, 1, 2, 5] is `0-2,5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)

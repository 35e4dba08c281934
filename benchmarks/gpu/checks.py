"""Every kernel against the reference: fresh random inputs, poisoned outputs, one line per kernel.

Kernels run on the device; the reference runs on the CPU on copies of the same inputs. A kernel that is not here is not
checked: tests/triton/test_gpu_benchmark.py compares the list with the contracts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import check_captured
import check_experts
import check_low_latency
import check_rows
from context import Context
from report import checked

from moecomm.kernels.cuda.push_bulk import push_rows_in_bulk
from moecomm.kernels.registry import eager_kernels_for, kernels_for
from moecomm.kernels.triton.push_engines import forced_engine

__all__ = ["CHECKS", "ON_GPU", "Found", "run"]

Found = Iterator[tuple[str, str, int]]
"""Kernel, case, wrong elements."""


def _rows(context: Context) -> Found:
    with forced_engine("triton"):  # the other one has a line of its own
        yield from check_rows.check(kernels_for("triton"), context)


def _low_latency(context: Context) -> Found:
    return check_low_latency.check(eager_kernels_for("triton"), context)


def _bulk(context: Context) -> Found:
    return check_rows.check_push("push_rows_in_bulk", push_rows_in_bulk, context)


CHECKS: dict[str, Callable[[Context], Found]] = {
    "row kernels": _rows,
    "push in bulk": _bulk,
    "low-latency kernels": _low_latency,
    "signals": check_low_latency.check_signals,
    "captured calls": check_captured.check,
    "experts": check_experts.check,
}


ON_GPU = {"push in bulk"}
"""CUDA C++, which nothing interprets."""


def run(context: Context) -> None:
    """All of them; a kernel that raises is an error, and the next family is checked."""
    for family, check in CHECKS.items():
        if family in ON_GPU and not context.timer.is_gpu:
            continue
        wrong: dict[str, int] = defaultdict(int)
        cases: dict[str, list[str]] = defaultdict(list)

        def case(check: Callable[[Context], Found] = check) -> None:
            for kernel, name, count in check(context):  # noqa: B023  called before the next family
                wrong[kernel] += count  # noqa: B023
                cases[kernel].append(f"{name}: {count}" if count else "")  # noqa: B023

        context.attempt(family, "", case)
        for kernel, names in cases.items():
            failed = [name for name in names if name]
            shape = f"{len(names)} cases" + (f"; wrong in {'; '.join(failed[:3])}" if failed else "")
            context.add(checked(context.part, kernel, shape, wrong[kernel]))

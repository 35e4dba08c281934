"""The benchmark: moecomm against other dispatchers and against memory, in the same processes, with answers checked.

cli/bench.py -> launch.py -> worker.py (one process per rank) -> measure.py -> dispatchers.py: ours, gloo, mpi
                                                                            -> bound.py, check.py <- workload.py
             -> records.py (statistics.py) -> report.py, plot.py
"""

from __future__ import annotations

from moecomm.bench.config import BenchConfig, Routing, parse_routing, parse_tokens
from moecomm.bench.launch import BenchFailed, run_ranks
from moecomm.bench.quick import quick_table
from moecomm.bench.records import Record, as_json, make_records

__all__ = [
    "BenchConfig",
    "BenchFailed",
    "Record",
    "Routing",
    "as_json",
    "make_records",
    "parse_routing",
    "parse_tokens",
    "quick_table",
    "run_ranks",
]

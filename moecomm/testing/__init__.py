"""Tools for testing code that uses moecomm, and for holding a transport, a codec or a kernel to its contract.

launch                                      run a function on n ranks: threads, stepped threads, processes
rows_with_origin, origin_of_rows            rows that know their rank and token
uniform, zipf, hot_expert, masked, ...      routing generators
reference_dispatch, reference_combine       the oracle, on the gathered inputs of all ranks
contracts                                   tests that every transport, codec, algorithm, kernel must pass
"""

from moecomm.testing.data import origin_of_rows, rows_with_origin
from moecomm.testing.failures import DeadlineExceeded, RankDied, RankFailure
from moecomm.testing.launch import launch
from moecomm.testing.oracle import ReferenceReceived, reference_combine, reference_dispatch
from moecomm.testing.routing import (
    all_to_one_rank,
    hot_expert,
    limited_to_groups,
    masked,
    no_routes,
    uniform,
    with_duplicates,
    zipf,
)

__all__ = [
    "DeadlineExceeded",
    "RankDied",
    "RankFailure",
    "ReferenceReceived",
    "all_to_one_rank",
    "hot_expert",
    "launch",
    "limited_to_groups",
    "masked",
    "no_routes",
    "origin_of_rows",
    "reference_combine",
    "reference_dispatch",
    "rows_with_origin",
    "uniform",
    "with_duplicates",
    "zipf",
]

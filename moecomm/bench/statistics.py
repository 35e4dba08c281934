"""From times by rank and iteration to the figures of the table. Pure functions of plain numbers.

An exchange has ended when its last rank has ended, so the time of one iteration is that of its slowest rank, and all
figures are taken over these: first the maximum over ranks, then the median (or minimum, or percentile) over iterations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Summary", "percentile", "slowest", "summarise"]


@dataclass(frozen=True)
class Summary:
    """Figures of one operation of one backend, in microseconds.

    Arguments:
        min_us, median_us, p99_us: over iterations, of the slowest rank's time.
        iterations: number of timed iterations.
        rank_median_us: per rank, the median over iterations of that rank's own time.
    """

    min_us: float
    median_us: float
    p99_us: float
    iterations: int
    rank_median_us: tuple[float, ...]

    @property
    def skew(self) -> float:
        """The largest of the ranks' own medians over the smallest: 1 = all ranks take the same time."""
        smallest = min(self.rank_median_us)
        return max(self.rank_median_us) / smallest if smallest > 0 else 1.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that at least `percent` % of the values do not exceed.

    Raises:
        ValueError: no values, or `percent` not in (0, 100].
    """
    if not values:
        raise ValueError("the percentile of no values is not defined")
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be above 0 and at most 100, got {percent}")
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def slowest(times_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """The slowest rank's time of each iteration.

    Arguments:
        times_by_rank: per rank, the times of its iterations, as many for each rank.

    Raises:
        ValueError: no ranks, or ranks with different numbers of iterations.
    """
    lengths = [len(times) for times in times_by_rank]
    if not lengths or min(lengths) != max(lengths):
        raise ValueError(f"every rank must bring the same number of times, got {lengths}")
    return [max(times) for times in zip(*times_by_rank, strict=True)]


def summarise(nanoseconds_by_rank: Sequence[Sequence[int]]) -> Summary:
    """Reduce the times of one operation, in nanoseconds per rank and iteration, to its figures.

    Raises:
        ValueError: as `slowest`; also when there is no iteration.
    """
    worst = slowest(nanoseconds_by_rank)
    if not worst:
        raise ValueError("no iteration was timed")
    return Summary(
        min_us=min(worst) / 1e3,
        median_us=statistics.median(worst) / 1e3,
        p99_us=percentile(worst, 99) / 1e3,
        iterations=len(worst),
        rank_median_us=tuple(statistics.median(times) / 1e3 for times in nanoseconds_by_rank),
    )

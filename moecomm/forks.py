"""A forked child has its parent's objects, and must not use those that speak for the parent."""

from __future__ import annotations

import os

__all__ = ["Forks", "forks"]


class Forks:
    """Counts the forks that lie between this process and the one that first watched; cheaper than asking who we are."""

    def __init__(self) -> None:
        self.count = 0
        self._watched = False

    def watch(self) -> None:
        """Counts from now on, if it has not begun before."""
        if not self._watched:
            self._watched = True
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.count += 1


forks = Forks()
"""Of this process."""

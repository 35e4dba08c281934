"""Tools for testing code that uses moecomm, and for holding a transport, a codec or a kernel to its contract."""

from moecomm.testing.failures import DeadlineExceeded, RankDied, RankFailure
from moecomm.testing.launch import launch

__all__ = ["DeadlineExceeded", "RankDied", "RankFailure", "launch"]

"""moecomm: dispatch and combine for Mixture-of-Experts models with expert parallelism."""

from moecomm.version import __version__

__all__ = ["__version__"]

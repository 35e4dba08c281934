"""What happens to rows, values and ids on one device: count, plan, push, combine. Knows rows, indices and addresses."""

from moecomm.kernels.base import RowKernels
from moecomm.kernels.registry import available_kernels, kernels_for

__all__ = ["RowKernels", "available_kernels", "kernels_for"]

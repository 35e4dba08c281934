"""Triton kernels for CUDA tensors. The package itself imports nothing: `import moecomm` never needs Triton."""

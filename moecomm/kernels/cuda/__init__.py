"""Kernels in CUDA C++, where Triton cannot say what the hardware does. Nothing here imports CuPy before it is used."""

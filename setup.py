"""Builds the native part: C++17, bound with pybind11, free of torch, for the baseline instruction set."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile("MOECOMM_BUILD_JOBS", default=0).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "moecomm._C",
            sources=sorted(str(path) for path in Path("csrc").rglob("*.cc")),
            depends=sorted(str(path) for path in Path("csrc").rglob("*.h")),
            include_dirs=["csrc"],
            cxx_std=17,
            # No contraction of a*b+c into one rounding: every instruction set must give the same bits.
            extra_compile_args=["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread", "-ldl"],
        )
    ]
)

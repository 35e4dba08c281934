"""Builds the native part: C++17, bound with pybind11, free of torch, for the baseline instruction set.

CUDA sources are not built: they travel with the package, which compiles them where there is a GPU.
"""

import shutil
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_py import build_py

ParallelCompile("MOECOMM_BUILD_JOBS", default=0).install()

CUDA_SOURCES = [str(path) for pattern in ("*.cu", "*.cuh") for path in sorted(Path("csrc/cuda").glob(pattern))]


class BuildWithCudaSources(build_py):
    """Puts csrc/cuda into the package, as moecomm/kernels/cuda/source; an editable install reads csrc/cuda itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in zip(CUDA_SOURCES, self._targets(), strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *map(str, self._targets())]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *CUDA_SOURCES]

    def _targets(self) -> list[Path]:
        return [Path(self.build_lib, "moecomm/kernels/cuda/source", Path(source).name) for source in CUDA_SOURCES]


setup(
    cmdclass={"build_py": BuildWithCudaSources},
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
    ],
)

"""The all-to-all dispatcher over MPI: `Alltoallv` on the raw buffers by mpi4py, between processes of mpirun."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Sequence
from typing import Any, final

from torch import Tensor

from moecomm.bench.all_to_all import AllToAllDispatcher
from moecomm.bench.dispatchers import Setup
from moecomm.errors import TransportUnavailable

__all__ = ["MpiDispatcher", "mpirun"]


def mpirun() -> str:
    """The path of `mpirun`.

    Raises:
        TransportUnavailable: there is no mpirun, or no mpi4py; says what would help.
    """
    found = shutil.which("mpirun")
    if found is None:
        raise TransportUnavailable(
            "mpi", "there is no mpirun on PATH.", "install an MPI, on Debian: apt install openmpi-bin libopenmpi-dev."
        )
    if importlib.util.find_spec("mpi4py") is None:
        raise TransportUnavailable("mpi", "mpi4py is not installed.", "pip install 'moecomm[bench]'.")
    return found


@final
class MpiDispatcher(AllToAllDispatcher):
    """Exchanges by `MPI.COMM_WORLD.Alltoallv`; a row is one element of a contiguous datatype, so counts stay small."""

    name = "mpi"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import mpi4py

        # Only this thread calls MPI; the default (any thread may) would make it take locks.
        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._communicator: Any = MPI.COMM_WORLD
        if (self._communicator.size, self._communicator.rank) != (setup.config.ranks, setup.rank):
            raise TransportUnavailable(
                "mpi",
                f"MPI sees rank {self._communicator.rank} of {self._communicator.size}, the benchmark has rank "
                f"{setup.rank} of {setup.config.ranks}.",
                "install the mpi4py that belongs to the mpirun on PATH: pip install --no-binary mpi4py mpi4py.",
            )
        self._datatypes: dict[int, Any] = {}

    @property
    def transport(self) -> str:
        return "mpi"

    def exchange(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], source_splits: Sequence[int]
    ) -> None:
        entry_bytes = source.element_size() * (source.shape[1] if source.dim() > 1 else 1)
        datatype = self._datatypes.get(entry_bytes)
        if datatype is None:
            datatype = self._mpi.BYTE.Create_contiguous(entry_bytes).Commit()
            self._datatypes[entry_bytes] = datatype
        self._communicator.Alltoallv(
            self._message(source, source_splits, datatype), self._message(output, output_splits, datatype)
        )

    def close(self) -> None:
        for datatype in self._datatypes.values():
            datatype.Free()
        self._datatypes.clear()
        super().close()

    def _message(self, tensor: Tensor, splits: Sequence[int], datatype: Any) -> list[Any]:
        starts = list(itertools.accumulate(splits, initial=0))[:-1]
        memory = self._mpi.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, list(splits), starts, datatype]

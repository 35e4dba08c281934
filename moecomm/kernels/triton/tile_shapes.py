"""Tile shapes of the grouped GEMM: which are possible, which is taken unmeasured, and how the fastest is found.

Kinds of product: the three epilogues of `multiply_rows_kernel`, and "weights" for `weight_gradient_kernel`, whose rows
and columns are those of the matrix and whose inner dim is the rows of an expert.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from moecomm.kernels.choices import Choices
from moecomm.kernels.triton.runtime import is_interpreted

__all__ = [
    "TileShape",
    "candidate_shapes",
    "choose_shape",
    "default_shape",
    "default_shapes",
    "num_programs",
    "source_hash",
]

_choices = Choices()
_chosen: dict[tuple[Any, ...], TileShape] = {}
_measures = True
_prefers_descriptors = False


@dataclasses.dataclass(frozen=True)
class TileShape:
    """How a product is cut into tiles.

    Attributes:
        rows, columns: of the tile of the result.
        inner: of the dim that is summed over, per step.
        num_warps, num_stages: as Triton understands them.
        programs_per_sm: that are launched, when there are tiles enough.
        group: rows of tiles that are walked together.
        uses_descriptors: operands are loaded by tensor descriptors; capability 90 and later.
    """

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    group: int = 8
    uses_descriptors: bool = False

    @property
    def splits_columns(self) -> bool:
        """Whether the epilogue works on half a tile at a time."""
        return self.columns >= 64 and self.rows >= 64

    def shared_bytes(self, kind: str, itemsize: int) -> int:
        """Bytes of shared memory for the operands of all stages."""
        factor = 2 if kind == "swiglu" else 1
        return self.num_stages * self.inner * (self.rows + factor * self.columns) * itemsize


# Shared memory of a block, by capability; others have less.
_SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
_INTERPRETED = TileShape(32, 32, 32, 1, 1)


def candidate_shapes(
    kind: str, itemsize: int, rows_per_expert: int, capability: int, *, allows_descriptors: bool = False
) -> list[TileShape]:
    """Shapes worth measuring, the default first.

    Arguments:
        kind: "plain", "swiglu", "swiglu_backward" or "weights".
        itemsize: bytes of an element of the operands.
        rows_per_expert: mean, a power of two.
        capability: compute capability times ten: 80, 90, 100.
        allows_descriptors: whether the tensors can be described.
    """
    if itemsize == 4:
        shapes = [TileShape(64, 64, 32, 8, 3), TileShape(128, 64, 16, 8, 3), TileShape(32, 64, 32, 4, 3)]
        if kind in ("swiglu", "weights"):
            # Two accumulators, or rows that are gathered: more spills with some compilers.
            shapes.insert(0, TileShape(64, 64, 16, 8, 3))
        if kind != "weights" and rows_per_expert <= 16:
            shapes.insert(0, TileShape(16, 64, 32, 8 if kind == "swiglu" else 4, 3, 2))
    elif kind == "weights":
        shapes = [TileShape(128, 128, 64, 8, 3), TileShape(128, 256, 64, 8, 3), TileShape(128, 128, 64, 4, 3)]
        shapes += [TileShape(128, 128, 32, 8, 4, 2), TileShape(64, 128, 32, 4, 4, 2)]
        if rows_per_expert <= 32:
            shapes.insert(0, TileShape(64, 128, 32, 4, 3, 2))
        elif capability >= 90:
            shapes.insert(0, shapes.pop(1))
    elif rows_per_expert <= 64:
        # Few rows: the weights' bytes are all that counts, and many of them must be on their way at once.
        rows = max(16, rows_per_expert)
        wide = 64 if kind != "plain" or rows == 64 else 128
        shapes = [TileShape(rows, wide, 64, 4, 4, 2), TileShape(rows, 64, 128, 4, 3, 2)]
        shapes += [TileShape(rows, 64, 64, 4, 5, 3), TileShape(rows, 128, 128, 8, 3), TileShape(rows, 32, 128, 4, 4, 3)]
    else:
        shapes = [TileShape(128, 64, 64, 8, 4), TileShape(128, 128, 64, 8, 3), TileShape(64, 128, 64, 8, 4)]
        shapes += [TileShape(128, 128, 64, 8, 4), TileShape(64, 64, 64, 4, 4, 2)]
        if kind == "plain" or (kind == "swiglu" and capability >= 100):
            shapes.insert(0, shapes.pop(1))
        if kind == "plain":
            shapes.insert(0 if capability >= 90 and rows_per_expert >= 128 else 1, TileShape(128, 256, 64, 8, 3))
    if allows_descriptors and capability >= 90 and itemsize == 2 and rows_per_expert > 64:
        described = [(128, 128, 3), (128, 128, 4), (128, 64, 4)]
        if kind in ("plain", "weights"):
            described += [(128, 256, 3), (128, 256, 4)]
        shapes += [TileShape(rows, columns, 64, 8, stages, 1, 8, True) for rows, columns, stages in described]
    limit = _SHARED_KIB.get(capability, 99) * 1024
    # Fewer stages fit anywhere; one shape is always left.
    fitting = [shape for shape in shapes if shape.shared_bytes(kind, itemsize) <= limit]
    return list(dict.fromkeys(fitting)) or [dataclasses.replace(shapes[0], num_stages=1)]


def default_shape(kind: str, itemsize: int, rows_per_expert: int, capability: int) -> TileShape:
    """The shape taken where nothing can be measured; arguments as for `candidate_shapes`."""
    return candidate_shapes(kind, itemsize, rows_per_expert, capability)[0]


@contextlib.contextmanager
def default_shapes(*, with_descriptors: bool = False) -> Iterator[None]:
    """Nothing is measured inside, in any thread: for checks, which would compile every candidate and then take one.

    Arguments:
        with_descriptors: take the first shape that uses descriptors, where there is one.
    """
    global _measures, _prefers_descriptors
    before = _measures, _prefers_descriptors
    _measures, _prefers_descriptors = False, with_descriptors
    try:
        yield
    finally:
        _measures, _prefers_descriptors = before


def choose_shape(
    kind: str,
    *,
    compute: torch.dtype,
    dtypes: tuple[torch.dtype, ...],
    rows_per_expert: int,
    sizes: tuple[int, ...],
    device: torch.device,
    allows_descriptors: bool = False,
    launch: Callable[[TileShape], None],
) -> TileShape:
    """The shape for a product: the fastest one, measured once per family of sizes and kept on disk.

    Arguments:
        compute: dtype of the operands in the product.
        dtypes: of the tensors read and written.
        sizes: all that the speed depends on besides: E, K, M, options, how rows and weights lie.
        allows_descriptors: whether the tensors can be described.
        launch: runs the product with a shape; it only writes what it will write anyway.
    """
    if is_interpreted():
        wants_descriptors = _INTERPRETED.uses_descriptors or _prefers_descriptors
        return dataclasses.replace(_INTERPRETED, uses_descriptors=wants_descriptors and allows_descriptors)
    family = (kind, dtypes, rows_per_expert, sizes, allows_descriptors, device)
    known = _chosen.get(family)
    if known is not None and _measures:
        return known
    capability = _capability(device)
    candidates = candidate_shapes(
        kind, compute.itemsize, rows_per_expert, capability, allows_descriptors=allows_descriptors
    )
    if _prefers_descriptors:
        return next((shape for shape in candidates if shape.uses_descriptors), candidates[0])
    if not _measures or torch.cuda.is_current_stream_capturing():
        return candidates[0]
    key = {
        "kind": kind,
        "dtypes": [str(dtype) for dtype in dtypes],
        "rows_per_expert": rows_per_expert,
        "sizes": list(sizes),
        "allows_descriptors": allows_descriptors,
        "device": torch.cuda.get_device_name(device),
        "capability": capability,
        "triton": triton.__version__,
        "source": source_hash(),
    }
    values = _choices.choose(
        key, [list(dataclasses.astuple(shape)) for shape in candidates], lambda values: _time(launch, values, device)
    )
    return _chosen.setdefault(family, TileShape(*values))


def num_programs(shape: TileShape, max_tiles: int, device: torch.device) -> int:
    """Programs to launch: as many as run at once, but no more than there can be tiles."""
    if is_interpreted():
        return min(3, max_tiles)
    return min(_num_sms(device) * shape.programs_per_sm, max_tiles)


@functools.cache
def source_hash() -> str:
    """Of the device code and the rules here: it changes whenever a measurement may have become wrong."""
    digest = hashlib.sha256()
    names = ("segments", "tile_products", "grouped_gemm", "grouped_gemm_rows", "grouped_gemm_weights", "descriptors")
    for name in (*names, "tile_shapes"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def _time(launch: Callable[[TileShape], None], values: list[Any], device: torch.device) -> float:
    """Milliseconds; infinity when the device has not enough of something."""
    try:
        with torch.cuda.device(device):  # whose stream is timed
            return float(triton.testing.do_bench(lambda: launch(TileShape(*values)), warmup=5, rep=20))
    except (OutOfResources, PTXASError):
        return float("inf")


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

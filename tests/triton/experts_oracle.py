"""Experts written one by one in plain torch, in fp64: what the kernels are compared with."""

import dataclasses

import torch
import torch.nn.functional as F

from moecomm.kernels.triton.segments import Segments

# Counts of real rows per expert, and rows of nobody at the end (expert_major).
LOADS = {
    "mixed": ([5, 0, 67, 32], 7),
    "one row": ([0, 1, 0, 0], 0),
    "no rows": ([0, 0, 0, 0], 0),
    "nobody's rows": ([0, 0, 0, 0], 40),
    "one expert": ([33], 0),
    "no expert": ([], 3),
}
ALIGNMENT = 8


@dataclasses.dataclass
class Case:
    """Rows of experts: N of them, of which expert e owns the real ones rows[e]."""

    segments: Segments
    rows: list[torch.Tensor]

    @property
    def num_rows(self):
        return self.segments.num_rows

    @property
    def is_real(self):
        real = torch.zeros(self.num_rows, dtype=torch.bool)
        for rows in self.rows:
            real[rows] = True
        return real


def expert_major(counts, tail, *, with_counts=True, dtype=torch.int32):
    """Segments padded to ALIGNMENT if counts are told, else all real."""
    lengths = [-(-count // ALIGNMENT) * ALIGNMENT if with_counts else count for count in counts]
    offsets = torch.tensor(lengths, dtype=torch.int64).cumsum(0).to(dtype)
    begins = [0, *offsets.tolist()][: len(counts)]
    real = torch.tensor(counts, dtype=dtype) if with_counts else None
    segments = Segments.expert_major(sum(lengths) + tail, offsets, real)
    return Case(segments, [torch.arange(b, b + c) for b, c in zip(begins, counts, strict=True)])


def slab(counts, capacity=70):
    segments = Segments.slab(capacity, torch.tensor(counts, dtype=torch.int64))
    return Case(segments, [torch.arange(e * capacity, e * capacity + c) for e, c in enumerate(counts)])


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def swiglu(x, gate_up_proj, down_proj, case, *, row_idx=None, row_weights=None):
    """`[N, H]` fp64, differentiable."""
    source = x if row_idx is None else torch.where((row_idx >= 0)[:, None], x[row_idx.clamp(min=0)], 0)
    y = torch.zeros(case.num_rows, x.shape[1], dtype=x.dtype)
    for expert, rows in enumerate(case.rows):
        gate, up = (source[rows] @ gate_up_proj[expert].t()).chunk(2, dim=1)
        output = (F.silu(gate) * up) @ down_proj[expert].t()
        y = y.index_put((rows,), output if row_weights is None else output * row_weights[rows, None])
    return y


def error(have, want):
    """Relative, in the Frobenius norm; absolute where all is zero."""
    difference = (have.detach().double() - want.detach().double()).norm()
    return (difference / want.detach().double().norm().clamp(min=1e-30)).item() if want.any() else difference.item()

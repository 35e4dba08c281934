"""The grouped GEMM and the experts against one torch product per expert in fp64 on the CPU.

N rows   S rows gathered from   H hidden   I intermediate   E experts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from answers import poisoned, wrong_sums
from context import Context
from torch import Tensor

from moecomm.kernels.experts import ExpertRows
from moecomm.kernels.triton.grouped_gemm import grouped_gemm, grouped_gemm_weight_gradient
from moecomm.kernels.triton.grouped_swiglu import TritonExpertKernels, grouped_swiglu
from moecomm.kernels.triton.segments import Segments
from moecomm.kernels.triton.tile_shapes import default_shapes

__all__ = ["check"]

_ALIGNMENT = 8
_ROUNDING = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@dataclass
class _Load:
    """Rows of experts, with padding and rows of nobody, or slabs."""

    segments: Segments
    rows: list[Tensor]

    def where_real(self) -> Tensor:
        real = torch.zeros(self.segments.num_rows, dtype=torch.bool)
        for rows in self.rows:
            real[rows] = True
        return real


def _expert_major(counts: Sequence[int], tail: int, device: torch.device) -> _Load:
    lengths = torch.tensor([-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts])
    ends = lengths.cumsum(0)
    begins = (ends - lengths).tolist()
    real = torch.tensor(counts, device=device)
    segments = Segments.expert_major(int(ends[-1]) + tail, ends.to(device, torch.int32), real.int())
    return _Load(segments, [torch.arange(b, b + c) for b, c in zip(begins, counts, strict=True)])


def _slab(counts: Sequence[int], device: torch.device) -> _Load:
    capacity = max(counts) + 3
    segments = Segments.slab(capacity, torch.tensor(counts, device=device))
    return _Load(segments, [torch.arange(e * capacity, e * capacity + count) for e, count in enumerate(counts)])


def check(context: Context) -> Iterator[tuple[str, str, int]]:
    """Kernel, case and wrong elements."""
    is_gpu, device = context.timer.is_gpu, context.device
    generator = torch.Generator().manual_seed(context.seed)
    counts, hidden, intermediate = ([300, 0, 77, 1], 264, 136) if is_gpu else ([5, 0, 3], 24, 8)
    # The interpreter's products are wrong in bf16.
    first, *others = (torch.bfloat16, torch.float16, torch.float32) if is_gpu else (torch.float16, torch.float32)
    loads = {"expert_major": _expert_major(counts, 9, device), "slab": _slab(counts, device)}
    # Not every combination: compiling is what takes the time.
    cases = [(layout, first) for layout in loads] + [("expert_major", dtype) for dtype in others]
    with default_shapes():
        for layout, dtype in cases:
            name = f"{layout}, {str(dtype).removeprefix('torch.')}"
            yield from _products(loads[layout], name, dtype, (hidden, 2 * intermediate), generator, device)
        yield from _experts(loads["expert_major"], str(first), first, (hidden, intermediate), generator, device)
    if is_gpu and torch.cuda.get_device_capability(device) < (9, 0):
        return
    # The same by tensor descriptors, which need multiples of 64.
    hidden, intermediate = (320, 160) if is_gpu else (64, 32)
    with default_shapes(with_descriptors=True):
        name = f"descriptors, {first}"
        yield from _products(loads["expert_major"], name, first, (hidden, 2 * intermediate), generator, device)
        yield from _experts(loads["expert_major"], name, first, (hidden, intermediate), generator, device)


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.25).to(dtype)


def _wrong(got: Tensor, want: Tensor, dtype: torch.dtype, *, absolute: float) -> int:
    return wrong_sums(got.cpu(), want, relative=_ROUNDING[dtype], absolute=absolute * _ROUNDING[dtype])


def _products(
    load: _Load,
    name: str,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    generator: torch.Generator,
    device: torch.device,
) -> Iterator[tuple[str, str, int]]:
    """The product with either form of the weights, and their gradient; padding is NaN and must not show."""
    num_inner, num_columns = sizes
    num_experts, num_rows, is_real = len(load.rows), load.segments.num_rows, load.where_real()
    x, left = (_random((num_rows, width), dtype, generator) for width in (num_inner, num_columns))
    x[~is_real] = torch.nan
    left[~is_real] = torch.nan
    weight = _random((num_experts, num_columns, num_inner), dtype, generator)
    want = torch.zeros(num_rows, num_columns, dtype=torch.float64)
    gradient = torch.zeros(num_experts, num_columns, num_inner, dtype=torch.float64)
    for expert, rows in enumerate(load.rows):
        want[rows] = x[rows].double() @ weight[expert].double().t()
        gradient[expert] = left[rows].double().t() @ x[rows].double()
    forms = {
        "grouped_gemm": weight.to(device).transpose(1, 2),
        "grouped_gemm, data gradient": weight.transpose(1, 2).contiguous().to(device),
    }
    for kernel, form in forms.items():
        got = poisoned(num_rows, num_columns, dtype=dtype, device=device)
        grouped_gemm(x.to(device), form, load.segments, out=got)
        wrong = _wrong(got, want, dtype, absolute=1.0) + int((got.cpu()[~is_real] != 0).sum())
        yield kernel, name, wrong
    got = poisoned(num_experts, num_columns, num_inner, dtype=dtype, device=device)
    grouped_gemm_weight_gradient(left.to(device), x.to(device), load.segments, out=got)
    yield "grouped_gemm_weight_gradient", name, _wrong(got, gradient, dtype, absolute=1.0)


def _experts(
    load: _Load,
    name: str,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    generator: torch.Generator,
    device: torch.device,
) -> Iterator[tuple[str, str, int]]:
    """The fused SwiGLU and its gradients, with rows gathered and weighted, and as `ExpertKernels`."""
    hidden, intermediate = sizes
    num_experts, num_rows, num_sources = len(load.rows), load.segments.num_rows, 11
    leaves = {
        "x": _random((num_sources, hidden), dtype, generator),
        "gate_up_proj": _random((num_experts, 2 * intermediate, hidden), dtype, generator),
        "down_proj": _random((num_experts, hidden, intermediate), dtype, generator),
        "row_weights": _random((num_rows, 1), torch.float32, generator).flatten(),
    }
    row_idx = torch.randint(0, num_sources, (num_rows,), generator=generator)
    grad = _random((num_rows, hidden), dtype, generator)
    wide = {key: leaf.double().requires_grad_() for key, leaf in leaves.items()}
    right = _swiglu(wide, load.rows, row_idx, num_rows)
    wants = torch.autograd.grad(right, list(wide.values()), grad.double())
    there = {key: leaf.to(device).requires_grad_() for key, leaf in leaves.items()}
    got = grouped_swiglu(
        there["x"],
        there["gate_up_proj"],
        there["down_proj"],
        segments=load.segments,
        row_idx=row_idx.to(device),
        row_weights=there["row_weights"],
    )
    yield "grouped_swiglu", name, _wrong(got, right, dtype, absolute=8.0)
    gots = torch.autograd.grad(got, list(there.values()), grad.to(device))
    for key, one, want in zip(leaves, gots, wants, strict=True):
        yield "grouped_swiglu, gradients", f"{name}, {key}", _wrong(one, want, dtype, absolute=8.0)

    kernels, offsets = TritonExpertKernels(), load.segments.offsets
    assert offsets is not None
    x = leaves["x"][row_idx]
    # Padding rows are an expert's own here, so they count.
    ends = [0, *offsets.tolist()]
    everybody = [torch.arange(begin, end) for begin, end in zip(ends[:-1], ends[1:], strict=True)]
    plain = {"x": x.double().requires_grad_(), **{key: wide[key] for key in ("gate_up_proj", "down_proj")}}
    right = _swiglu(plain, everybody, None, num_rows)
    wants = torch.autograd.grad(right, list(plain.values()), grad.double())
    weights = (there["gate_up_proj"].detach(), there["down_proj"].detach())
    mine = ExpertRows(num_rows, offsets)
    y, kept = kernels.outputs(x.to(device), mine, *weights, out=None, keeps_hidden=True)
    yield "TritonExpertKernels.outputs", name, _wrong(y, right, dtype, absolute=8.0)
    assert kept is not None
    needs = (True, True, True, False)
    found = kernels.gradients(
        grad.to(device), x.to(device), mine, weights[0], down_proj=weights[1], hidden=kept, needs=needs
    )
    for key, gradient, want in zip(plain, found[:3], wants, strict=True):
        assert gradient is not None
        yield "TritonExpertKernels.gradients", f"{name}, {key}", _wrong(gradient, want, dtype, absolute=8.0)


def _swiglu(leaves: dict[str, Tensor], rows: list[Tensor], row_idx: Tensor | None, num_rows: int) -> Tensor:
    source = leaves["x"] if row_idx is None else leaves["x"][row_idx]
    y = torch.zeros(num_rows, source.shape[1], dtype=source.dtype)
    for expert, mine in enumerate(rows):
        gate, up = (source[mine] @ leaves["gate_up_proj"][expert].t()).chunk(2, dim=1)
        output = (F.silu(gate) * up) @ leaves["down_proj"][expert].t()
        if "row_weights" in leaves:
            output = output * leaves["row_weights"][mine, None]
        y = y.index_put((mine,), output)
    return y

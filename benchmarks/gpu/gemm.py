"""The grouped GEMM against torch's own, a dense product of as many operations, and the rate at which weights are read.

N rows   H hidden   I intermediate   E experts of this rank

    forward           x [N, H] by gate_up [E, 2I, H]
    data gradient     g [N, 2I] by the same
    weight gradient   g.T by x, for each expert
    SwiGLU            gate and up, activation, down: all of an expert

The dense product multiplies the same rows by one matrix (weight gradient: sums over all rows into one matrix). Decode
steps are also held against reading every weight once that has rows, at the rate of a device copy, which reads and
writes. Answers are compared with one torch product per expert, as far as rounding allows, in memory that was poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from answers import poisoned, wrong_sums
from context import Context
from report import compared, unmeasured
from sizes import Model, product_flops, row_counts, swiglu_flops, weight_bytes
from timing import Timing
from torch import Tensor

from moecomm.kernels.experts import ExpertRows
from moecomm.kernels.torch_experts import TorchExpertKernels
from moecomm.kernels.triton.grouped_gemm import grouped_gemm, grouped_gemm_weight_gradient
from moecomm.kernels.triton.grouped_swiglu import TritonExpertKernels
from moecomm.kernels.triton.segments import Segments

__all__ = ["Operands", "dtype_of", "make_operands", "run"]

# A rounding of the result on each side, and of partial sums in torch's; then also of the activation.
_PLAIN = {"relative": 2.0**-7, "absolute": 1e-2}
_FUSED = {"relative": 2.0**-6, "absolute": 5e-2}


def dtype_of(context: Context) -> torch.dtype:
    """bf16; fp16 where products are interpreted, which Triton gets wrong in bf16."""
    return torch.bfloat16 if context.timer.is_gpu else torch.float16


@dataclass
class Operands:
    """Rows and weights of one rank's experts, and results to write into."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    counts: list[int]
    ends: Tensor
    grad: Tensor

    @property
    def segments(self) -> Segments:
        return Segments.expert_major(self.x.shape[0], self.ends)

    def by_expert(self, *rows: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """The rows of each expert, of each tensor."""
        return zip(*(torch.split(tensor, self.counts) for tensor in rows), strict=True)


def make_operands(context: Context, model: Model, counts: list[int]) -> Operands:
    """Random ones; weights are small enough for sums near one."""
    generator = torch.Generator(context.device).manual_seed(context.seed)
    num_rows, num_experts = sum(counts), len(counts)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype_of(context), device=context.device)
        return tensor.normal_(0.0, scale, generator=generator)

    return Operands(
        x=random(num_rows, model.hidden),
        gate_up=random(num_experts, 2 * model.intermediate, model.hidden, scale=model.hidden**-0.5),
        down=random(num_experts, model.hidden, model.intermediate, scale=model.intermediate**-0.5),
        counts=counts,
        ends=torch.tensor(counts).cumsum(0).to(context.device, torch.int32),
        grad=random(num_rows, 2 * model.intermediate),
    )


@dataclass(frozen=True)
class _Product:
    """One operation: ours, torch's, the dense one, what is right, and how near one must be."""

    name: str
    ours: Callable[[], Tensor]
    grouped: Callable[[], Tensor]
    dense: Callable[[], object]
    right: Callable[[], Tensor]
    flops: int
    tolerance: dict[str, float]
    goal: float | None = None


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.t()).chunk(2, dim=1)
    return (F.silu(gate) * up) @ down.t()


def _products(operands: Operands, *, has_backward: bool) -> list[_Product]:
    x, gate_up, down, grad = operands.x, operands.gate_up, operands.down, operands.grad
    ends, segments = operands.ends, operands.segments
    transposed = gate_up.transpose(1, 2)
    (num_rows, hidden), (num_experts, columns, _) = x.shape, gate_up.shape
    flops = product_flops(num_rows, hidden, columns)
    out = poisoned(num_rows, columns, dtype=x.dtype, device=x.device)
    back = poisoned(num_rows, hidden, dtype=x.dtype, device=x.device)
    ours, torchs = TritonExpertKernels(), TorchExpertKernels()

    def outputs(kernels: TritonExpertKernels | TorchExpertKernels) -> Tensor:
        return kernels.outputs(x, ExpertRows(num_rows, ends), gate_up, down, out=None, keeps_hidden=False)[0]

    products = [
        _Product(
            "forward",
            lambda: grouped_gemm(x, transposed, segments, out=out),
            lambda: F.grouped_mm(x, transposed, offs=ends),
            lambda: torch.mm(x, gate_up[0].t(), out=out),
            lambda: torch.cat([rows @ w.t() for (rows,), w in zip(operands.by_expert(x), gate_up, strict=True)]),
            flops,
            _PLAIN,
            0.85,
        ),
        _Product(
            "SwiGLU",
            lambda: outputs(ours),
            lambda: outputs(torchs),
            lambda: torch.mm(torch.mm(x, gate_up[0].t())[:, : columns // 2], down[0].t()),
            lambda: torch.cat(
                [_swiglu(rows, w, v) for (rows,), w, v in zip(operands.by_expert(x), gate_up, down, strict=True)]
            ),
            swiglu_flops(num_rows, hidden, columns // 2),
            _FUSED,
        ),
    ]
    if not has_backward:
        return products
    matrices = poisoned(num_experts, columns, hidden, dtype=x.dtype, device=x.device)
    products.insert(
        1,
        _Product(
            "data gradient",
            lambda: grouped_gemm(grad, gate_up, segments, out=back),
            lambda: F.grouped_mm(grad, gate_up, offs=ends),
            lambda: torch.mm(grad, gate_up[0], out=back),
            lambda: torch.cat([rows @ w for (rows,), w in zip(operands.by_expert(grad), gate_up, strict=True)]),
            flops,
            _PLAIN,
        ),
    )
    products.insert(
        2,
        _Product(
            "weight gradient",
            lambda: grouped_gemm_weight_gradient(grad, x, segments, out=matrices),
            lambda: F.grouped_mm(grad.t(), x, offs=ends),
            lambda: torch.mm(grad.t(), x, out=matrices[0]),
            lambda: torch.stack([left.t() @ right for left, right in operands.by_expert(grad, x)]),
            flops,
            _PLAIN,
            0.8,
        ),
    )
    return products


def _train(context: Context, shape: str, product: _Product, *, has_goals: bool) -> None:
    """Two lines: against the dense product, against grouped_mm."""
    wrong = wrong_sums(product.ours(), product.right(), **product.tolerance)
    timing = context.timer.measure(product.ours, seconds=context.case_seconds)
    goals = (product.goal, 1.0 if product.name == "forward" else None) if has_goals else (None, None)
    _against_rivals(context, product.name, shape, product, timing, wrong, goals)


def _against_rivals(
    context: Context,
    what: str,
    shape: str,
    product: _Product,
    timing: Timing,
    wrong: int,
    goals: tuple[float | None, float | None] = (None, None),
) -> None:
    rivals: list[tuple[str, Callable[[], object], float | None]] = [
        ("dense matmul of equal FLOPs", product.dense, goals[0]),
        ("torch grouped_mm", product.grouped, goals[1]),
    ]
    for name, rival, goal in rivals:
        try:
            bound = context.timer.measure(rival, seconds=context.case_seconds)
        except (RuntimeError, AttributeError) as error:
            note = f"not measured against {name}: {error}"
            context.add(unmeasured(context.part, what, shape, note))
            continue
        context.add(
            compared(
                context.part,
                what,
                shape,
                timing,
                bound=name,
                bound_us=bound.median_us,
                goal=goal,
                flops=product.flops,
                wrong=wrong,
            )
        )


def _decode(context: Context, shape: str, product: _Product, operands: Operands, *, has_goals: bool) -> None:
    """Three lines: against reading the weights of the experts that have rows, and against both rivals."""
    weights = [operands.gate_up] if product.name == "forward" else [operands.gate_up, operands.down]
    num_used = sum(count > 0 for count in operands.counts)
    num_bytes = sum(weight_bytes(weight[:num_used].numel(), weight.element_size()) for weight in weights)
    wrong = wrong_sums(product.ours(), product.right(), **product.tolerance)
    timing = context.timer.measure(product.ours, seconds=context.case_seconds)
    what = f"{product.name}, decode"
    context.add(
        compared(
            context.part,
            what,
            shape,
            timing,
            bound="weight bytes at copy rate",
            bound_us=context.timer.copy(num_bytes, seconds=context.case_seconds).median_us,
            goal=0.8 if product.name == "forward" and has_goals else None,
            num_bytes=num_bytes,
            wrong=wrong,
        )
    )
    _against_rivals(context, what, shape, product, timing, wrong)


def run(context: Context) -> None:
    """The goals' cases first: the first model, balanced, then decode; then all others."""
    sizes = context.sizes
    for model in sizes.models:
        for load in sizes.loads[:1]:
            _run_training(context, model, load, has_goals=model is sizes.models[0])
        for num_rows in sizes.decode_rows:
            _run_decode(context, model, num_rows, sizes.loads[0], has_goals=True)
    for model in sizes.models:
        for load in sizes.loads[1:]:
            _run_training(context, model, load, has_goals=False)
            for num_rows in sizes.decode_rows:
                _run_decode(context, model, num_rows, load, has_goals=False)


def _run_training(context: Context, model: Model, load: str, *, has_goals: bool) -> None:
    sizes = context.sizes
    counts = row_counts(load, sizes.train_experts * sizes.train_rows, sizes.train_experts)
    shape = f"{model.name}: {len(counts)} experts x {sizes.train_rows} rows, {load}"

    def case() -> None:
        for product in _products(make_operands(context, model, counts), has_backward=True):
            context.attempt(product.name, shape, partial(_train, context, shape, product, has_goals=has_goals))

    context.attempt("training", shape, case)


def _run_decode(context: Context, model: Model, num_rows: int, load: str, *, has_goals: bool) -> None:
    num_experts = max(1, model.num_experts // context.sizes.num_ranks)
    shape = f"{model.name}: {num_experts} experts x {num_rows} rows, {load}"

    def case() -> None:
        operands = make_operands(context, model, row_counts(load, num_rows * num_experts, num_experts))
        for product in _products(operands, has_backward=False):
            decode = partial(_decode, context, shape, product, operands, has_goals=has_goals)
            context.attempt(product.name, shape, decode)

    context.attempt("decode", shape, case)

"""Experts in the forms that slab and flat dispatches give, against the same experts one by one in fp64."""

import torch
import torch.nn.functional as F

from moecomm.nn import GroupedExperts

EXPERTS, HIDDEN, INTERMEDIATE = 4, 32, 24
COUNTS = {"mixed": [5, 0, 9, 2], "full": [9, 9, 9, 9], "empty": [0, 0, 0, 0], "one": [0, 0, 1, 0]}
CAPACITY = 9
FLATS = ["mixed", "all", "none", "duplicates", "one expert"]
TOKENS, TOPK = 11, 3


def make_experts(backend, dtype, hidden=HIDDEN, intermediate=INTERMEDIATE):
    return GroupedExperts(EXPERTS, hidden, intermediate, std=0.3, seed=1, backend=backend, dtype=dtype)


def ids_of(kind):
    """`[TOKENS, TOPK]` local ids, -1 = elsewhere."""
    generator = torch.Generator().manual_seed(len(kind))
    ids = torch.randint(0, EXPERTS, (TOKENS, TOPK), generator=generator, dtype=torch.int32)
    if kind == "mixed":
        ids = torch.stack([torch.randperm(EXPERTS + 3, generator=generator)[:TOPK] for _ in range(TOKENS)]).int()
        ids[ids >= EXPERTS] = -1
        ids[4] = -1
    elif kind == "none":
        ids[:] = -1
    elif kind == "duplicates":
        ids[:, 1] = ids[:, 0]
    elif kind == "one expert":
        ids[:] = -1
        ids[:, 2] = 2
    return ids


def doubles_of(experts):
    return [weight.detach().double().requires_grad_() for weight in (experts.gate_up_proj, experts.down_proj)]


def one_expert(x, gate_up_proj, down_proj):
    gate, up = (x @ gate_up_proj.t()).chunk(2, dim=1)
    return (F.silu(gate) * up) @ down_proj.t()


def slab_oracle(x, counts, gate_up_proj, down_proj):
    """`[E, capacity, H]` fp64; padding is zero."""
    outputs = []
    for expert, count in enumerate(counts):
        y = one_expert(x[expert, :count], gate_up_proj[expert], down_proj[expert])
        outputs.append(torch.cat([y, torch.zeros_like(x[expert, count:])]))
    return torch.stack(outputs)


def flat_oracle(x, ids, weights, gate_up_proj, down_proj):
    """`[N, H]` fp64, sums over the experts of each row."""
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        every = one_expert(x, gate_up_proj[expert], down_proj[expert])
        weight = torch.where(ids == expert, weights, 0).sum(1, keepdim=True)
        y = y + torch.where((ids == expert).any(1, keepdim=True), every * weight, 0)
    return y


def assert_close(have, want, tolerance, name):
    difference = (have.detach().double() - want.detach()).norm()
    assert difference <= tolerance * max(want.norm().item(), 1e-30), f"{name}: {difference} of {want.norm()}"


def check_slab(backend, dtype, tolerance, kind, *, with_out=False, hidden=HIDDEN, capacity=CAPACITY):
    """Outputs and gradients; padding holds NaN, and in `out` stays what it was."""
    counts = [min(count, capacity) for count in COUNTS[kind]]
    experts = make_experts(backend, dtype, hidden)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXPERTS, capacity, hidden, generator=generator).to(dtype)
    is_real = torch.arange(capacity) < torch.tensor(counts)[:, None]
    x[~is_real] = float("nan")
    leaf = x.clone().requires_grad_()
    out = torch.full_like(x, 7.0) if with_out else None
    y = experts(leaf, num_tokens_per_expert=torch.tensor(counts, dtype=torch.int32), out=out)
    assert experts.chosen_backend == backend
    assert out is None or y.data_ptr() == out.data_ptr()
    assert (y[~is_real] == (7.0 if with_out else 0.0)).all()
    grad = torch.randn(x.shape, generator=generator).to(dtype)
    y.backward(torch.where(is_real[..., None], grad, float("nan")))
    double, *weights = x.double().requires_grad_(), *doubles_of(experts)
    want = slab_oracle(double, counts, *weights)
    torch.where(is_real[..., None], want, 0).backward(torch.where(is_real[..., None], grad, 0).double())
    assert_close(y[is_real], want[is_real], tolerance, "y")
    assert (leaf.grad[~is_real] == 0).all()
    assert_close(leaf.grad[is_real], double.grad[is_real], tolerance, "x")
    for name, have, wide in zip(("gate_up", "down"), experts.parameters(), weights, strict=True):
        assert_close(have.grad, wide.grad, tolerance, name)
        for expert, count in enumerate(counts):
            assert count or (have.grad[expert] == 0).all()


def check_flat(backend, dtype, tolerance, kind, *, is_weighted=True, with_out=False, hidden=HIDDEN):
    """Outputs and gradients, those of the weights too; weights of no choice hold NaN."""
    ids = ids_of(kind)
    experts = make_experts(backend, dtype, hidden)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, hidden, generator=generator).to(dtype)
    weights = torch.rand(TOKENS, TOPK, generator=generator, dtype=torch.float64 if dtype == torch.float64 else None)
    leaf = x.clone().requires_grad_()
    weight_leaf = weights.masked_fill(ids < 0, float("nan")).requires_grad_() if is_weighted else None
    out = torch.full_like(x, 7.0) if with_out else None
    y = experts(leaf, topk_idx=ids, topk_weights=weight_leaf, out=out)
    assert experts.chosen_backend == backend
    assert out is None or y.data_ptr() == out.data_ptr()
    grad = torch.randn(x.shape, generator=generator).to(dtype)
    y.backward(grad)
    double, *projections = x.double().requires_grad_(), *doubles_of(experts)
    wide = (weights.double() if is_weighted else torch.ones(ids.shape).double()).requires_grad_()
    want = flat_oracle(double, ids, wide, *projections)
    want.backward(grad.double())
    assert y.dtype == leaf.grad.dtype == dtype
    assert_close(y, want, tolerance, "y")
    assert_close(leaf.grad, double.grad, tolerance, "x")
    for name, have, one in zip(("gate_up", "down"), experts.parameters(), projections, strict=True):
        assert_close(have.grad, one.grad, tolerance, name)
    if weight_leaf is not None:
        assert weight_leaf.grad.dtype == weights.dtype
        assert (weight_leaf.grad[ids < 0] == 0).all()
        assert_close(weight_leaf.grad, wide.grad, tolerance, "weights")
    with torch.no_grad():
        again = experts(x, topk_idx=ids.long(), topk_weights=weight_leaf)
    assert torch.equal(again, y)

"""The router: formulas, choice, masks, losses, dtypes, gradients."""

import pytest
import torch

from moecomm.nn import TopKRouter
from moecomm.testing import launch


def make(hidden=12, num_experts=8, num_topk=2, *, std=0.3, seed=0, **options):
    router = TopKRouter(hidden, num_experts, num_topk, **options)
    torch.nn.init.normal_(router.weight, std=std, generator=torch.Generator().manual_seed(seed))
    return router


def rows(num_tokens, hidden=12, *, seed=1, dtype=torch.float32):
    return torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_follow_the_formula(score, renormalize):
    router = make(score=score, renormalize=renormalize, scaling_factor=2.5)
    x = rows(20)
    out = router(x)
    logits = x @ router.weight.t()
    scores = torch.softmax(logits, 1) if score == "softmax" else torch.sigmoid(logits)
    best = scores.sort(dim=1, descending=True)
    expected = best.values[:, :2]
    if renormalize:
        expected = expected / expected.sum(1, keepdim=True)
    assert torch.equal(out.topk_idx, best.indices[:, :2])
    assert out.topk_idx.dtype == torch.int64
    assert out.topk_weights.dtype == torch.float32
    torch.testing.assert_close(out.topk_weights, 2.5 * expected)
    torch.testing.assert_close(out.logits, logits)
    torch.testing.assert_close(out.scores, scores)
    assert torch.equal(out.num_tokens_per_expert, torch.bincount(out.topk_idx.view(-1), minlength=8))


def test_softmax_renormalized_is_a_softmax_over_the_chosen_logits():
    router = make(use_gate_bias=True)
    torch.nn.init.normal_(router.bias, std=0.5)
    out = router(rows(30))
    chosen = out.logits.gather(1, out.topk_idx)
    torch.testing.assert_close(out.topk_weights, chosen.softmax(1))


def test_selection_bias_changes_the_choice_and_never_the_weights():
    router = make(score="sigmoid", use_selection_bias=True)
    x = rows(40)
    before = router(x)
    router.selection_bias[5] = 10.0
    after = router(x)
    assert (after.topk_idx[:, 0] == 5).all()
    assert not (before.topk_idx[:, 0] == 5).all()
    chosen = after.scores.gather(1, after.topk_idx)
    torch.testing.assert_close(after.topk_weights, chosen / chosen.sum(1, keepdim=True))
    assert "selection_bias" in router.state_dict()
    assert not router.selection_bias.requires_grad


def test_selection_bias_moves_towards_balance():
    router = make(use_selection_bias=True)
    counts = torch.tensor([10, 0, 4, 4, 4, 4, 4, 2])
    router.update_selection_bias(counts, rate=0.5)
    assert router.selection_bias.tolist() == [-0.5, 0.5, 0, 0, 0, 0, 0, 0.5]
    with pytest.raises(ValueError, match="use_selection_bias=True"):
        make().update_selection_bias(counts)
    with pytest.raises(ValueError, match=r"\[8\], got \[3\]"):
        router.update_selection_bias(counts[:3])


@pytest.mark.parametrize(("score", "num_best"), [("sigmoid", 2), ("softmax", 1)])
def test_group_limited_choice(score, num_best):
    router = make(num_topk=3, score=score, num_expert_groups=4, num_limited_groups=2, use_selection_bias=True)
    router.selection_bias.copy_(torch.linspace(-0.9, -0.1, 8))
    out = router(rows(50))
    for ranking, chosen in zip((out.scores + router.selection_bias).tolist(), out.topk_idx.tolist(), strict=True):
        worth = [sum(sorted(ranking[2 * group : 2 * group + 2])[-num_best:]) for group in range(4)]
        groups = sorted(range(4), key=worth.__getitem__)[-2:]
        allowed = [expert for expert in range(8) if expert // 2 in groups]
        assert chosen == sorted(allowed, key=ranking.__getitem__, reverse=True)[:3]


@pytest.mark.parametrize("with_losses", [False, True])
def test_padding_goes_nowhere_and_may_hold_nan(with_losses):
    options = {"balance_coefficient": 0.1, "z_coefficient": 0.01} if with_losses else {}
    router = make(**options)
    x = rows(9)
    mask = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    x[mask] = float("nan")
    x.requires_grad_()
    out = router(x, mask)
    assert (out.topk_idx[mask] == -1).all()
    assert (out.topk_weights[mask] == 0).all()
    assert out.num_tokens_per_expert.sum() == 5 * 2
    ((out.topk_weights * torch.randn(9, 2)).sum() + out.balance_loss + out.z_loss).backward()
    assert (x.grad[mask] == 0).all()

    alone = make(**options)
    y = x.detach()[~mask].requires_grad_()
    kept = alone(y)
    torch.testing.assert_close(out.topk_weights[~mask], kept.topk_weights)
    torch.testing.assert_close(out.balance_loss, kept.balance_loss)
    torch.testing.assert_close(out.z_loss, kept.z_loss)
    assert torch.isfinite(router.weight.grad).all()


def test_the_gate_is_fp32_under_autocast_and_for_bf16_rows():
    router = make(hidden=64, num_experts=64, num_topk=8)
    x = rows(500, 64, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x.float(), router.weight)
    with torch.autocast("cpu", torch.bfloat16):
        out = router(x)
    assert out.logits.dtype == torch.float32
    assert torch.equal(out.logits, expected)
    in_bf16 = torch.nn.functional.linear(x, router.weight.bfloat16()).float().topk(8, dim=1).indices
    moved = (in_bf16.sort(1).values != out.topk_idx.sort(1).values).any(1).float().mean()
    assert moved > 0.02, "the case must be one that a bf16 gate gets wrong"
    assert router.to(torch.bfloat16)(x).logits.dtype == torch.float32


def test_losses_follow_their_formulas():
    router = make(score="sigmoid", balance_coefficient=0.5, z_coefficient=0.25)
    out = router(rows(25))
    probabilities = out.scores / out.scores.sum(1, keepdim=True)
    shares = out.num_tokens_per_expert / (25 * 2)
    torch.testing.assert_close(out.balance_loss, 0.5 * 8 * (shares * probabilities.mean(0)).sum())
    torch.testing.assert_close(out.z_loss, 0.25 * (out.logits.exp().sum(1).log() ** 2).mean())


def test_a_perfect_balance_costs_one():
    router = TopKRouter(8, 8, 1, balance_coefficient=1.0)
    with torch.no_grad():
        router.weight.copy_(50 * torch.eye(8))
    assert router(torch.eye(8)).balance_loss.item() == pytest.approx(1.0, abs=1e-5)
    assert router(torch.eye(8)[:1].expand(8, 8)).balance_loss.item() == pytest.approx(8.0, abs=1e-4)


def losses_of_a_part(group, splits):
    router = make(balance_coefficient=0.5, z_coefficient=0.1, score="sigmoid", loss_group=group, dtype=torch.float64)
    part = rows(24, dtype=torch.float64).split(splits)[group.rank]
    mask = torch.zeros(part.shape[0], dtype=torch.bool)
    mask[1::5] = True
    out = router(part, mask)
    (out.balance_loss + out.z_loss).backward()
    return out.balance_loss.detach(), out.z_loss.detach(), router.weight.grad, mask


@pytest.mark.parametrize("splits", [[12, 12], [24, 0], [5, 0, 12, 7]])
def test_losses_do_not_depend_on_how_the_batch_is_spread(splits):
    parts = launch(losses_of_a_part, len(splits), splits)
    whole = make(balance_coefficient=0.5, z_coefficient=0.1, score="sigmoid", dtype=torch.float64)
    out = whole(rows(24, dtype=torch.float64), torch.cat([mask for *_, mask in parts]))
    (out.balance_loss + out.z_loss).backward()
    for position, expected in enumerate((out.balance_loss, out.z_loss, whole.weight.grad)):
        mean = torch.stack([part[position] for part in parts]).mean(0)
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-12, atol=1e-14)


def test_no_tokens_keep_the_graph_and_give_zero_gradients():
    router = make(balance_coefficient=1.0, z_coefficient=1.0)
    out = router(rows(0))
    assert out.topk_idx.shape == (0, 2)
    assert out.balance_loss == 0
    assert out.z_loss == 0
    (out.topk_weights.sum() + out.balance_loss + out.z_loss).backward()
    assert torch.equal(router.weight.grad, torch.zeros_like(router.weight))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradients_in_fp64(score):
    router = make(score=score, balance_coefficient=0.3, z_coefficient=0.2, scaling_factor=1.5, dtype=torch.float64)
    x = rows(6, dtype=torch.float64).requires_grad_()

    def outputs(x, weight):
        out = torch.func.functional_call(router, {"weight": weight}, (x,))
        return out.topk_weights, out.balance_loss, out.z_loss

    assert torch.autograd.gradcheck(outputs, (x, router.weight))


def test_leading_dims_and_compile():
    router = make(balance_coefficient=0.1, use_selection_bias=True, num_expert_groups=4, num_limited_groups=2)
    x = rows(12).view(3, 4, 12)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 2] = True
    eager = router(x, mask)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")(x, mask)
    assert eager.topk_idx.shape == (12, 2)
    assert torch.equal(eager.topk_idx, compiled.topk_idx)
    torch.testing.assert_close(eager.topk_weights, compiled.topk_weights)
    torch.testing.assert_close(eager.balance_loss, compiled.balance_loss)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 8, 2), {}, "got 0 and 8"),
        ((4, 8, 9), {}, "within 1 .. num_experts = 8, got 9"),
        ((4, 8, 2), {"score": "relu"}, "got 'relu'"),
        ((4, 8, 2), {"num_expert_groups": 4}, "together, got 4 and None"),
        ((4, 8, 2), {"num_expert_groups": 3, "num_limited_groups": 1}, "divide num_experts = 8, got 3"),
        ((4, 8, 2), {"num_expert_groups": 4, "num_limited_groups": 5}, "1 .. num_expert_groups = 4, got 5"),
        (
            (4, 8, 3),
            {"num_expert_groups": 4, "num_limited_groups": 1},
            "groups of 2 experts cannot give num_topk = 3",
        ),
    ],
)
def test_constructor_says_what_does_not_fit(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        TopKRouter(*arguments, **options)


def test_forward_says_what_does_not_fit():
    router = make()
    with pytest.raises(ValueError, match=r"hidden = 12\], got \[3, 5\]"):
        router(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"bool \[3\], got torch.int64 \[3\]"):
        router(torch.zeros(3, 12), torch.zeros(3, dtype=torch.int64))

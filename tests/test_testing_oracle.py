"""The oracle, by hand-worked lists."""

import pytest
import torch

from moecomm.testing import reference_combine, reference_dispatch

# Two ranks, five experts: rank 0 hosts 0, 1, 2 and rank 1 hosts 3, 4.
#   rank 0: token 0 -> 3, 0      token 1 -> 1, -1      token 2 -> 0, 0 (twice the same)
#   rank 1: token 0 -> 4, 1      token 1 -> -1, -1
IDX = [torch.tensor([[3, 0], [1, -1], [0, 0]]), torch.tensor([[4, 1], [-1, -1]])]
X = [torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]), torch.tensor([[4.0, 40.0], [5.0, 50.0]])]
NAN = float("nan")
LAYOUTS = ["expert_major", "flat"]
W = [torch.tensor([[0.5, 0.25], [0.125, NAN], [2.0, 4.0]]), torch.tensor([[8.0, 16.0], [NAN, NAN]])]


def dispatch(rank, **options):
    return reference_dispatch(X, IDX, W, num_experts=5, rank=rank, **options)


def test_expert_major_on_rank_0():
    got = dispatch(0)
    # Expert 0: rank 0 token 0 (k=1), token 2 (k=0), token 2 (k=1); expert 1: rank 0 token 1, rank 1 token 0;
    # expert 2: none.
    assert got.sources.tolist() == [[0, 0, 1], [0, 2, 0], [0, 2, 1], [0, 1, 0], [1, 0, 1]]
    assert got.x.tolist() == [[1, 10], [3, 30], [3, 30], [2, 20], [4, 40]]
    assert got.topk_weights.tolist() == [0.25, 2.0, 4.0, 0.125, 16.0]
    assert got.topk_idx is None
    assert got.num_tokens_per_expert.tolist() == [3, 2, 0]
    assert got.offsets.tolist() == [3, 5, 5]
    assert got.num_tokens_per_expert.dtype == got.offsets.dtype == torch.int32


def test_expert_major_on_rank_1():
    got = dispatch(1)
    assert got.sources.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert got.x.tolist() == [[1, 10], [4, 40]]
    assert got.topk_weights.tolist() == [0.5, 8.0]
    assert got.num_tokens_per_expert.tolist() == [1, 1]


def test_alignment_pads_each_expert_with_zero_rows():
    got = dispatch(0, expert_alignment=4)
    zero = [0.0, 0.0]
    assert got.x.tolist() == [[1, 10], [3, 30], [3, 30], zero, [2, 20], [4, 40], zero, zero]
    assert got.topk_weights.tolist() == [0.25, 2.0, 4.0, 0.0, 0.125, 16.0, 0.0, 0.0]
    assert got.num_tokens_per_expert.tolist() == [3, 2, 0]
    assert got.offsets.tolist() == [4, 8, 8]
    assert got.sources[3].tolist() == [-1, -1, -1]


def test_flat_has_one_row_per_token_and_rank():
    got = dispatch(0, layout="flat")
    assert got.sources.tolist() == [[0, 0, -1], [0, 1, -1], [0, 2, -1], [1, 0, -1]]
    assert got.x.tolist() == [[1, 10], [2, 20], [3, 30], [4, 40]]
    assert got.topk_idx.tolist() == [[-1, 0], [1, -1], [0, 0], [-1, 1]]
    assert got.topk_weights.tolist() == [[0, 0.25], [0.125, 0], [2, 4], [0, 16]]
    assert got.num_tokens_per_expert.tolist() == [3, 2, 0]
    assert got.topk_idx.dtype == torch.int32
    assert got.offsets is None
    other = dispatch(1, layout="flat")
    assert other.topk_idx.tolist() == [[0, -1], [1, -1]]
    assert other.x.tolist() == [[1, 10], [4, 40]]


def test_slab_gives_each_expert_as_many_rows():
    got = dispatch(0, layout="slab", capacity=4)
    zero = [0.0, 0.0]
    assert got.x.tolist() == [
        [[1, 10], [3, 30], [3, 30], zero],
        [[2, 20], [4, 40], zero, zero],
        [zero, zero, zero, zero],
    ]
    assert got.topk_weights.tolist() == [[0.25, 2.0, 4.0, 0.0], [0.125, 16.0, 0.0, 0.0], [0.0] * 4]
    assert got.num_tokens_per_expert.tolist() == [3, 2, 0]
    assert got.offsets is None
    ys = [torch.full((3, 4, 1), NAN), torch.full((2, 4, 1), NAN)]
    ys[0][0, :3, 0], ys[0][1, :2, 0] = torch.tensor([1.0, 10.0, 100.0]), torch.tensor([1000.0, 1e4])
    ys[1][0, 0], ys[1][1, 0] = 1e5, 1e6
    home = reference_combine(ys, IDX, num_experts=5, rank=0, layout="slab", capacity=4)
    assert home.tolist() == [[100001.0], [1000.0], [110.0]]
    with pytest.raises(ValueError, match="capacity: 3 routes lead to one expert, and there are 2 rows"):
        dispatch(0, layout="slab", capacity=2)


def test_combine_sums_every_route_of_a_token():
    # Rows in the order of the dispatch above; each expert output is told apart by its power of ten.
    ys = [torch.tensor([[1.0], [10.0], [100.0], [1000.0], [1e4]]), torch.tensor([[1e5], [1e6]])]
    home = [reference_combine(ys, IDX, num_experts=5, rank=rank) for rank in range(2)]
    assert home[0].tolist() == [[100001.0], [1000.0], [110.0]]
    assert home[1].tolist() == [[1010000.0], [0.0]]


def test_combine_weighs_at_home_and_ignores_weights_of_no_expert():
    ys = [torch.tensor([[1.0], [10.0], [100.0], [1000.0], [1e4]]), torch.tensor([[1e5], [1e6]])]
    home = [reference_combine(ys, IDX, num_experts=5, rank=r, topk_weights=W[r]) for r in range(2)]
    assert home[0].tolist() == [[0.5 * 1e5 + 0.25], [125.0], [20.0 + 400.0]]
    assert home[1].tolist() == [[8e6 + 16e4], [0.0]]


def test_combine_skips_the_padding_rows():
    pad = NAN
    ys = [
        torch.tensor([[1.0], [10.0], [100.0], [pad], [1000.0], [1e4], [pad], [pad]]),
        torch.tensor([[1e5], [pad], [pad], [pad], [1e6], [pad], [pad], [pad]]),
    ]
    home = reference_combine(ys, IDX, num_experts=5, rank=0, expert_alignment=4)
    assert home.tolist() == [[100001.0], [1000.0], [110.0]]


def test_flat_combine_sums_ranks():
    ys = [torch.tensor([[1.0], [10.0], [100.0], [1000.0]]), torch.tensor([[1e4], [1e5]])]
    assert reference_combine(ys, IDX, num_experts=5, rank=0, layout="flat").tolist() == [[10001.0], [10.0], [100.0]]
    assert reference_combine(ys, IDX, num_experts=5, rank=1, layout="flat").tolist() == [[101000.0], [0.0]]
    with pytest.raises(ValueError, match="topk_weights"):
        reference_combine(ys, IDX, num_experts=5, rank=0, layout="flat", topk_weights=W[0])


def test_the_order_of_the_sum_is_ascending_k_not_row_order():
    # 1 + 2**-24 rounds to 1 (tie to even), but 2**-24 + 2**-24 + 1 does not lose it: only the order tells them apart.
    small = 2.0**-24
    idx = [torch.tensor([[2, 0, 1]])]
    received = reference_dispatch([torch.zeros(1, 1)], idx, num_experts=3, rank=0)
    assert received.sources[:, 2].tolist() == [1, 2, 0]
    ys = [torch.tensor([[small], [small], [1.0]])]  # the 1.0 is the route of k = 0
    assert reference_combine(ys, idx, num_experts=3, rank=0).item() == 1.0
    idx = [torch.tensor([[0, 1, 2]])]  # now it is the route of k = 2
    assert reference_combine(ys, idx, num_experts=3, rank=0).item() == 1.0 + 2 * small


def test_half_precision_is_rounded_once():
    # In bfloat16 256 + 1 rounds to 256 at every step; summed in float32 and rounded once, 256 + 1 + 1 = 258.
    idx = [torch.tensor([[0, 1, 2]])]
    ys = [torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)]
    out = reference_combine(ys, idx, num_experts=3, rank=0)
    assert out.dtype == torch.bfloat16
    assert out.item() == 258.0


def test_double_is_summed_in_double():
    idx = [torch.tensor([[0, 1]])]
    ys = [torch.tensor([[1.0], [2.0**-40]], dtype=torch.float64)]
    assert reference_combine(ys, idx, num_experts=2, rank=0).item() == 1.0 + 2.0**-40


def test_product_and_sum_are_rounded_apart():
    # w * y = 1 + 2**-11 + 2**-24 rounds to 1 + 2**-11; a fused multiply-add would keep the 2**-24.
    w = 1.0 + 2.0**-12
    idx = [torch.tensor([[0, 1]])]
    ys = [torch.tensor([[-(1.0 + 2.0**-11)], [w]])]
    weights = torch.tensor([[1.0, w]])
    assert reference_combine(ys, idx, num_experts=2, rank=0, topk_weights=weights).item() == 0.0


def test_fewer_experts_than_ranks_and_no_tokens():
    idx = [torch.zeros(0, 2, dtype=torch.int32), torch.tensor([[1, 0]], dtype=torch.int32), torch.full((1, 2), -1)]
    xs = [torch.zeros(0, 3), torch.ones(1, 3), torch.ones(1, 3)]
    received = [
        reference_dispatch(xs, idx, num_experts=2, rank=rank, layout=lay) for rank in range(3) for lay in LAYOUTS
    ]
    assert [one.x.shape[0] for one in received] == [1, 1, 1, 1, 0, 0]
    assert received[4].offsets.shape == (0,)
    ys = [torch.ones(1, 3), torch.ones(1, 3), torch.zeros(0, 3)]
    assert reference_combine(ys, idx, num_experts=2, rank=0).shape == (0, 3)
    assert reference_combine(ys, idx, num_experts=2, rank=1).tolist() == [[2.0] * 3]
    assert reference_combine(ys, idx, num_experts=2, rank=2).tolist() == [[0.0] * 3]


def test_bytes_pass_through():
    x = [torch.arange(6, dtype=torch.uint8).reshape(3, 2), torch.arange(4, dtype=torch.uint8).reshape(2, 2)]
    assert reference_dispatch(x, IDX, num_experts=5, rank=1).x.tolist() == [[0, 1], [0, 1]]


def test_gradients_reach_rows_and_weights_and_are_zero_at_minus_one():
    xs = [x.double().requires_grad_() for x in X]
    ws = [w.clone().requires_grad_() for w in W]
    received = [reference_dispatch(xs, IDX, num_experts=5, rank=rank) for rank in range(2)]
    out = [
        reference_combine([r.x * (1 + i) for i, r in enumerate(received)], IDX, num_experts=5, rank=r, topk_weights=w)
        for r, w in enumerate(ws)
    ]
    (out[0].sum() + out[1].sum()).backward()
    # Token 0 of rank 0: weight 0.5 on rank 1 (factor 2) and 0.25 on rank 0 (factor 1).
    assert xs[0].grad.tolist() == [[1.25, 1.25], [0.125, 0.125], [6.0, 6.0]]
    assert ws[0].grad.tolist() == [[22.0, 11.0], [22.0, 0.0], [33.0, 33.0]]
    assert ws[1].grad.tolist() == [[88.0, 44.0], [0.0, 0.0]]
    assert xs[1].grad.tolist() == [[32.0, 32.0], [0.0, 0.0]]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="'rows'"):
        reference_dispatch(X, IDX, num_experts=5, rank=0, layout="rows")
    with pytest.raises(ValueError, match=r"ys\[1\] must have 2 rows, got 3"):
        reference_combine([torch.zeros(5, 1), torch.zeros(3, 1)], IDX, num_experts=5, rank=0)


def test_sums_per_host_round_each_domains_sum_before_they_are_added():
    """2049 is no float16: 2048 + 1 of one domain is rounded to 2048 there, and the 1 is lost; added exactly, 2050."""
    ys = [torch.tensor([[2048.0]]), torch.tensor([[1.0]]), torch.tensor([[1.0]])]
    ys = [y.to(torch.float16) for y in ys]
    idx = [torch.tensor([[0, 1, 2]]), *[torch.empty(0, 3, dtype=torch.int64)] * 2]

    def home(domain_of):
        return reference_combine(ys, idx, num_experts=3, rank=0, domain_of=domain_of).item()

    assert home(None) == home((0, 0, 0)) == 2050.0
    assert home((0, 0, 1)) == 2048.0  # 2048 + 1 = 2049 is a tie, rounded to even
    assert home((0, 1, 1)) == 2050.0

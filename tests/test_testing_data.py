"""Rows that know their origin, and the routing generators."""

import pytest
import torch

from moecomm.testing import (
    all_to_one_rank,
    hot_expert,
    masked,
    no_routes,
    origin_of_rows,
    rows_with_origin,
    uniform,
    with_duplicates,
    zipf,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int32,
]
as_str = str


@pytest.mark.parametrize("dtype", DTYPES, ids=as_str)
@pytest.mark.parametrize("hidden", [8, 33, 100])
def test_every_row_names_its_rank_and_token(dtype, hidden):
    blocks = [rows_with_origin(rank, 100, hidden, dtype) for rank in (0, 1, 63)]
    rows = torch.cat([*blocks, torch.zeros(1, hidden).to(dtype)])
    assert rows.dtype == dtype
    expected = [(rank, token) for rank in (0, 1, 63) for token in range(100)] + [(-1, -1)]
    assert origin_of_rows(rows).tolist() == [list(pair) for pair in expected]


def test_rows_are_all_different():
    rows = torch.cat([rows_with_origin(rank, 300, 16, torch.bfloat16) for rank in range(4)])
    assert torch.unique(rows.float(), dim=0).shape[0] == 1200


def test_a_row_of_one_column_can_hold_few_tokens():
    assert origin_of_rows(rows_with_origin(1, 60, 1, torch.bfloat16, num_ranks=4), num_ranks=4)[59].tolist() == [1, 59]
    with pytest.raises(ValueError, match="hidden: 1 columns of torch.bfloat16 hold 256 codes"):
        rows_with_origin(1, 65, 1, torch.bfloat16, num_ranks=4)
    assert rows_with_origin(0, 0, 1, torch.float32).shape == (0, 1)


@pytest.mark.parametrize("shift", [1, 2, 5, 10])
def test_a_row_that_was_shifted_or_torn_is_noticed(shift):
    rows = rows_with_origin(3, 9, 24, torch.bfloat16)
    shifted = rows.clone()
    shifted[4] = rows[4].roll(shift)
    with pytest.raises(ValueError, match="row 4 of 9 is not a row of any rank"):
        origin_of_rows(shifted)
    torn = rows.clone()
    torn[7, 20:] = rows[6, 20:]
    torn[7, 20:] += 1
    with pytest.raises(ValueError, match="row 7"):
        origin_of_rows(torn)


def test_poison_is_noticed():
    rows = rows_with_origin(3, 9, 24, torch.float32)
    rows[5, 23] = float("nan")
    with pytest.raises(ValueError, match="row 5"):
        origin_of_rows(rows)


GENERATORS = {
    "uniform": uniform,
    "zipf": zipf,
    "hot_expert": hot_expert,
    "masked": masked,
    "all_to_one_rank": lambda *args, seed: all_to_one_rank(*args, seed=seed, num_ranks=2, rank=1),
    "no_routes": no_routes,
    "with_duplicates": with_duplicates,
}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_routing_is_valid_and_repeatable(name, num_tokens):
    make = GENERATORS[name]
    idx = make(num_tokens, 9, 4, seed=3)
    assert idx.shape == (num_tokens, 4)
    assert idx.dtype == torch.int64
    assert bool(((idx >= -1) & (idx < 9)).all())
    assert torch.equal(idx, make(num_tokens, 9, 4, seed=3))
    if name != "with_duplicates":
        for row in idx.tolist():
            chosen = [expert for expert in row if expert >= 0]
            assert len(set(chosen)) == len(chosen)
    if num_tokens == 50 and name != "no_routes":
        assert not torch.equal(idx, make(num_tokens, 9, 4, seed=4))


@pytest.mark.parametrize("name", ["uniform", "hot_expert"])
def test_surplus_choices_are_minus_one(name):
    idx = GENERATORS[name](20, 3, 5, seed=0)
    assert [sorted(row) for row in idx.tolist()] == [[-1, -1, 0, 1, 2]] * 20


def test_uniform_spreads_evenly():
    counts = torch.bincount(uniform(8000, 8, 2, seed=1).reshape(-1), minlength=8)
    assert int(counts.sum()) == 16000
    assert counts.max() < 1.1 * 2000


@pytest.mark.parametrize("target", [1.0, 1.5, 3.0, 6.0])
def test_zipf_reaches_its_target_and_ranks_agree_on_the_hot_expert(target):
    loads = [torch.bincount(zipf(4096, 32, 4, seed=s, max_over_mean=target).reshape(-1), minlength=32) for s in (1, 2)]
    total = (loads[0] + loads[1]).double()
    assert abs(float(total.max() / total.mean()) / target - 1) < 0.15
    if target > 1.0:
        assert loads[0].argmax() == loads[1].argmax()


def test_zipf_refuses_what_cannot_be():
    with pytest.raises(ValueError, match=r"max_over_mean must be in \[1, 8\] for top-4 of 32 experts, got 9"):
        zipf(10, 32, 4, seed=0, max_over_mean=9)


def test_hot_expert_is_in_every_row_at_any_place():
    idx = hot_expert(200, 16, 4, seed=0, expert=5)
    places = (idx == 5).nonzero()
    assert places[:, 0].tolist() == list(range(200))
    assert set(places[:, 1].tolist()) == {0, 1, 2, 3}


def test_masked_masks_the_fraction():
    assert abs(float((masked(4000, 16, 4, seed=0, fraction=0.3) == -1).double().mean()) - 0.3) < 0.02
    assert bool((masked(40, 16, 4, seed=0, fraction=1.0) == -1).all())


def test_all_to_one_rank_stays_in_that_rank():
    idx = all_to_one_rank(100, 10, 3, seed=0, num_ranks=4, rank=1)
    assert set(idx.reshape(-1).tolist()) == {3, 4, 5}
    with pytest.raises(ValueError, match="rank 3 of 4 hosts none of the 3 experts"):
        all_to_one_rank(100, 3, 1, num_ranks=4, rank=3)

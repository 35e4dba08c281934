"""Where rows go: every place of every rank is named once, in the canonical order, whatever the counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecomm.algorithms.plan import block_layout, plan_exchange
from moecomm.placement import Placement


def counts_of(routings, placement):
    """`[R, E + R]` from ids per rank, counted token by token."""
    num_experts = placement.num_experts
    counts = np.zeros((placement.num_ranks, num_experts + placement.num_ranks), dtype=np.int32)
    for source, tokens in enumerate(routings):
        for experts in tokens:
            named = [e for e in experts if e >= 0]
            for expert in named:
                counts[source, expert] += 1
            for rank in {int(placement.rank_of_expert[e]) for e in named}:
                counts[source, num_experts + rank] += 1
    return counts


@st.composite
def exchanges(draw):
    placement = Placement(draw(st.integers(1, 9)), draw(st.integers(1, 5)))
    num_topk = draw(st.integers(1, 4))
    token = st.lists(st.integers(-1, placement.num_experts - 1), min_size=num_topk, max_size=num_topk)
    routings = [draw(st.lists(token, max_size=5)) for _ in range(placement.num_ranks)]
    return placement, routings


def places(plans, placement, routings, layout):
    """Per destination rank, the routes `(expert, source, token, k)` (flat: `(source, token)`) by row."""
    rows = [{} for _ in range(placement.num_ranks)]
    for source, (plan, tokens) in enumerate(zip(plans, routings, strict=True)):
        following = plan.bases.tolist()
        for t, experts in enumerate(tokens):
            if layout == "flat":
                for rank in sorted({int(placement.rank_of_expert[e]) for e in experts if e >= 0}):
                    assert rows[rank].setdefault(following[rank], (source, t)) == (source, t)
                    following[rank] += 1
                continue
            for k, expert in enumerate(experts):
                if expert >= 0:
                    here = rows[int(placement.rank_of_expert[expert])]
                    assert here.setdefault(following[expert], (expert, source, t, k)) == (expert, source, t, k)
                    following[expert] += 1
    return rows


@settings(max_examples=200, deadline=None)
@given(exchanges(), st.sampled_from(["expert_major", "flat", "slab"]), st.integers(1, 5))
def test_every_row_has_one_place_in_canonical_order(exchange, layout, alignment):
    placement, routings = exchange
    alignment = alignment if layout == "expert_major" else 1
    counts = counts_of(routings, placement)
    capacity = int(counts[:, : placement.num_experts].sum(axis=0).max()) + 1 if layout == "slab" else 0
    plans = [plan_exchange(counts, placement, r, layout, alignment, capacity) for r in range(placement.num_ranks)]
    assert all(plan.rows_per_rank == plans[0].rows_per_rank for plan in plans)
    rows = places(plans, placement, routings, layout)
    for rank, plan in enumerate(plans):
        experts = list(placement.local_experts(rank))
        totals = counts[:, experts].sum(axis=0).tolist()
        assert plan.num_tokens_per_expert.tolist() == totals
        assert (plan.num_tokens_per_expert.dtype, plan.offsets.dtype, plan.bases.dtype) == ("int32", "int32", "int64")
        # What lies there, by row, is in the canonical order.
        by_row = [rows[rank][row] for row in sorted(rows[rank])]
        assert by_row == sorted(by_row)
        ends = plan.offsets.tolist()
        starts = [i * capacity if layout == "slab" else ([0] + ends)[i] for i in range(len(experts))]
        if layout == "flat":
            assert sorted(rows[rank]) == list(range(plan.rows_per_rank[rank]))
            assert np.diff([0, *plan.offsets]).tolist() == totals
            continue
        wanted = [start + i for start, total in zip(starts, totals, strict=True) for i in range(total)]
        assert sorted(rows[rank]) == wanted
        for start, end, total in zip(starts, ends, totals, strict=True):
            assert end == start + (total if layout == "slab" else -(-total // alignment) * alignment)
        end = len(experts) * capacity if layout == "slab" else int(plan.offsets[-1]) if experts else 0
        assert plan.rows_per_rank[rank] == end


def test_by_hand():
    """Two ranks, three experts (0 and 1 on rank 0, 2 on rank 1)."""
    placement = Placement(3, 2)
    counts = np.array([[2, 1, 0, 2, 0], [1, 3, 4, 3, 4]], dtype=np.int32)
    plan = plan_exchange(counts, placement, 1, "expert_major", 4)
    assert plan.bases.tolist() == [2, 5, 0]
    assert plan.rows_per_rank == [8, 4]
    assert (plan.num_tokens_per_expert.tolist(), plan.offsets.tolist()) == ([4], [4])
    assert plan_exchange(counts, placement, 1, "flat", 1).bases.tolist() == [2, 0]
    assert plan_exchange(counts, placement, 1, "slab", 1, 10).bases.tolist() == [2, 11, 0]


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_up_to_two_to_the_31_rows(layout):
    """Only counts, so nothing is allocated: the last row that an int32 offset can name fits, one more is refused."""
    placement = Placement(2, 2)
    counts = np.array([[2**30, 5, 2**30, 5], [2**30 - 1, 2**30, 2**30 - 1, 2**30]], dtype=np.int32)
    plan = plan_exchange(counts, placement, 1, layout, 1)
    assert plan.rows_per_rank == [2**31 - 1, 2**30 + 5]
    assert plan.bases.tolist() == [2**30, 5]
    assert plan_exchange(counts, placement, 0, layout, 1).offsets.tolist() == [2**31 - 1]
    counts[1, [0, 2]] += 1
    with pytest.raises(ValueError, match=r"a rank would receive 2147483648 rows, at most 2147483647 are possible"):
        plan_exchange(counts, placement, 1, layout, 1)


def test_padding_counts_towards_the_limit():
    counts = np.array([[2**31 - 1, 2**31 - 1]], dtype=np.int32)
    with pytest.raises(ValueError, match="would receive 2147483648 rows"):
        plan_exchange(counts, Placement(1, 1), 0, "expert_major", 4)


def test_flat_experts_count_towards_the_limit():
    """Few flat rows, but the offsets of their routes must fit, too."""
    counts = np.array([[2**30, 2**30, 2**30]], dtype=np.int32)
    with pytest.raises(ValueError, match="would receive 2147483648 rows"):
        plan_exchange(counts, Placement(2, 1), 0, "flat", 1)


def test_slabs_beyond_two_to_the_31_rows_and_their_overflow():
    placement = Placement(3, 1)
    capacity = 2**30
    counts = np.array([[7, capacity, 9, 11]], dtype=np.int32)
    with pytest.raises(ValueError, match="would receive 3221225472 rows"):
        plan_exchange(counts, placement, 0, "slab", 1, capacity)
    with pytest.raises(ValueError, match="1073741824 rows for expert 1, but there is room for 8"):
        plan_exchange(counts, placement, 0, "slab", 1, 8)
    with pytest.raises(ValueError, match="1073741840 rows for rank 0, but there is room for 100"):
        plan_exchange(counts, placement, 0, "expert_major", 1, 100)


def test_planes_do_not_overlap_and_are_aligned():
    for num_rows in (0, 1, 7, 2**40):
        planes = (2, 0, 7168 * 2, 4, 1)
        layout = block_layout(num_rows, planes)
        ends = [offset + num_rows * nbytes for offset, nbytes in zip(layout.offsets, planes, strict=True)]
        assert all(offset % 64 == 0 for offset in layout.offsets)
        assert all(end <= start for end, start in zip(ends, [*layout.offsets[1:], layout.nbytes], strict=True))

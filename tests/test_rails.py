"""What goes over the rails, against loops over tokens and choices."""

import pytest
import torch

from moecomm.algorithms.rails import Rails, copy_rows
from moecomm.kernels.base import make_route
from moecomm.placement import Placement
from moecomm.topology import Topology

# Ranks 0 and 3 on the first host, 1 and 2 on the second, 4 on the third; two experts each.
PLACEMENT = Placement(num_experts=10, num_ranks=5)
DOMAIN_OF_RANK = (0, 1, 1, 0, 2)


def rails_of(rank: int) -> Rails:
    return Rails(Topology(DOMAIN_OF_RANK, DOMAIN_OF_RANK), PLACEMENT, rank)


def domain_of(expert: int) -> int:
    return DOMAIN_OF_RANK[int(PLACEMENT.expert_rank[expert])]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_entries_of_each_domain(num_tokens: int, dtype: torch.dtype) -> None:
    """Also of ids that lie apart in memory; -1s, and tokens that chose nobody."""
    generator = torch.Generator().manual_seed(num_tokens)
    topk_idx = torch.randint(-1, 10, (num_tokens, 6), generator=generator, dtype=dtype)[:, ::2]
    topk_idx[:1] = -1
    rails = rails_of(0)
    for entries in rails.entries(topk_idx, [2, 0, 1]):
        theirs = [[i if i >= 0 and domain_of(i) == entries.domain else -1 for i in ids] for ids in topk_idx.tolist()]
        wanted = [token for token, ids in enumerate(theirs) if max(ids) >= 0]
        assert entries.tokens.tolist() == wanted
        assert entries.ids.dtype == rails.id_dtype
        assert entries.ids.shape == (len(wanted), 3)
        assert entries.ids.is_contiguous()
        assert entries.ids.tolist() == [theirs[token] for token in wanted]
    assert [one.domain for one in rails.entries(topk_idx, [2, 0, 1])] == [2, 0, 1]


def test_routes_into_my_own_domain() -> None:
    routes = torch.tensor([[make_route(0, 7), make_route(3, 1), make_route(4, 0)], [-1, make_route(1, 5), -1]])
    assert rails_of(3).near(routes).tolist() == [[*routes[0, :2].tolist(), -1], [-1, -1, -1]]
    assert rails_of(4).near(routes).tolist() == [[-1, -1, make_route(4, 0)], [-1, -1, -1]]


def test_rows_are_copied_whole() -> None:
    """The stride of a single row may be anything."""
    single = torch.arange(6, dtype=torch.int16).as_strided((1, 3), (99, 1))
    out = torch.full((8,), -7, dtype=torch.int16)
    copy_rows(single, 0, 1, out.data_ptr())
    copy_rows(torch.arange(12, dtype=torch.int16).view(4, 3), 1, 2, out.data_ptr() + 6)
    assert out.tolist() == [0, 1, 2, 3, 4, 5, -7, -7]

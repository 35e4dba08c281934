"""Sums at home in a combine between domains: the same bits however answers come, of nothing that is not here yet."""

import pytest
import torch

from moecomm.algorithms.home_sums import HomeSums
from moecomm.algorithms.rail_requests import Requests, requests_for, requests_per_domain
from moecomm.algorithms.rails import Rails
from moecomm.algorithms.routing import Routing
from moecomm.codecs.registry import make_codec
from moecomm.kernels.base import make_route
from moecomm.placement import Placement
from moecomm.topology import Topology

# Ranks 0 and 3 on the first host, 1 and 2 on the second, 4 on the third; two experts each.
PLACEMENT = Placement(num_experts=10, num_ranks=5)
DOMAIN_OF_RANK = (0, 1, 1, 0, 2)
RAILS = Rails(Topology(DOMAIN_OF_RANK, DOMAIN_OF_RANK), PLACEMENT, rank=0)
HIDDEN, NUM_TOPK, NUM_ROWS = 5, 3, 40


class Sums:
    """The sums of rank 0, whose answers hold nothing but NaN until they have come."""

    def __init__(self, num_tokens: int, *, per_host: bool, weighted: bool) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        ids = torch.stack([torch.randperm(10, generator=generator)[:NUM_TOPK] for _ in range(num_tokens)])
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
        ids[1::7] = torch.tensor([2, 4, -1])  # all on the second host
        rows = torch.randint(NUM_ROWS, ids.shape, generator=generator)
        routes = torch.where(ids >= 0, make_route(0, 0) + (ids // 2 * make_route(1, 0)) + rows, -1)
        routing = Routing(ids, "expert_major", 1, routes)
        self.requests: Requests = (requests_per_domain if per_host else requests_for)(RAILS, routing)
        self.row_format = make_codec("none").row_format(HIDDEN, torch.float32)
        weights = torch.rand(ids.shape, generator=generator) if weighted else None
        self.come = torch.randn(self.requests.num_rows, HIDDEN, generator=generator)
        self.answers = torch.full_like(self.come, torch.nan)
        near = self.requests.near
        near_routes = None if near is None else RAILS.near(routes[near.tokens])
        self.planes = torch.randn(5, NUM_ROWS, HIDDEN, generator=generator)
        # No rank of another domain can be read.
        places = [[self.planes[rank].data_ptr() if DOMAIN_OF_RANK[rank] == 0 else 0 for rank in range(5)]]
        at = self.answers.data_ptr()
        self.sums = HomeSums(self.requests, near_routes, self.row_format, places, at, weights)

    def receive(self, num_answered: list[int]) -> None:
        """That many answers of each of the entries are here."""
        first = 0
        for one, num in zip(self.requests.entries, num_answered, strict=True):
            self.answers[first : first + num] = self.come[first : first + num]
            first += len(one.tokens)
        self.sums.advance(num_answered)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("per_host", [False, True])
def test_tokens_are_added_up_as_answers_come(per_host: bool, weighted: bool) -> None:
    at_once, by_steps = (Sums(57, per_host=per_host, weighted=weighted) for _ in range(2))
    sizes = [len(one.tokens) for one in at_once.requests.entries]
    assert len(sizes) == 2
    at_once.receive(sizes)
    expected = at_once.sums.finish()
    for step in range(0, max(sizes), 3):
        by_steps.receive([min(size, step * speed) for size, speed in zip(sizes, (1, 2), strict=True)])
    by_steps.answers.copy_(by_steps.come)
    assert not expected.isnan().any()
    assert torch.equal(by_steps.sums.finish(), expected)


def test_what_was_added_up_is_not_looked_at_again() -> None:
    """Else nothing would be gained: what is left for the end is what the last answers belong to."""
    sums = Sums(57, per_host=True, weighted=True)
    sizes = [len(one.tokens) for one in sums.requests.entries]
    sums.receive([size - 1 for size in sizes])
    through = min(int(one.tokens[-1]) for one in sums.requests.entries)
    sums.planes.fill_(torch.nan)
    sums.answers.fill_(torch.nan)
    out = sums.sums.finish()
    assert through > 40
    assert not out[:through].isnan().any()
    assert out[through:].isnan().any()


@pytest.mark.parametrize("per_host", [False, True])
def test_few_tokens(per_host: bool) -> None:
    for num_tokens in (1, 2):
        sums = Sums(num_tokens, per_host=per_host, weighted=True)
        sums.receive([len(one.tokens) for one in sums.requests.entries])
        assert not sums.sums.finish().isnan().any()

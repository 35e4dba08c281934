"""What answers an exact combine over rails on devices: what hosts would ask for, numbered alike on both sides."""

from types import SimpleNamespace

import pytest
import torch
from late_device import LateDevice

from moecomm.algorithms.device_answers import DeviceAnswers
from moecomm.algorithms.rail_requests import requests_for
from moecomm.algorithms.rails import Rails
from moecomm.algorithms.routing import Routing
from moecomm.kernels import kernels_for
from moecomm.kernels.base import make_route, row_of
from moecomm.placement import Placement
from moecomm.topology import Topology

# Ranks 0 and 3 in the first domain, 1 and 2 in the second, 4 in the third; two experts each.
PLACEMENT = Placement(num_experts=10, num_ranks=5)
DOMAIN_OF_RANK = (0, 1, 1, 0, 2)
NUM_TOPK = 3


def answers_of(rank):
    rails = Rails(Topology(DOMAIN_OF_RANK, DOMAIN_OF_RANK), PLACEMENT, rank)
    return DeviceAnswers(SimpleNamespace(device=LateDevice()), rails), rails


def routes_of(ids, layout):
    """Of a rank that is alone in sending: each expert's rows, or each rank's, from 0 on."""
    reference = kernels_for("reference")
    if layout == "flat":
        return reference.plan_flat(ids, PLACEMENT.expert_rank, torch.zeros(5, dtype=torch.int64))
    return reference.plan_expert_major(ids, PLACEMENT.expert_rank, torch.zeros(10, dtype=torch.int64))


def ids_of(num_tokens, seed):
    """With -1s and duplicates; some tokens all in one domain, some nowhere."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 10, (num_tokens, NUM_TOPK), generator=generator)
    ids[1::5] = torch.tensor([5, -1, 2])
    ids[2::5] = torch.tensor([-1, 9, 9])
    ids[3::5] = torch.tensor([0, 6, 1])
    ids[4::10] = -1
    return ids


def into(domain, ids):
    """Ids of the tokens that have an expert in a domain, -1 for those elsewhere; and which tokens they are."""
    domain_of = torch.tensor([DOMAIN_OF_RANK[rank] for rank in PLACEMENT.expert_rank.tolist()] + [-1])
    is_there = domain_of[ids] == domain
    tokens = is_there.any(dim=1).nonzero().squeeze(1)
    return torch.where(is_there, ids, -1)[tokens], tokens


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize(("rank", "num_tokens"), [(0, 23), (2, 23), (4, 7), (1, 0)])
def test_both_sides_number_the_rows_that_hosts_ask_for(rank, num_tokens, layout):
    """Each answer of each domain is made of the rows of its request, with its weights, and home finds it there."""
    answers, rails = answers_of(rank)
    ids = ids_of(num_tokens, rank)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(rank))
    routes = routes_of(ids, layout)
    wanted = requests_for(rails, Routing(ids, layout, 1, routes))
    asked, counted = answers.asked(routes), torch.full((3,), -1)
    answers.count(routes, counted)
    entries = {one.domain: (one, is_whole) for one, is_whole in zip(wanted.entries, wanted.is_whole, strict=True)}
    assert counted.tolist() == [len(entries[d][0].tokens) if d in entries else 0 for d in range(3)]
    starts = counted.cumsum(0) - counted
    come = answers.at_home(asked, starts)
    tokens = answers.tokens_of(asked, come, int(counted.sum()))
    for domain, (entry, is_whole) in entries.items():
        # At home each row is named once, by its token, in the order of slots.
        named = come[come >> 40 == PLACEMENT.num_ranks + domain] & ((1 << 40) - 1)
        assert named.tolist() == list(range(int(starts[domain]), int(starts[domain] + counted[domain])))
        theirs = tokens[named]
        assert theirs.tolist() == torch.where(is_whole, entry.tokens, -1).tolist()
        # At the rail, which knows its own domain's rows alone.
        rail, _ = answers_of(DOMAIN_OF_RANK.index(domain))
        there, who = into(domain, ids)
        made, scales = rail.at_rail(routes_of(there, layout), asked.is_whole[who], weights[who], len(named))
        assert rail.at_rail(routes_of(there, layout), asked.is_whole[who], None, len(named))[1] is None
        place = {token: at for at, token in enumerate(who.tolist())}
        for row, (token, chosen) in enumerate(zip(entry.tokens.tolist(), entry.ids.long(), strict=True)):
            full = routes_of(there, layout)[place[token]]
            if bool(is_whole[row]):
                assert made[row].tolist() == full.tolist()
                assert torch.equal(scales[row][full >= 0], weights[token][full >= 0])
            else:
                (alone,) = made[row][made[row] >= 0].tolist()
                rank_there = int(PLACEMENT.expert_rank[chosen[chosen >= 0][0]])
                assert alone in full.tolist()
                assert alone >> 40 == rank_there
                assert scales[row].tolist() == [1.0] * NUM_TOPK
        # Rows that are no sums are one for each slot, in its column.
        if not is_whole.all():
            rows = made[~is_whole]
            columns = (rows >= 0).int().argmax(dim=1).tolist()
            mixed = [token for token in who.tolist() if not asked.is_whole[token]]
            assert columns == [column for token in mixed for column in _slots(there[place[token]], layout)]


def _slots(ids, layout):
    """Columns of the routes of one token."""
    routes = routes_of(ids[None], layout)[0]
    return (routes >= 0).nonzero().squeeze(1).tolist()


def test_a_token_is_whole_where_all_of_it_is_in_one_other_domain():
    answers, _ = answers_of(0)
    ids = torch.tensor([[2, 4, -1], [0, 6, 1], [-1, -1, -1], [2, 8, 2], [8, -1, -1], [0, 2, 3]])
    asked = answers.asked(routes_of(ids, "expert_major"))
    assert asked.is_whole.squeeze(1).tolist() == [True, False, False, False, True, False]
    assert asked.domains.tolist() == [
        [1, -1, -1],
        [-1, -1, -1],
        [-1, -1, -1],
        [1, 2, 1],
        [2, -1, -1],
        [-1, 1, 1],
    ]
    come = answers.at_home(asked, torch.tensor([0, 0, 5]))
    assert come[3].tolist() == [make_route(6, 1), make_route(7, 5), make_route(6, 2)]
    assert row_of(int(come[4, 0])) == 6


def test_where_a_wait_has_failed_no_answer_names_a_row():
    """Then all routes are -1, whatever lies where requests should be."""
    rail, _ = answers_of(1)
    routes = torch.full((4, NUM_TOPK), -1)
    made, scales = rail.at_rail(routes, torch.ones(4, 1, dtype=torch.bool), torch.ones(4, NUM_TOPK), 2)
    assert made.tolist() == [[-1] * NUM_TOPK] * 2
    assert scales.shape == (2, NUM_TOPK)

"""What goes wrong in captured calls: it is named with operation, number, peers and values, and nothing is written then.

All ranks are in this process: what is sent is there before anybody waits for it, unless somebody stays away.
"""

import pickle

import pytest
import torch
from captured_ranks import Case
from captured_worlds import Ranks, assert_unchanged

from moecomm.errors import CallMismatch, CapacityExceeded, PeerTimeout, TooManyInFlight
from moecomm.kernels.triton.captured import CapturedExchange
from moecomm.testing import with_duplicates

SOON_NS = 20_000_000


@pytest.mark.parametrize("case", [Case(3, "slab", num_experts=4), Case(2, "expert_major", values=None)], ids=str)
def test_a_peer_that_never_sends_is_named_and_nothing_is_written(case):
    ranks = Ranks(case, timeout_ns=SOON_NS)
    ranks.dispatch(0)
    inputs, last = case.inputs(1), case.num_ranks - 1
    for rank in list(ranks)[:-1]:
        rank.send(inputs)
    me = next(iter(ranks))
    before = ranks.state_of(me)
    me.receive()
    message = rf"dispatch #1: .* rank {last}: counter at 1, expected 2\. Every rank must make the same calls"
    with pytest.raises(PeerTimeout, match=message) as caught:
        me.exchange.check()
    assert (caught.value.operation, caught.value.peers) == ("dispatch #1", (last,))
    # Nothing that comes behind is carried out: no sums, no signals, no numbers taken.
    out = torch.full((inputs.ids[0].shape[0], case.hidden), 7, dtype=case.dtype)
    me.combine(case.answers(1)[0], out, None)
    me.send(inputs)
    me.receive()
    assert bool((out == 7).all())
    assert_unchanged(before, ranks.state_of(me))
    with pytest.raises(PeerTimeout, match="dispatch #1"):
        me.exchange.check()


def test_a_peer_that_never_answers_is_named_and_no_sum_is_written():
    case = Case(2, "slab")
    ranks = Ranks(case, timeout_ns=SOON_NS)
    for call in range(3):
        ranks.dispatch(call)
    me = ranks.ranks[1]
    out = torch.full((case.tokens(2)[1], case.hidden), 7, dtype=case.dtype)
    me.combine(case.answers(2)[1], out, None)
    with pytest.raises(PeerTimeout, match=r"combine #0: slot 1: .* rank 0: counter at 0, expected 1") as caught:
        me.exchange.check()
    assert caught.value.peers == (0,)
    assert bool((out == 7).all())


@pytest.mark.parametrize("layout", ["slab", "expert_major"])
def test_what_does_not_fit_stops_every_rank_alike_and_then_they_go_on(layout):
    case = Case(3, layout, num_experts=4, topk=3, alignment=2)
    tight = {"slab": {"capacity": 4}, "expert_major": {"num_rows": 8}}[layout]
    ranks = Ranks(case)
    for rank in ranks:
        form = case.form._replace(**tight)
        rank.block = rank.exchange.block(form, rank.rows.address, rank.values.address)
    found = set()
    for call, tokens in ((0, [4, 4, 4]), (1, [4, 3, 4])):
        inputs = case.inputs(call, tokens, routing=with_duplicates)
        before = [ranks.state_of(rank) for rank in ranks]
        for rank in ranks:
            rank.send(inputs)
        for rank in ranks:
            rank.receive()
            with pytest.raises(CapacityExceeded, match=rf"dispatch #{call}: .* but there is room for") as caught:
                rank.exchange.check()
            found.add(str(caught.value))
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
            rank.exchange.check()
            want = before[rank.rank]
            assert_unchanged([*want[:8], want[-1]], [*(now := ranks.state_of(rank))[:8], now[-1]])
    assert len(found) == 2
    fitting = case.inputs(2, [1, 0, 1])
    for rank in ranks:
        rank.send(fitting)
    for rank in ranks:
        rank.receive()
        rank.exchange.check()
        assert int(rank.block.placed.arrived.counts[:, :4].sum()) == int(sum((ids >= 0).sum() for ids in fitting.ids))


@pytest.mark.parametrize("bad", [-2, 5, 2**31, -(2**40)])
def test_an_id_that_is_none_stops_every_rank_and_is_named(bad):
    case = Case(2, "slab", most=70)  # several blocks of ids
    ranks = Ranks(case)
    inputs = case.inputs(0, [2, 70])
    inputs.ids[1][66, 1] = bad
    inputs.ids[1][67, 0] = -7
    before = [ranks.state_of(rank) for rank in ranks]
    for rank in ranks:
        rank.send(inputs)
    shown = min(max(bad, -(2**31)), 2**31 - 1)
    for rank in ranks:
        rank.receive()
        with pytest.raises(ValueError, match=rf"dispatch #0: topk_idx\[66, 1\] = {shown} of rank 1 is not an expert"):
            rank.exchange.check()
        assert_unchanged(before[rank.rank][:8], ranks.state_of(rank)[:8])
    ranks.dispatch(1)


def test_ranks_with_other_forms_are_named():
    case = Case(2, "slab")
    ranks = Ranks(case)
    other = ranks.ranks[1]
    form = case.form._replace(capacity=case.form.capacity - 1)
    other.block = other.exchange.block(form, other.rows.address, other.values.address)
    inputs = case.inputs(1)
    for rank in ranks:
        rank.send(inputs)
    for rank in ranks:
        rank.receive()
        with pytest.raises(CallMismatch, match=rf"dispatch #0: what rank {1 - rank.rank} has sent") as caught:
            rank.exchange.check()
        assert caught.value.peers == (1 - rank.rank,)


def test_calls_are_checked_before_anything_is_launched():
    case = Case(1, "slab")
    ranks = Ranks(case)
    rank = ranks.ranks[0]
    exchange, block = rank.exchange, rank.block
    x, ids, weights = torch.zeros(2, 7, dtype=torch.bfloat16), torch.zeros(2, 2).long(), torch.zeros(2, 2)
    for wrong, arguments in {
        r"topk_idx has 5 tokens; there is room for 4": (x, torch.zeros(5, 2).long(), weights),
        r"topk_idx is torch.int64 \[2, 3\]; wanted int32 or int64 \[T, 2\]": (x, torch.zeros(2, 3).long(), weights),
        r"topk_idx is torch.float32": (x, weights, weights),
        r"x is torch.bfloat16 \[2, 6\]; wanted 2 rows of 14 bytes": (x[:, :6], ids, weights),
        r"the last must be contiguous": (torch.zeros(7, 2, dtype=torch.bfloat16).t(), ids, weights),
        r"topk_weights has values of 0 bytes; the block's form says 4": (x, ids, None),
        r"topk_weights is \[2, 1\]; wanted contiguous \[2, 2\]": (x, ids, weights[:, :1]),
    }.items():
        with pytest.raises(ValueError, match=wrong):
            exchange.send(*arguments[:2], block, topk_weights=arguments[2])
    with pytest.raises(ValueError, match="no dispatch has begun"):
        exchange.receive(block)
    with pytest.raises(ValueError, match="no combine has begun"):
        exchange.sum_rows(block.placed, x[:0])
    exchange.send(x, ids, block, topk_weights=weights)
    with pytest.raises(TooManyInFlight, match="its dispatch has begun"):
        exchange.send(x, ids, block, topk_weights=weights)
    with pytest.raises(
        TooManyInFlight, match="dispatch #0 has begun .* dispatch #1 cannot begin before: max_in_flight is 1"
    ):
        exchange.send(x, ids, exchange.block(case.form, 1 << 20, 1 << 20), topk_weights=weights)
    exchange.receive(block)
    y = rank.case.answers(0)[0]
    for wrong, rows, outputs in (
        (r"y is \[7, 20\]", y.t(), None),
        (r"y is \[8, 7\] .*; wanted 20 rows", y[:8], None),
        (r"y has 560 bytes; output_bytes is 384", torch.zeros(20, 14, dtype=torch.bfloat16), None),
        (r"y is at 0x\w+; outputs says 0x40", y, exchange.outputs_at([64])),
    ):
        with pytest.raises(ValueError, match=wrong):
            exchange.send_rows(rows, block.placed, outputs=outputs)
    exchange.send_rows(y, block.placed)
    with pytest.raises(ValueError, match=r"out is \[3, 7\] .*; wanted contiguous \[2, H\]"):
        exchange.sum_rows(block.placed, torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"topk_weights is torch.float64 \[2, 2\]; wanted torch.float32 \[2, 2\]"):
        exchange.sum_rows(block.placed, x, topk_weights=weights.double())


def test_a_call_waits_for_the_one_whose_window_it_needs_whatever_else_is_completed():
    case = Case(1, "slab", depth=2)
    ranks = Ranks(case)
    exchange, first = ranks.ranks[0].exchange, ranks.ranks[0].block
    blocks = [first, *(exchange.block(case.form, first.placed.block.rows, first.placed.block.values) for _ in range(2))]
    x, ids, weights = torch.zeros(1, 7, dtype=torch.bfloat16), torch.zeros(1, 2).long(), torch.zeros(1, 2)
    exchange.send(x, ids, blocks[0], topk_weights=weights)
    exchange.send(x, ids, blocks[1], topk_weights=weights)
    exchange.receive(blocks[1])
    with pytest.raises(TooManyInFlight, match="dispatch #0 has begun .* dispatch #2 cannot begin before"):
        exchange.send(x, ids, blocks[2], topk_weights=weights)
    exchange.receive(blocks[0])
    exchange.send(x, ids, blocks[2], topk_weights=weights)
    exchange.receive(blocks[2])
    exchange.check()


def test_memory_is_checked_when_it_is_given():
    case = Case(1, "slab")
    ranks = Ranks(case)
    rank = ranks.ranks[0]
    with pytest.raises(ValueError, match=r"form needs messages of \d+ bytes; message_bytes is"):
        rank.exchange.block(case.form._replace(row_bytes=4096), 1 << 20)
    one = torch.zeros(1, dtype=torch.int32)
    sizes = {"message_bytes": 64, "output_bytes": 64, "expert_rank": one, "expert_local": one}
    with pytest.raises(ValueError, match="boards, windows and outputs have 1, 2 and 1 addresses"):
        CapturedExchange(0, boards=[1], windows=[1, 2], outputs=[1], max_tokens_per_rank=1, **sizes)
    addresses = dict.fromkeys(("boards", "windows", "outputs"), [64])
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        CapturedExchange(0, **addresses, max_tokens_per_rank=1, max_in_flight=0, **sizes)

"""Two windows per call in flight are enough, and no fewer: shown in a model, and by the real code in one thread.

A rank is a program of calls; each first sends to everybody and later receives from everybody. At most `max_in_flight`
calls may be sent and not received, and a call may be received once everybody has sent it. All orders in which the ranks
can take their steps are gone through, as a graph of states: a state is what every rank has done so far, so whatever
happens after it does not depend on how it was reached.
"""

from collections import deque
from dataclasses import dataclass

import pytest
import torch
from exchange_ranks import in_one_thread

import moecomm.algorithms.eager as eager

Windows = eager.Windows
GROUPS = [(2, 1), (2, 2), (3, 1), (3, 2)]  # ranks, calls in flight
CASES = [(*group, num_windows) for group in GROUPS for num_windows in range(1, 2 * group[1] + 1)]


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """What one rank has done: `sent[d]` calls to each rank d, `read[s]` messages of each rank s."""

    sent: tuple[int, ...]
    read: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """The steps that are possible after some others, at the finest grain: one message sent, or one read."""

    num_ranks: int
    depth: int
    num_windows: int
    num_calls: int

    @property
    def start(self):
        nothing = (0,) * self.num_ranks
        return (Progress(nothing, nothing),) * self.num_ranks

    def steps(self, state):
        """(rank, state after it, whether a message was read that was not the one meant) of each possible step."""
        for rank, mine in enumerate(state):
            begun, finished = max(mine.sent), min(mine.read)
            sending, reading = min(mine.sent) < begun, max(mine.read) > finished
            # A rank finishes what it is doing first.
            if sending or (not reading and begun < self.num_calls and begun - finished < self.depth):
                to = mine.sent.index(min(mine.sent))
                yield rank, replaced(state, rank, Progress(one_more(mine.sent, to), mine.read)), False
            arrived = finished < begun and all(peer.sent[rank] > finished for peer in state)
            if reading or (not sending and arrived):
                source = mine.read.index(finished)
                lost = self.in_window(state, source, rank, finished) != finished
                yield rank, replaced(state, rank, Progress(mine.sent, one_more(mine.read, source))), lost

    def in_window(self, state, source, rank, call):
        """The call whose message lies in the window where that of `call` arrived."""
        newest = state[source].sent[rank] - 1
        return newest - (newest - call) % self.num_windows


def one_more(counts, index):
    return (*counts[:index], counts[index] + 1, *counts[index + 1 :])


def replaced(state, rank, progress):
    return (*state[:rank], progress, *state[rank + 1 :])


def search(model):
    """The number of states, and whether a message can be lost."""
    seen, stack, any_lost = {model.start}, [model.start], False
    while stack:
        state = stack.pop()
        stuck = True
        for _, after, lost in model.steps(state):
            stuck, any_lost = False, any_lost or lost
            if after not in seen:
                seen.add(after)
                stack.append(after)
        done = all(min(rank.read) == model.num_calls for rank in state)
        assert done or not stuck, f"nobody can go on: {state}"
    return len(seen), any_lost


@pytest.mark.parametrize(("num_ranks", "depth", "num_windows"), CASES)
def test_model_loses_nothing_exactly_with_two_windows_per_call_in_flight(num_ranks, depth, num_windows):
    num_states, lost = search(Model(num_ranks, depth, num_windows, num_calls=2 * depth + 2))
    assert lost == (num_windows < 2 * depth)
    assert num_states > 100


# -- the real code -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coarse:
    """The same with a whole send or a whole receive as a step: what one thread can do for one rank at a time."""

    num_ranks: int
    depth: int
    num_calls: int

    @property
    def start(self):
        return ((0, 0),) * self.num_ranks

    def steps(self, state):
        """(rank, what it does, state after it) of each possible step."""
        for rank, (sent, received) in enumerate(state):
            if sent < self.num_calls and sent - received < self.depth:
                yield rank, "send", replaced(state, rank, (sent + 1, received))
            if received < min(other for other, _ in state):
                yield rank, "receive", replaced(state, rank, (sent, received + 1))


def covering_paths(model):
    """Paths from the start to the end that together take every step that is possible in any state."""
    left = set()
    stack, graph = [model.start], {}
    while stack:
        state = stack.pop()
        if state not in graph:
            graph[state] = list(model.steps(state))
            left |= {(state, number) for number in range(len(graph[state]))}
            stack += [after for _, _, after in graph[state]]
    while left:
        state, path = model.start, []
        while graph[state]:
            for number in way_to_new(graph, state, left):
                left.discard((state, number))
                rank, what, state = graph[state][number]
                path.append((rank, what))
        yield path


def way_to_new(graph, state, left):
    """The shortest way from here that ends with a step not yet taken; if there is none, any step."""
    queue, seen = deque([(state, ())]), {state}
    while queue:
        here, way = queue.popleft()
        for number, (_, _, after) in enumerate(graph[here]):
            if (here, number) in left:
                return (*way, number)
            if after not in seen:
                seen.add(after)
                queue.append((after, (*way, number)))
    return (0,)


class Ranks:
    """All ranks of a group, driven by one thread. Every second call is a combine, if there are to be any."""

    def __init__(self, comms, with_combines):
        self.comms = comms
        self.with_combines = with_combines
        self.idx = torch.tensor([[0, 1], [2, 0]])
        received = self._all([self._dispatch(comm, 0.0) for comm in comms])
        self.handles = [one.handle for one in received]
        self.lost = 0

    def _all(self, works):
        for work in works:
            work.step()
        return [work.wait() for work in works]

    def _dispatch(self, comm, value):
        return comm.dispatch_async(torch.full((2, 4), value), self.idx, mode="low_latency")

    def run(self, path):
        """Takes the steps, and looks at what each receive gives."""
        begun = [[] for _ in self.comms]
        received = [0] * len(self.comms)
        for rank, what in path:
            if what == "send":
                begun[rank].append(self._send(rank, len(begun[rank])))
                continue
            call = received[rank]
            received[rank] += 1
            work = begun[rank][call]
            assert work.done(), "a call could not be received although everybody has sent"
            self.lost += not self._is_right(rank, call, work.wait())
        assert [len(works) for works in begun] == received

    def _send(self, rank, call):
        comm = self.comms[rank]
        if self.with_combines and call % 2:
            y = torch.full((comm.num_local_experts, self.handles[rank].capacity, 4), self._value(rank, call))
            return comm.combine_async(y, self.handles[rank])
        return self._dispatch(comm, self._value(rank, call))

    def _value(self, rank, call):
        return 100.0 * (call + 1) + rank

    def _is_right(self, rank, call, result):
        comm, ranks = self.comms[rank], range(len(self.comms))
        if isinstance(result, torch.Tensor):
            hosts = comm.placement.expert_rank[self.idx]
            expected = sum((hosts == host).sum(1) * self._value(host, call) for host in ranks)
            return torch.equal(result, expected[:, None].expand(2, 4))
        rows = [
            [self._value(source, call)] * int((self.idx == expert).sum())
            for expert in comm.local_experts
            for source in ranks
        ]
        values = torch.tensor([value for some in rows for value in some])
        counts = result.num_tokens_per_expert.tolist()
        got = [result.x[expert, :count] for expert, count in enumerate(counts)]
        return torch.equal(torch.cat(got), values[:, None].expand(-1, 4))


def losses(monkeypatch, num_ranks, depth, num_windows, with_combines):
    """How often what was received was not what was sent, over all orders."""
    monkeypatch.setattr(
        eager, "Windows", lambda exchange, sizes, *, holders, **_: Windows(exchange, sizes, num_windows, holders)
    )
    options = {"num_experts": 3, "hidden": 4, "max_in_flight": depth, "max_tokens_per_rank": 2}
    with in_one_thread(num_ranks, **options) as comms:
        ranks = Ranks(comms, with_combines)
        num_paths = 0
        for path in covering_paths(Coarse(num_ranks, depth, num_calls=2 * depth + 2)):
            ranks.run(path)
            num_paths += 1
        assert num_paths > 2
        return ranks.lost


@pytest.mark.parametrize("with_combines", [False, True])
@pytest.mark.parametrize(("num_ranks", "depth"), GROUPS)
def test_nothing_is_lost_in_any_order(num_ranks, depth, with_combines, monkeypatch):
    assert losses(monkeypatch, num_ranks, depth, 2 * depth, with_combines) == 0


@pytest.mark.parametrize(("num_ranks", "depth", "num_windows"), [case for case in CASES if case[2] < 2 * case[1]])
def test_with_fewer_windows_something_is_lost(num_ranks, depth, num_windows, monkeypatch):
    assert losses(monkeypatch, num_ranks, depth, num_windows, with_combines=False) > 0

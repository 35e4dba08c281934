"""Every order in which ranks can run the phases of their calls: choices are enumerated, and each run starts anew."""

import dataclasses
from collections.abc import Callable

from moecomm.algorithms.calls import LANE_BEGUN
from moecomm.work import Work

__all__ = ["Scenario", "explore", "receive_all", "run_at_random", "run_in_turns"]


def explore(run):
    """Calls `run(choose)` once for every sequence of choices; choose(n) gives a number below n. Returns how many."""
    prefix, count = [], 0
    while True:
        taken = []

        def choose(options, prefix=prefix, taken=taken):
            index = prefix[len(taken)] if len(taken) < len(prefix) else 0
            taken.append((index, options))
            return index

        run(choose)
        count += 1
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return count
        prefix = [index for index, _ in taken[:-1]] + [taken[-1][0] + 1]


def begin(call):
    """The call's Work, or the message of the ValueError with which it was refused."""
    try:
        return call()
    except ValueError as error:
        return str(error)


def run_interleaved(comms, calls, choose):
    """Each rank begins its calls in order and runs their phases; `choose` says who does what next.

    Rank 0 begins all of its calls before it runs a phase; the others do as they are told.
    Returns per rank a list of Work, or a message for a call that was refused.
    """
    begun = [[] for _ in comms]
    while True:
        options = []
        for rank, comm in enumerate(comms):
            if len(begun[rank]) < len(calls[rank]):
                options.append(lambda rank=rank: begun[rank].append(begin(calls[rank][len(begun[rank])])))
                if rank == 0:
                    continue
            running = [work for work in begun[rank] if isinstance(work, Work) and not work._call.settled]
            if running and comm._exchanger.session.sequencer.may_step():
                options.append(running[-1].step)
        if not options:
            return begun
        options[choose(len(options))]()


@dataclasses.dataclass
class Scenario:
    """What each rank calls, and what must come of it."""

    comms: list
    calls: list
    check: Callable

    def run(self, choose):
        works = run_interleaved(self.comms, self.calls, choose)
        self.check(works)
        for comm in self.comms:
            comm._exchanger.session.sequencer.release_quarantine()


def run_at_random(comms, calls, numbers):
    """Ranks begin their calls and run their phases in a random order; gives per rank what `calls[n](comm)` gave.

    Streams go as far as they can whenever it is their turn; one that never ends fails by the loop's end.
    """
    begun = [[] for _ in comms]
    for _ in range(50_000):
        options = []
        for comm, own in zip(comms, begun, strict=True):
            sequencer = comm._exchanger.session.sequencer
            # After a refusal, a call waits for its readers when it begins.
            earlier = sequencer.num_calls - comm.max_in_flight + 1
            is_read = all(sequencer.transport.lane(LANE_BEGUN, peer.rank) >= earlier for peer in comms)
            if len(own) < len(calls) and not sequencer._is_full() and is_read:
                options.append(lambda own=own, comm=comm: own.append(calls[len(own)](comm)))
            if sequencer._outstanding and sequencer.may_step():
                options.append(lambda sequencer=sequencer: _step_without_waiting(sequencer))
        if not options:
            assert [len(own) for own in begun] == [len(calls)] * len(comms), "nobody can go on"
            return begun
        numbers.choice(options)()
    raise AssertionError(f"not done: {begun}")


def _step_without_waiting(sequencer):
    sequencer._run_phase(sequencer._outstanding[0], may_wait=False)


def run_in_turns(works):
    """Polls until all are done; a rank that never gets done fails by the loop's end."""
    for _ in range(20):
        if all([work.done() for work in works]):
            return
    raise AssertionError(f"not done: {works}")


def receive_all(comms, batch, **options):
    """What a dispatch of the batch gives to each rank."""
    works = [batch.send(comm, "dispatch_async", **options) for comm in comms]
    run_in_turns(works)
    return [work.wait() for work in works]

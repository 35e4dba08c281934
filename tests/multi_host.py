"""Warm ranks on the hosts of `moecomm.testing.hosts`, as those of `moecomm.testing.launch`; they meet by gloo."""

import multiprocessing.connection
import pickle
import socket
import sys
import time
from datetime import timedelta

from moecomm.testing.contracts.cases import cases_for
from moecomm.testing.failures import PackedError, RankDied, RankFailure, pack_error

PORT = 29500
START_TIMEOUT = 60.0
BEGUN = "begun"
READY = "ready"

channel_to_the_test = None  # of a rank


class RanksOnHosts:
    """One process per rank of some hosts; also a world that contract checks can be run on. A context manager.

    Arguments:
        hosts: a `moecomm.testing.hosts.Hosts`.
        transport: what checks are given as the transport's name.
    """

    backend = "processes"
    cases = staticmethod(cases_for)

    def __init__(self, hosts, transport):
        self.hosts = hosts
        self.transport = transport
        self.rank_counts = (hosts.num_ranks,)
        self.several = hosts.num_ranks
        self._workers = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def run(self, fn, num_ranks, *args, return_exceptions=False, meanwhile=None, timeout=120.0):
        """Calls `fn(group, transport, *args)` on every rank; see `moecomm.testing.launch`.

        `meanwhile()` is called here when all ranks have called `begun()`. After a failure the ranks are replaced.
        """
        assert num_ranks == self.several, f"{num_ranks} ranks, but the hosts have {self.several}"
        if not self._workers:
            self._start()
        try:
            answers = self._ask(pickle.dumps((fn, (self.transport, *args))), meanwhile, time.monotonic() + timeout)
        except BaseException:
            self.stop()  # or the next function would be given the answers to this one
            raise
        texts = {rank: answer.text for rank, answer in enumerate(answers) if isinstance(answer, PackedError)}
        answers = [answer.unpack() if isinstance(answer, PackedError) else answer for answer in answers]
        failures = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Exception)}
        if failures:
            self.stop()
        if failures and not return_exceptions:
            raise RankFailure(failures, texts)
        return answers

    def _ask(self, message, meanwhile, deadline):
        for worker in self._workers:
            worker.channel.send_bytes(message)
        if meanwhile is not None:
            said = [worker.answer(deadline - time.monotonic()) for worker in self._workers]
            assert said == [BEGUN] * len(said), "\n".join(getattr(one, "text", str(one)) for one in said)
            meanwhile()
        return [worker.answer(deadline - time.monotonic()) for worker in self._workers]

    def _start(self):
        try:
            self._workers = [Worker(self.hosts, rank) for rank in range(self.several)]
            for worker in self._workers:
                assert worker.answer(START_TIMEOUT) == READY
        except BaseException:
            self.stop()
            raise

    def stop(self):
        """Ends the ranks."""
        while self._workers:
            self._workers.pop().end()


class Worker:
    """One rank, seen from the test."""

    def __init__(self, hosts, rank):
        self.rank = rank
        mine, theirs = socket.socketpair()
        with theirs:
            meeting = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(PORT)}
            env = {"RANK": str(rank), "WORLD_SIZE": str(hosts.num_ranks), **meeting}
            program = f"import multi_host; multi_host.work({theirs.fileno()})"
            command = [sys.executable, "-c", program]
            self.process = hosts.start(hosts.host_of[rank], command, env=env, pass_fds=[theirs.fileno()])
        self.channel = multiprocessing.connection.Connection(mine.detach())

    def answer(self, timeout):
        """What the rank says next; a `RankDied` or `TimeoutError` if nothing, the error that it raised."""
        try:
            if not self.channel.poll(max(0.0, timeout)):
                return TimeoutError(f"rank {self.rank} has not answered in time")
            return pickle.loads(self.channel.recv_bytes())
        except (EOFError, ConnectionResetError):
            return RankDied(self.process.wait(timeout=10))

    def end(self):
        self.process.kill()
        self.process.wait(timeout=10)
        self.channel.close()


def begun():
    """Says that a rank is in the midst of it; for functions that are called with `meanwhile`."""
    channel_to_the_test.send(BEGUN)


def work(descriptor):
    """The life of a rank: joins the group, then does what it is told until the test's end closes."""
    import torch
    import torch.distributed as dist

    from moecomm.groups import TorchGroup

    torch.set_num_threads(1)
    global channel_to_the_test
    channel = channel_to_the_test = multiprocessing.connection.Connection(descriptor)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    group = TorchGroup(dist.group.WORLD)
    channel.send(READY)
    while True:
        try:
            fn, args = pickle.loads(channel.recv_bytes())
        except EOFError:
            return
        try:
            answer = fn(group, *args)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
            answer = pack_error(error)
        channel.send_bytes(pickle.dumps(answer))  # tensors by value: `send` would share their memory

"""Dispatchers that misbehave on purpose, for tests of the benchmark; named on its command line as module:Class."""

import os

from moecomm.bench.dispatchers import Dispatcher
from moecomm.bench.gloo import GlooDispatcher


class Wrapped(Dispatcher):
    """Right in everything, through gloo."""

    name = "wrapped"

    def __init__(self, setup):
        self.inner = GlooDispatcher(setup)
        self.rank = setup.rank

    @property
    def transport(self):
        return "test"

    def dispatch(self, x, topk_idx, topk_weights):
        return self.inner.dispatch(x, topk_idx, topk_weights)

    def output_buffer(self, arrived):
        return self.inner.output_buffer(arrived)

    def combine(self, y, arrived, topk_weights):
        return self.inner.combine(y, arrived, topk_weights)

    def close(self):
        self.inner.close()


class OneElementOff(Wrapped):
    """Rank 1 receives one element that is not what was sent."""

    name = "one-off"

    def dispatch(self, x, topk_idx, topk_weights):
        arrived = super().dispatch(x, topk_idx, topk_weights)
        if self.rank == 1:
            arrived.x[0, 3] += 1000
        return arrived


class Doubled(Wrapped):
    """Combine gives twice what it must."""

    name = "doubled"

    def combine(self, y, arrived, topk_weights):
        return 2 * super().combine(y, arrived, topk_weights)


class Raising(Wrapped):
    """Rank 1 cannot be built."""

    name = "raising"

    def __init__(self, setup):
        if setup.rank == 1:
            raise RuntimeError("the cable is unplugged")
        super().__init__(setup)


class Dying(Wrapped):
    """Rank 1 ends without a word."""

    name = "dying"

    def combine(self, y, arrived, topk_weights):
        if self.rank == 1:
            os._exit(17)
        return super().combine(y, arrived, topk_weights)

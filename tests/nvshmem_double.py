"""A double of NVSHMEM between processes of one host: the heap of each PE is a file, which the others map.

Like NVSHMEM it is one per process, and its collective calls wait for all PEs: here 10 s, then they fail. Only the PEs
2 n and 2 n + 1 can address each other, or as many as `per_domain` says. What a stream has put arrives when it is waited
for, last first.
"""

import ctypes
import tempfile
import time
from pathlib import Path

import numpy as np

from moecomm.transports import nvshmem_runtime
from moecomm.transports.nvshmem import NvshmemTransport
from moecomm.transports.nvshmem_engine import EngineError

HEAP_BYTES = 1 << 22


class Double:
    """See `moecomm.transports.nvshmem_engine.Engine`. All that it knows is the process's.

    Attributes:
        log: what was called.
        fault: what `problem` says here.
        failing: calls that fail with status 7.
        per_domain: PEs that can address each other, those of the lowest numbers first.
        make_network: given the heaps, my PE and the size of a heap, a context in which NVSHMEM runs.
    """

    log, fault, failing = [], "", set()
    per_domain, make_network, network = 2, None, None
    _unfinished = []
    _parent, _folder, _pe, _heaps, _end, _live, _late, _meetings = None, None, 0, [], 0, set(), [], 0

    @classmethod
    def reset(cls, parent):
        """As in a new process. Files lie below the folder `parent`, which is there for as long as anything runs."""
        cls._parent = parent
        cls._unfinished.append(cls._heaps)  # streams that were left to themselves may still look there
        cls.log, cls.fault, cls.failing = [], "", set()
        cls.per_domain, cls.make_network, cls.network = 2, None, None
        cls._folder, cls._heaps, cls._end, cls._live, cls._late, cls._meetings = None, [], 0, set(), [], 0
        nvshmem_runtime._world, nvshmem_runtime._users, nvshmem_runtime._is_abandoned = "", 0, False
        nvshmem_runtime._left.clear()

    @classmethod
    def heaps(cls):
        """By PE, the address of each heap here; tests reach far ones, too."""
        return [heap.ctypes.data for heap in cls._heaps]

    def _called(self, name):
        type(self).log.append(name)
        if name in self.failing:
            raise EngineError(name, 7)

    def _meet(self):
        """Waits for all PEs."""
        cls = type(self)
        cls._meetings += 1
        (self._folder / f"met {self._meetings} {self._pe}").touch()
        deadline = time.monotonic() + 10
        wanted = [self._folder / f"met {self._meetings} {pe}" for pe in range(len(self._heaps))]
        while not all(path.exists() for path in wanted):
            if time.monotonic() > deadline:
                raise EngineError("meet", reason="a PE did not come")
            time.sleep(0.001)

    def problem(self):
        return self.fault

    def is_started(self):
        return self._folder is not None

    def unique_id(self):
        self._called("unique_id")
        return tempfile.mkdtemp(dir=self._parent).encode().ljust(128, b"\0")

    def start(self, unique_id, rank, num_ranks):
        self._called("start")
        cls = type(self)
        cls._folder, cls._pe = Path(unique_id.rstrip(b"\0").decode()), num_ranks - 1 - rank
        made = self._folder / f"new {self._pe}"
        made.write_bytes(bytes(HEAP_BYTES))
        made.rename(self._folder / f"heap {self._pe}")
        cls._heaps = [np.zeros(0)] * num_ranks
        self._meet()
        cls._heaps = [np.memmap(self._folder / f"heap {pe}", dtype=np.uint8, mode="r+") for pe in range(num_ranks)]
        if cls.make_network is not None:
            cls.network = cls.make_network(self.heaps(), cls._pe, HEAP_BYTES)
            cls.network.__enter__()
        self._meet()

    def finish(self):
        self._called("finish")
        assert not self._live, f"memory at {self._live} was not given back"
        self._meet()
        self.unplug()
        cls = type(self)
        cls._folder, cls._heaps, cls._end, cls._meetings = None, [], 0, 0

    @classmethod
    def unplug(cls):
        """Ends the network, if there is one."""
        network, cls.network = cls.network, None
        if network is not None:
            network.__exit__(None, None, None)

    def my_pe(self):
        return self._pe

    def num_pes(self):
        return len(self._heaps)

    def allocate(self, nbytes):
        self._called("allocate")
        self._meet()
        cls = type(self)
        if self._end + nbytes > HEAP_BYTES or "no memory" in self.failing:
            return 0
        begin = self._end
        address = self._heaps[self._pe].ctypes.data + begin
        cls._end += -(-nbytes // 512) * 512
        self._live.add(address)
        if cls.network is not None and nbytes > 4096:  # not the boards: what is read before it is written shows
            self._heaps[self._pe][begin : begin + nbytes] = 0xFF
        return address

    def free(self, address):
        self._called("free")
        self._live.remove(address)
        self._meet()

    def pointer(self, address, pe):
        return self._there(address, pe).ctypes.data if pe // self.per_domain == self._pe // self.per_domain else 0

    def put(self, target, source, nbytes, pe):
        self._called("put")
        self._late.append((self._there(target, pe)[:nbytes], source, nbytes))

    def quiet(self):
        self._called("quiet")
        while self._late:
            there, source, nbytes = self._late.pop()
            np.copyto(there, np.frombuffer(ctypes.string_at(source, nbytes), dtype=np.uint8))

    def initialise_module(self, module):
        self._called(f"module {module}")

    def _there(self, address, pe):
        return self._heaps[pe][address - self._heaps[self._pe].ctypes.data :]


class DoubleTransport(NvshmemTransport):
    name = "nvshmem-double"
    engine_class = Double
    goodbye_timeout = 1.0

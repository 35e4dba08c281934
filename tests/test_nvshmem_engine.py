"""What the transport asks of NVSHMEM, as calls of nvshmem4py; and what comes of its errors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moecomm.transports import nvshmem_engine
from moecomm.transports.nvshmem_engine import EngineError, Nvshmem4py

STREAM = 4242


class NVSHMEMError(Exception):
    """As nvshmem4py raises it."""

    def __init__(self, status):
        super().__init__(f"Status code {status}")
        self.status = status


class Calls(list):
    """A module whose functions note what they are called with."""

    def __init__(self, **answers):
        self.answers = answers

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*arguments, **options):
            self.append((name, *arguments, *options.items()))
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return called


def unique_id(byte=0):
    record = np.zeros(1, dtype=[("version", np.int32), ("internal", np.uint8, 124)])
    record.view(np.uint8)[:] = byte
    return SimpleNamespace(_data=record)


@pytest.fixture
def engine(monkeypatch):
    """The engine over modules that note their calls: `engine.core` and `engine.calls`."""
    synchronised = Calls()
    stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: synchronised.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronised.append("device"))

    class Over(Nvshmem4py):
        core, calls, waits = Calls(get_unique_id=unique_id(7)), Calls(init_status=2), synchronised
        _core = property(lambda self: self.core)
        _bindings = property(lambda self: self.calls)

    return Over()


def test_calls_have_their_arguments_in_order(engine):
    engine.calls.answers |= {"calloc": 4096, "ptr": 8192, "my_pe": 3, "n_pes": 4}
    assert engine.allocate(1 << 40) == 4096
    assert engine.pointer(4100, 2) == 8192
    assert (engine.my_pe(), engine.num_pes()) == (3, 4)
    engine.put(10, 20, 30, 1)
    engine.quiet()
    engine.initialise_module(99)
    engine.free(4096)
    assert engine.calls == [
        ("calloc", 1 << 40, 1),
        ("ptr", 4100, 2),
        ("my_pe",),
        ("n_pes",),
        ("putmem_on_stream", 10, 20, 30, 1, STREAM),
        ("quiet_on_stream", STREAM),
        ("cumodule_init", 99),
        ("free", 4096),
    ]
    assert engine.waits == ["stream"]
    engine.finish()
    assert engine.core == [("finalize",)]


def test_a_start_gives_rank_size_and_the_id_that_was_sent(engine):
    assert engine.unique_id() == bytes([7]) * 128
    engine.core.answers["get_unique_id"] = empty = unique_id()
    engine.start(bytes(range(128)), 2, 4)
    assert engine.waits == ["device"]  # the device has a context before NVSHMEM looks for one
    assert engine.core[1:] == [
        ("get_unique_id", ("empty", True)),
        ("init", ("uid", empty), ("rank", 2), ("nranks", 4), ("initializer_method", "uid")),
    ]
    assert empty._data.tobytes() == bytes(range(128))


@pytest.mark.parametrize("status", [0, 1])
def test_a_start_that_only_says_so_is_an_error(engine, status):
    """Without a GPU, NVSHMEM 3.4 reports success and waits for one."""
    engine.calls.answers["init_status"] = status
    assert not engine.is_started()
    with pytest.raises(EngineError, match="NVSHMEM cannot start as rank 0 of 1: it has not found the GPU"):
        engine.start(bytes(128), 0, 1)


@pytest.mark.parametrize(
    ("call", "function", "words"),
    [
        (lambda engine: engine.allocate(5), "calloc", "allocate 5 bytes"),
        (lambda engine: engine.put(1, 2, 3, 4), "putmem_on_stream", "put 3 bytes to PE 4"),
        (lambda engine: engine.quiet(), "quiet_on_stream", "wait for its puts"),
        (lambda engine: engine.pointer(1, 6), "ptr", "give the address of PE 6"),
        (lambda engine: engine.initialise_module(1), "cumodule_init", "initialise a module"),
    ],
)
def test_an_error_keeps_operation_and_status(engine, call, function, words):
    engine.calls.answers[function] = NVSHMEMError(2)
    with pytest.raises(EngineError) as caught:
        call(engine)
    assert str(caught.value) == f"NVSHMEM cannot {words}: status 2 (out of memory), Status code 2"
    assert (caught.value.operation, caught.value.status) == (words, 2)
    engine.calls.answers[function] = RuntimeError("a CUDA error")
    with pytest.raises(EngineError, match=f"NVSHMEM cannot {words}: a CUDA error") as caught:
        call(engine)
    assert caught.value.status == 0


def test_the_library_that_was_found_is_loaded_for_all(monkeypatch):
    loaded = []
    monkeypatch.setattr(nvshmem_engine, "find_library", lambda: SimpleNamespace(path="/somewhere/lib.so"))
    monkeypatch.setattr(nvshmem_engine.ctypes, "CDLL", lambda path, mode: loaded.append((path, mode)))
    monkeypatch.setattr(nvshmem_engine.importlib, "import_module", lambda name: f"module {name}")
    assert Nvshmem4py()._bindings == "module nvshmem.bindings"
    assert Nvshmem4py()._core == "module nvshmem.core"
    assert loaded == [("/somewhere/lib.so", nvshmem_engine.ctypes.RTLD_GLOBAL)] * 2

"""Memory of CUDA devices that other processes open, and who reaches it, on a made-up runtime and driver."""

import contextlib

import pytest
import torch

pytest.importorskip("triton", reason="moecomm.devices.cuda is for machines that have it")

from moecomm.devices import cuda, peer_access

BLOCK = 2 << 20


class Runtime:
    """As much of CuPy's runtime as devices call; notes every call, with the device that is the current one."""

    def __init__(self):
        self.calls = []
        self.current = None
        self.refuses = ()

    def _note(self, name, *arguments):
        if name in self.refuses:
            raise RuntimeError("out of memory")
        self.calls.append((name, self.current, *arguments))

    def malloc(self, size):
        self._note("malloc", size)
        return 0x7000_0000_0000

    def memset(self, address, value, size):
        self._note("memset", address, value, size)

    def deviceSynchronize(self):  # noqa: N802
        self._note("deviceSynchronize")

    def free(self, address):
        self._note("free", address)

    def ipcGetMemHandle(self, address):  # noqa: N802
        self._note("ipcGetMemHandle", address)
        return bytes(64)

    def ipcOpenMemHandle(self, handle, flags):  # noqa: N802
        self._note("ipcOpenMemHandle", handle, flags)
        return 0x7100_0000_0000

    def ipcCloseMemHandle(self, address):  # noqa: N802
        self._note("ipcCloseMemHandle", address)


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()

    @contextlib.contextmanager
    def on(index):
        made.current = index
        yield
        made.current = None

    monkeypatch.setattr(cuda, "_runtime", lambda: made)
    monkeypatch.setattr(cuda, "_on", on)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return made


@pytest.mark.parametrize(("nbytes", "room"), [(0, BLOCK), (24, BLOCK), (BLOCK, BLOCK), (BLOCK + 1, 2 * BLOCK)])
def test_exported_memory_is_zero_and_shares_no_block_of_the_driver(runtime, nbytes, room):
    device = cuda.CudaDevice(torch.device("cuda", 1))
    memory = device.allocate(nbytes, is_exported=True)
    assert (memory.address, memory.nbytes) == (0x7000_0000_0000, nbytes)
    assert device.export(memory) == bytes(64)
    del memory
    assert runtime.calls == [
        ("malloc", 1, room),
        ("memset", 1, 0x7000_0000_0000, 0, room),
        ("deviceSynchronize", 1),
        ("ipcGetMemHandle", 1, 0x7000_0000_0000),
        ("free", 1, 0x7000_0000_0000),
    ]


def test_opened_memory_is_closed_and_not_freed(runtime):
    device = cuda.CudaDevice(torch.device("cuda", 0))
    memory = device.open(b"h" * 64, 100)
    assert (memory.address, memory.nbytes) == (0x7100_0000_0000, 100)
    del memory
    assert runtime.calls == [("ipcOpenMemHandle", 0, b"h" * 64, 1), ("ipcCloseMemHandle", 0, 0x7100_0000_0000)]


@pytest.mark.parametrize("refused", ["malloc", "memset", "deviceSynchronize"])
def test_what_the_runtime_refuses_is_an_oserror_and_leaves_nothing(runtime, refused):
    runtime.refuses = (refused,)
    device = cuda.CudaDevice(torch.device("cuda", 0))
    with pytest.raises(OSError, match=f"{refused}: out of memory"):
        device.allocate(8, is_exported=True)
    names = [name for name, *_ in runtime.calls]
    assert names.count("malloc") == names.count("free")


class Driver:
    """Devices 0 and 1 have access and atomics, 0 and 2 access alone."""

    def __init__(self, status=0):
        self.status = status

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device._obj.value = 10 + ordinal
        return self.status

    def cuDeviceGetP2PAttribute(self, found, attribute, one, other):  # noqa: N802
        assert attribute == 3
        found._obj.value = int({one.value, other.value} == {10, 11})
        return self.status


@pytest.mark.parametrize(
    ("driver", "reached"),
    [
        (Driver(), [True, True, False, False]),
        (Driver(status=1), [True, True, True, False]),
        (None, [True] * 3 + [False]),
    ],
)
def test_a_gpu_is_reached_where_signals_arrive(monkeypatch, driver, reached):
    monkeypatch.setattr(peer_access, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda index, other: other != 3)
    assert [peer_access.reaches(0, other) for other in range(4)] == reached

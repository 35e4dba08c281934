"""Exchanges on a device that does its work late: the native kernels' bits, and mistakes in the order that show."""

import late_ranks
import pytest
import torch
from late_ranks import CAPACITY, LOW_LATENCY, THROUGHPUT, caller_on_a_stream, compare

from moecomm.devices.device_queue import DeviceQueue
from moecomm.testing import launch


@pytest.fixture(autouse=True)
def _poisoned():
    """What torch makes uninitialised is NaN, so what is read too early is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_threads_on_one_device_give_the_native_bits(num_ranks):
    dtype = (torch.bfloat16, torch.float32)[num_ranks % 2]
    for kinds in (THROUGHPUT, CAPACITY, LOW_LATENCY):
        launch(compare, num_ranks, "local", dtype, kinds, backend="threads", timeout=100)


@pytest.mark.parametrize("kinds", [THROUGHPUT, LOW_LATENCY], ids=["throughput", "low_latency"])
def test_processes_with_exported_memory_give_the_native_bits(kinds):
    launch(compare, 2, "nvlink", torch.float64, kinds, backend="processes", timeout=200)


# Seconds before each piece of work, by rank: of the callers' streams, of the communicators'.
SLOW_CALLER = ((0.06, 0.0), (0.0, 0.0))
SLOW_QUEUE = ((0.0, 0.0), (0.02, 0.0))


@pytest.mark.parametrize("delays", [SLOW_CALLER, SLOW_QUEUE])
def test_streams_in_order(delays):
    assert launch(caller_on_a_stream, 2, DeviceQueue, *delays, timeout=100) == [True, True]


@pytest.mark.parametrize(
    ("mistake", "delays"),
    [
        ("NotAfterTheCaller", SLOW_CALLER),
        ("NotHandedOver", SLOW_QUEUE),
        ("NotAfterTheSenders", SLOW_QUEUE),
        ("NotAfterTheGrant", SLOW_CALLER),
        ("NotAfterTheReaders", SLOW_CALLER),
    ],
)
def test_mistakes_in_the_order_show(mistake, delays):
    for slower in (1, 4, 10):  # a machine that is shared may be late itself
        scaled = [tuple(slower * seconds for seconds in ranks) for ranks in delays]
        if False in launch(caller_on_a_stream, 2, getattr(late_ranks, mistake), *scaled, timeout=100):
            return
    pytest.fail(f"nobody has noticed {mistake}")

"""What tests of transport `ucx` share."""

import ctypes
import random

import pytest

from moecomm.testing import launch
from moecomm.transports.base import WaitOutcome
from moecomm.transports.peers import gather_peers
from moecomm.transports.ucx import UcxTransport
from moecomm.transports.ucx_library import find_library

PATIENCE = 20.0
MIB = 1 << 20
SEGMENT = 16 * MIB  # of a region; registered at once

needs_ucx = pytest.mark.skipif(bool(find_library().problem), reason=f"no UCX here: {find_library().problem}")


def run(fn, num_ranks, *args, return_exceptions=False):
    return launch(fn, num_ranks, *args, backend="processes", timeout=40, return_exceptions=return_exceptions)


def open_transport(group, num_slots=4):
    return UcxTransport(group, gather_peers(group), num_slots)


def wait(transport, slot, at_least):
    outcome = transport.wait(slot, at_least, PATIENCE)
    assert outcome is WaitOutcome.REACHED, outcome


def pattern(length, seed):
    return random.Random(f"{length} {seed}").randbytes(length)


def address_of(data):
    """The address of bytes that live as long as the caller's reference."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value

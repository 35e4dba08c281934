"""moecomm: dispatch and combine for Mixture-of-Experts models with expert parallelism.

Layers, and imports only go down:

    integrations, cli, bench, demo
    nn
    communicator                    what the user calls
    functional                      torch operators
    gradients                       autograd
    exchanger                       a call's checks, below autograd
    algorithms                      who sends what to whom, in which order
    codecs                          numbers to row bytes
    transports                      how a peer is reached
    devices                         where tensors live, and in which order work on them is done
    kernels                         count, place, copy, reduce
    _C                              native code on raw addresses

`errors`, `groups`, `placement` and `topology` may be imported by all; `testing` may import all.
"""

from moecomm.communicator import Communicator
from moecomm.errors import (
    CallMismatch,
    CapacityExceeded,
    CommunicatorClosed,
    MemoryLimitExceeded,
    MoecommError,
    PeerFailed,
    PeerLost,
    PeerTimeout,
    RoutingChanged,
    TooManyInFlight,
    TransportError,
    TransportUnavailable,
)
from moecomm.groups import Group, LocalHub, SoloGroup, TorchGroup
from moecomm.handle import Handle, Received
from moecomm.placement import Placement
from moecomm.topology import Topology
from moecomm.version import __version__
from moecomm.work import Work

__all__ = [
    "CallMismatch",
    "CapacityExceeded",
    "Communicator",
    "CommunicatorClosed",
    "Group",
    "Handle",
    "LocalHub",
    "MemoryLimitExceeded",
    "MoecommError",
    "PeerFailed",
    "PeerLost",
    "PeerTimeout",
    "Placement",
    "Received",
    "RoutingChanged",
    "SoloGroup",
    "TooManyInFlight",
    "Topology",
    "TorchGroup",
    "TransportError",
    "TransportUnavailable",
    "Work",
    "__version__",
]

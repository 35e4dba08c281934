"""Where the ranks meet that a launcher (torchrun, or whoever sets its variables) has started with the same command."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from moecomm.errors import TransportError
from moecomm.groups import Group, SoloGroup, as_group

__all__ = ["started_group"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 0.05


@contextmanager
def started_group(timeout: float) -> Iterator[Group]:
    """The group that this process was started in: all ranks over gloo, or this process alone.

    Arguments:
        timeout: seconds that the ranks have to meet.

    Raises:
        TransportError: they do not meet in time; says who is missing.
        ValueError: a variable of the launcher is no number.
    """
    if dist.is_available() and dist.is_initialized():
        yield as_group(None)
        return
    if not dist.is_available() or not all(os.environ.get(name) for name in _VARIABLES):
        yield SoloGroup()
        return
    _meet(timeout)
    try:
        yield as_group(None)
    finally:
        dist.destroy_process_group()


def _meet(timeout: float) -> None:
    rank, size, port = _number("RANK"), _number("WORLD_SIZE"), _number("MASTER_PORT")
    if not 0 <= rank < size:
        raise ValueError(f"environment variable RANK must be in [0, WORLD_SIZE = {size}), got {rank}")
    master = os.environ["MASTER_ADDR"]
    # torchrun keeps the store itself and counts its attempts.
    keeps_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    deadline = time.monotonic() + timeout
    limit = timedelta(seconds=timeout)
    try:
        if keeps_store:
            socket.getaddrinfo(master, port)  # torch would try a name that does not exist until the deadline
        else:
            _knock(master, port, deadline)
        tcp = dist.TCPStore(master, port, size, keeps_store, limit, wait_for_workers=False)  # type: ignore[attr-defined]
        store: Store = dist.PrefixStore(f"moecomm/info/{attempt}", tcp)  # type: ignore[attr-defined]
        store.set(f"rank {rank}", f"rank {rank} (pid {os.getpid()} on {socket.gethostname()})")
        missing = _missing(store, size, deadline)
        here = [store.get(f"rank {other}").decode() for other in range(size) if other not in missing]
    except (OSError, RuntimeError) as error:
        raise _not_met(
            f"rank {rank} of {size} did not reach MASTER_ADDR {master}, MASTER_PORT {port}, in {timeout:g} s: {error}"
        ) from error
    if missing:
        who = f"rank{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))} of {size}"
        raise _not_met(f"{who} did not come to {master}, port {port}, within {timeout:g} s; here: {', '.join(here)}")
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
        raise _not_met(
            f"rank {rank} of {size} cannot connect to the others by gloo: {error}. gloo takes the interface that the "
            f"host's name leads to; GLOO_SOCKET_IFNAME ({interface}) says another one"
        ) from error


def _knock(master: str, port: int, deadline: float) -> None:
    """Returns once somebody listens there; whoever keeps the store may be later than this rank."""
    while True:
        try:
            socket.create_connection((master, port), timeout=max(0.1, deadline - time.monotonic())).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return


def _missing(store: Store, size: int, deadline: float) -> list[int]:
    """The ranks that have not come by the deadline."""
    while not store.check([f"rank {other}" for other in range(size)]):
        if time.monotonic() > deadline:
            return [other for other in range(size) if not store.check([f"rank {other}"])]
        time.sleep(_POLL_SECONDS)
    return []


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(f"environment variable {name} must be a number, got {os.environ[name]!r}") from None


def _not_met(message: str) -> TransportError:
    text = f"{message}. (Without RANK in the environment, this process would be looked at alone.)"
    return TransportError(text, operation="info", peers=())

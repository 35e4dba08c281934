"""What a communicator has chosen, and why, in words."""

from __future__ import annotations

from collections.abc import Mapping

from moecomm.algorithms.base import Algorithm, Session
from moecomm.algorithms.hops import Choice, Hops

__all__ = ["explain"]

_WIDTH = 13
_WAYS = {
    "auto": "algorithm='auto': over rails where that moves fewer bytes between domains, call by call",
    "direct": "algorithm='direct': from rank to rank",
    "hierarchical": "algorithm='hierarchical': over rails",
}


def explain(session: Session, transport_name: str, rank: int) -> str:
    """The text of `Communicator.explain`.

    Arguments:
        session: of the communicator.
        transport_name: what carries it.
        rank: mine.
    """
    topology = session.topology
    counts = {"rank": topology.num_ranks, "host": topology.num_hosts, "domain": topology.num_domains}
    numbers = "{} on {} in {}".format(*(f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items()))
    lines = _entry("transport", transport_name, *session.describe_wires(), *_refused(session.refusals))
    lines += _entry("topology", f"{numbers}; print(comm.topology) draws them")
    for mode, algorithm in session.algorithms.items():
        lines += _entry(mode.replace("_", " "), algorithm.name, *_details(session, mode, algorithm))
    if session.hops is not None and topology.num_domains > 1:
        sent, passed = _size(session.hops.between), _size(session.hops.forwarded)
        rest = [] if session.device.is_host else ["but for low-latency calls, whose bytes only the device knows"]
        lines += _entry(
            "so far", f"rank {rank} has put {sent} to ranks of other domains", f"and passed on {passed}", *rest
        )
    return "\n".join(lines)


def _entry(title: str, *texts: str) -> list[str]:
    return [f"{title if i == 0 else '':{_WIDTH}}{text}" for i, text in enumerate(texts)]


def _refused(refusals: Mapping[str, str]) -> list[str]:
    return [f"asked before it, {name}: {reason}" for name, reason in refusals.items()]


def _details(session: Session, mode: str, algorithm: Algorithm) -> list[str]:
    """What there is to say of a mode's algorithm."""
    if algorithm.refusal:
        return [f"{algorithm.refusal}."]
    if session.hops is None or session.topology.num_domains == 1:
        return []
    if mode != "throughput" and not session.device.is_host:
        return ["from rank to rank: a dispatch is a message for each, a combine a row per route"]
    if mode != "throughput":
        return _promised(session.hops)
    if session.device.is_host:
        return _choices(session.hops)
    if not session.num_crossings:
        return [f"tensors on {session.device.kind} cross between domains from rank to rank"]
    return _choices(session.hops)


def _choices(hops: Hops) -> list[str]:
    made = [_choice(choice, hops) for choice in hops.choices.values()]
    return [_WAYS[hops.way], *(made or ["no call so far"])]


def _promised(hops: Hops) -> list[str]:
    promise = hops.promise
    if promise is None:
        return []
    rails, direct = f"{promise.hierarchical_rows:.3g}", f"{promise.direct_rows:.3g}"
    if promise.is_hierarchical:
        how = f"over rails: a token of evenly chosen experts crosses {rails} times; from rank to rank {direct} times"
    elif hops.way == "direct":
        how = f"from rank to rank: a token of evenly chosen experts crosses {direct} times; over rails {rails} times"
    else:
        how = f"domains are single ranks: a token of evenly chosen experts crosses {direct} times, whatever the way"
    return [f"dispatch {how}", "combine from rank to rank: a row per route; reduce='per_host': as in throughput mode"]


def _choice(choice: Choice, hops: Hops) -> str:
    ways = {"over rails": choice.hierarchical_bytes, "from rank to rank": choice.direct_bytes}
    taken, other = ways if choice.is_hierarchical else reversed(ways)
    is_preferred = choice.is_hierarchical == hops.prefers_rails(choice.direct_bytes, choice.hierarchical_bytes)
    why = "" if is_preferred else " as reduce='per_host' always goes"
    inside = f" and {_size(choice.inside_bytes)} inside them" if choice.is_hierarchical else ""
    return (
        f"{choice.title}: {taken}{why}, {_size(ways[taken])} between domains{inside}, all ranks together; {other} it "
        f"would have been {_size(ways[other])} between them"
    )


def _size(count: int) -> str:
    """Bytes in decimal units, as links are measured."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"

"""What must hold for the PTX of every kernel, whatever a run on the interpreter shows (docs/kernels.md).

A program's stores come from many threads and its signal from one. So a block barrier stands between the last store and
every release; and between an acquire, which one thread executes, and the loads of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from moecomm.kernels.triton.ptx import Function, Instruction, access_widths, parse

__all__ = ["acquire_faults", "network_faults", "release_faults", "spill_faults", "width_faults"]

_ROW_WIDTH = 16
_HARMLESS_CALLS = ("__assertfail", "vprintf")
_NETWORK_CALL = re.compile(r"\bmoecomm_nvshmem_(\w+)")
_ENDS_EARLIER_PUTS = ("fence", "quiet", "refresh")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class _State(NamedTuple):
    """What may have happened before an instruction, on some path to it and since the last barrier.

    Attributes:
        stored: a store that no barrier has followed.
        bulk: a bulk store that was not waited for; a barrier does not help it.
        acquired: an acquire that no barrier has followed.
        ended: the same for a call of a network's fence, quiet or refresh, which one thread makes for all.
    """

    stored: Instruction | None = None
    bulk: Instruction | None = None
    acquired: Instruction | None = None
    ended: Instruction | None = None


def release_faults(ptx: str, kernel: str = "") -> list[str]:
    """Every release that some path reaches from a store with no block barrier between; empty = none.

    `kernel`: the only function that is looked at, where the others are a library's; "" = all are.

    A store or relaxed atomic through a global or generic address counts, whichever thread makes it. A bulk store must
    have been waited for (`cp.async.bulk.wait_group 0`, not `.read`), with a barrier behind the wait. A fence is
    a release, since a signal may follow it. A release whose scope is the block concerns nobody else.
    """
    faults: list[str] = []
    for function in _functions(ptx, kernel):
        for instruction, before in _reached(function):
            if not instruction.is_release:
                continue
            store = before.bulk or before.stored
            if store is not None:
                missing = "wait for the bulk copy" if before.bulk else "block barrier"
                faults.append(f"{function.name}: no {missing} between the store ({store}) and {instruction}")
        faults += _calls(function, lambda one: one.is_release)
    return faults


def acquire_faults(ptx: str, kernel: str = "") -> list[str]:
    """Every access of rows that some path reaches from an acquire with no block barrier between; empty = none.

    `kernel`: as for `release_faults`.

    That is: plain loads, and stores of 16 bytes or more (narrower ones may be the report of the thread that waited).
    A kernel that acquires also must not load through the read-only path (`ld.global.nc`), which nothing orders.
    """
    faults: list[str] = []
    for function in _functions(ptx, kernel):
        for instruction, before in _reached(function):
            is_load = instruction.is_load and not instruction.is_acquire
            is_row = (instruction.is_store and instruction.width >= _ROW_WIDTH) or instruction.is_bulk_store
            if before.acquired is not None and (is_load or is_row):
                faults.append(f"{function.name}: no block barrier between {before.acquired} and {instruction}")
        if any(one.is_acquire for one in function.body):
            readonly = [one for one in function.body if one.is_load and one.has("nc")]
            faults += [f"{function.name}: a kernel that acquires loads past the acquire: {one}" for one in readonly]
        faults += _calls(function, lambda one: one.is_acquire)
    return faults


def network_faults(ptx: str) -> list[str]:
    """Calls of NVSHMEM (nvshmem_device.ll) that a block barrier should set apart from others; empty = none.

    One must stand between stores and what puts or signals; and between a fence, quiet or refresh, which the first
    thread calls for all, and every later load, release, put or signal. Kernels call nothing else.
    """
    faults: list[str] = []
    for function in parse(ptx):
        if not any(_network_call(one) for one in function.body) or _NETWORK_CALL.search(function.name):
            continue
        for instruction, before in _reached(function):
            called = _network_call(instruction)
            if instruction.opcode == "call" and not _is_harmless(instruction):
                faults.append(f"{function.name}: what is called is not looked at: {instruction}")
            stored = before.stored or before.bulk or before.acquired
            if called and called not in _ENDS_EARLIER_PUTS and stored is not None:
                faults.append(f"{function.name}: no block barrier between {stored} and {instruction}")
            if before.ended is not None and (called or instruction.is_release or instruction.is_load):
                faults.append(f"{function.name}: no block barrier between {before.ended} and {instruction}")
    return faults


def _network_call(instruction: Instruction) -> str:
    """What it calls of NVSHMEM: "put", "quiet"; or nothing."""
    found = _NETWORK_CALL.search(instruction.operands) if instruction.opcode == "call" else None
    return found[1] if found else ""


def width_faults(ptx: str) -> list[str]:
    """What in a kernel that moves rows does not move them 16 bytes at a time; empty = nothing.

    There must be loads and stores of 16 bytes or more (or bulk copies), no narrower vectors and nothing of one or two
    bytes. Single values of 4 and 8 bytes are routes, addresses and weights.
    """
    faults: list[str] = []
    for function in parse(ptx):
        for what, widths in zip(("load", "store"), access_widths(function), strict=True):
            if not any(width == 0 or width >= _ROW_WIDTH for width in widths):
                faults.append(f"{function.name}: no {what} is {_ROW_WIDTH} bytes wide, only {sorted(widths)}")
        for one in function.body:
            is_vector = one.has("v2", "v4", "v8") or one.opcode == "cp"
            if (one.is_load or one.is_store) and 0 < one.width < (_ROW_WIDTH if is_vector else 4):
                faults.append(f"{function.name}: moves {one.width} bytes at a time: {one}")
    return faults


def spill_faults(ptxas_log: str, kernel: str = "") -> list[str]:
    """The lines of `ptxas -v` that tell of spilled registers; empty = none.

    `kernel`: as for `release_faults`.

    Raises:
        ValueError: the text says nothing about spills.
    """
    if kernel:
        ptxas_log = "".join(re.findall(rf"Function properties for {re.escape(kernel)}\b[^\n]*\n[^\n]*", ptxas_log))
    found = list(_SPILLS.finditer(ptxas_log))
    if not found:
        raise ValueError("this is not what `ptxas -v` says: it has no line on spills")
    return [one[0] for one in found if int(one[1]) or int(one[2])]


def _functions(ptx: str, kernel: str) -> list[Function]:
    return [function for function in parse(ptx) if kernel in ("", function.name)]


def _reached(function: Function) -> list[tuple[Instruction, _State]]:
    """Each instruction that a path from the entry reaches, and what may have happened before it."""
    before: dict[int, _State] = {0: _State()} if function.body else {}
    waiting = [0] if function.body else []
    while waiting:
        index = waiting.pop()
        after = _after(function, function.body[index], before[index])
        for successor in _successors(function, index):
            known = before.get(successor)
            merged = after if known is None else _State(*(a or b for a, b in zip(known, after, strict=True)))
            if merged != known:
                before[successor] = merged
                waiting.append(successor)
    return [(function.body[index], before[index]) for index in sorted(before)]


def _after(function: Function, instruction: Instruction, state: _State) -> _State:
    if instruction.is_block_barrier(function.num_threads):
        return state._replace(stored=None, acquired=None, ended=None)
    if _network_call(instruction) in _ENDS_EARLIER_PUTS:
        return state._replace(ended=state.ended or instruction)
    if instruction.is_bulk_store:
        return state._replace(bulk=state.bulk or instruction)
    if instruction.opcode == "cp" and instruction.has("wait_group") and instruction.has("bulk"):
        # What was waited for has been written by this thread, as if by a store; `.read` waits for less.
        if state.bulk and not instruction.has("read") and instruction.operands == "0" and not instruction.predicate:
            return state._replace(bulk=None, stored=state.stored or state.bulk)
        return state
    if instruction.is_acquire:
        state = state._replace(acquired=state.acquired or instruction)
    if (instruction.is_store or instruction.is_atomic) and not instruction.is_release:
        state = state._replace(stored=state.stored or instruction)
    return state


def _successors(function: Function, index: int) -> list[int]:
    instruction = function.body[index]
    following = [index + 1] if index + 1 < len(function.body) else []
    if instruction.opcode == "bra":
        target = function.labels.get(instruction.operands.strip())
        if target is None:
            raise ValueError(f"{function.name}: no label for {instruction}")
        taken = [target] if target < len(function.body) else []
        return taken + (following if instruction.predicate else [])
    if instruction.opcode == "brx":
        return sorted({target for target in function.labels.values() if target < len(function.body)})
    if instruction.opcode in ("ret", "exit", "trap"):
        return following if instruction.predicate else []
    return following


def _calls(function: Function, concerns: Callable[[Instruction], bool]) -> list[str]:
    """Calls in a function that orders memory: what they do is not followed, so they are faults."""
    if not any(concerns(one) for one in function.body):
        return []
    calls = [one for one in function.body if one.opcode == "call"]
    return [f"{function.name}: what is called is not looked at: {one}" for one in calls if not _is_harmless(one)]


def _is_harmless(call: Instruction) -> bool:
    """Whether it touches nothing of others, or `network_faults` looks at it."""
    return bool(_network_call(call)) or any(name in call.operands for name in _HARMLESS_CALLS)

"""PTX as text: its functions and instructions, and what they do to memory that other threads see.

Needs neither Triton nor a device. What compilers write is understood: one label or instruction after another, inline
assembly in braces, debug information behind the code.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Function", "Instruction", "access_widths", "memory_order", "parse"]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_HEADER = re.compile(r"(?:\.\w+\s+)*\.(?:entry|func)\b(?:\s*\([^)]*\))?\s*([\w$]+)")
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)\s*(?:,\s*(\d+)\s*)?(?:,\s*(\d+)\s*)?")
_LABEL = re.compile(r"([\w$]+):(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?[\w%$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_ENDS_WITH_ITS_LINE = re.compile(r"\.(?:version|target|address_size|loc|file|pragma\s+\"[^\"]*\"(?!;))\b[^\n]*")
_TYPE = re.compile(r"[bsuf](\d+)|(?:bf|f|e\dm\d|e\dm\dx\d|f16x|bf16x)\d+")

_ORDERS = ("relaxed", "acquire", "release", "acq_rel", "sc", "volatile", "weak")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_ELSEWHERE = {"shared", "shared::cta", "shared::cluster", "param", "param::entry", "param::func", "const", "local"}
_ATOMIC = ("atom", "red", "multimem")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        line: in the text, from 1.
        predicate: the register on which it depends, "!" before it if negated; None = always.
        opcode: what stands before the first dot, "ld".
        qualifiers: what stands between dots behind it, in their order: ("global", "v4", "b32").
        operands: the rest, without the semicolon.
    """

    line: int
    predicate: str | None
    opcode: str
    qualifiers: tuple[str, ...]
    operands: str

    def __str__(self) -> str:
        name = ".".join((self.opcode, *self.qualifiers))
        return f"line {self.line}: {name} {' '.join(self.operands.split())}".rstrip()

    def has(self, *qualifiers: str) -> bool:
        """Whether any of these is among its qualifiers."""
        return any(qualifier in self.qualifiers for qualifier in qualifiers)

    @cached_property
    def scope(self) -> str | None:
        """Among whom it orders: "cta", "cluster", "gpu", "sys"; None where it says nothing."""
        if self.opcode == "membar":
            return {"cta": "cta", "gl": "gpu", "sys": "sys"}.get(self.qualifiers[0]) if self.qualifiers else None
        return next((q for q in self.qualifiers if q in _SCOPES), None)

    @cached_property
    def order(self) -> str | None:
        """Its memory order; "sc" for `membar`; None for a plain access and for fences between proxies."""
        if self.opcode == "membar":
            return "sc" if self.qualifiers and self.qualifiers[0] in ("cta", "gl", "sys") else None
        if self.opcode == "fence" and self.has("proxy", "mbarrier_init"):
            return None
        return next((q for q in self.qualifiers if q in _ORDERS), None)

    @cached_property
    def is_global(self) -> bool:
        """Whether it reaches memory of other blocks: the global space, or an address whose space is not said."""
        return not any(q in _ELSEWHERE for q in self.qualifiers)

    @cached_property
    def is_atomic(self) -> bool:
        """An atomic operation on memory of other blocks."""
        return self.opcode in _ATOMIC and self.is_global

    @cached_property
    def is_load(self) -> bool:
        """Reads memory of other blocks and is not atomic; asynchronous copies into shared memory are loads, too."""
        if self.opcode in ("ld", "ldu"):
            return self.is_global
        if self.opcode == "cp":
            return self.has("async") and self.has("global") and not self.is_bulk_store and not self.has("prefetch")
        return False

    @cached_property
    def is_store(self) -> bool:
        """Writes memory of other blocks when it is executed, and is not atomic."""
        return self.opcode == "st" and self.is_global

    @cached_property
    def is_bulk_store(self) -> bool:
        """A bulk copy or reduction from shared memory: it writes later, through the asynchronous proxy."""
        if not (self.opcode == "cp" and self.has("bulk")):
            return False
        spaces = [q for q in self.qualifiers if q.split("::")[0] in ("global", "shared")]
        return spaces[:1] == ["global"]

    def is_block_barrier(self, num_threads: int | None) -> bool:
        """Whether every thread of a block of `num_threads` waits here for every other, whatever the predicates."""
        if self.predicate or self.opcode not in ("bar", "barrier") or not self.has("sync", "red"):
            return False
        if self.has("warp"):
            return num_threads is not None and num_threads <= 32
        operands = [operand.strip() for operand in self.operands.split(",")]
        threads = operands[1:] if self.has("sync") else operands[2:-1]
        return not threads or threads == [str(num_threads)]

    @cached_property
    def is_acquire(self) -> bool:
        """What others released may be read behind it, by this thread."""
        return self._orders("acquire")

    @cached_property
    def is_release(self) -> bool:
        """What this thread knows of memory is published by it, or by an access behind it."""
        return self._orders("release")

    @cached_property
    def width(self) -> int:
        """Bytes that one thread moves; 0 where the operands decide."""
        if self.opcode == "cp":
            size = re.search(r"\],\s*(0x[0-9a-f]+|\d+)", self.operands.partition(",")[2])
            return int(size[1], 0) if size and not self.has("bulk") else 0
        elements, bits = 1, 0
        for qualifier in self.qualifiers:
            if qualifier in ("v2", "v4", "v8"):
                elements = int(qualifier[1])
            elif _TYPE.fullmatch(qualifier):
                sizes = [int(number) for number in re.findall(r"\d+", qualifier.replace("e5m2", "8"))]
                bits = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
        return elements * bits // 8

    def _orders(self, half: str) -> bool:
        if self.scope == "cta":
            return False
        if self.opcode in ("fence", "membar"):
            return self.order in (half, "acq_rel", "sc")
        return self.is_global and self.opcode in ("ld", "st", *_ATOMIC) and self.order in (half, "acq_rel")


@dataclass(frozen=True)
class Function:
    """A kernel, or a function that it calls.

    Attributes:
        name: of it.
        num_threads: of a block, where the text says so.
        body: its instructions.
        labels: the index in `body` that each label stands before; it may be one behind the last.
    """

    name: str
    num_threads: int | None
    body: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(text: str) -> list[Function]:
    """The functions of a PTX text that have a body, in their order."""
    text = _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    text = re.split(r"^\s*\.section\b", text, maxsplit=1, flags=re.MULTILINE)[0]
    functions: list[Function] = []
    name, num_threads = "", None
    body: list[Instruction] = []
    labels: dict[str, int] = {}

    def finish() -> None:
        if name:
            functions.append(Function(name, num_threads, tuple(body), dict(labels)))
        body.clear()
        labels.clear()

    at = 0
    while True:
        at = _skipped(text, at)
        if at >= len(text):
            break
        header = _HEADER.match(text, at)
        if header:
            end = min(index for index in (text.find("{", at), text.find(";", at), len(text)) if index >= 0)
            if text[end : end + 1] == "{":
                finish()
                name, num_threads = header[1], _threads(text[at:end])
            at = end + 1
            continue
        label = _LABEL.match(text, at)
        if label:
            labels[label[1]] = len(body)
            at = label.end()
            continue
        end = text.find(";", at)
        end = len(text) if end < 0 else end
        # Debug lines may stand in the middle of inline assembly, but not within an instruction.
        found = _INSTRUCTION.fullmatch(text[at:end].strip())
        if found and name:
            opcode, *qualifiers = [part for part in re.split(r"(?<!:)\.(?!:)", found[2]) if part]
            line = text.count("\n", 0, at) + 1
            body.append(Instruction(line, found[1], opcode, tuple(qualifiers), found[3].strip()))
        at = end + 1
    finish()
    return functions


def access_widths(function: Function) -> tuple[Counter[int], Counter[int]]:
    """How many plain loads and stores of global memory there are of each width in bytes; bulk copies count as 0."""
    plain = [one for one in function.body if one.order in (None, "weak", "volatile", "relaxed")]
    loads = Counter(one.width for one in plain if one.is_load)
    stores = Counter(one.width for one in plain if one.is_store or one.is_bulk_store)
    return loads, stores


def memory_order(function: Function) -> Counter[str]:
    """How many instructions there are of each kind that orders memory: "red.release.sys.add", "bar.sync", ..."""
    kinds: Counter[str] = Counter()
    for one in function.body:
        if one.opcode in ("bar", "barrier", "membar", "fence"):
            kinds[".".join((one.opcode, *(q for q in one.qualifiers if q != "aligned")))] += 1
        elif one.is_atomic or (one.order not in (None, "weak") and one.is_global and one.opcode in ("ld", "st")):
            operation = [q for q in one.qualifiers if q in ("add", "exch", "cas", "or", "and", "xor", "min", "max")]
            parts = [one.opcode, one.order or "relaxed", one.scope or "gpu", *operation]
            kinds[".".join(parts)] += 1
        elif one.opcode == "cp" and one.has("wait_group", "wait_all", "mbarrier"):
            kinds[".".join((one.opcode, *one.qualifiers))] += 1
    return kinds


def _threads(header: str) -> int | None:
    found = _THREADS.search(header)
    if not found:
        return None
    product = 1
    for number in found.groups():
        product *= int(number or 1)
    return product


def _skipped(text: str, at: int) -> int:
    """The place of the next label, instruction or header: behind blanks, braces of scopes and directives."""
    while at < len(text):
        if text[at].isspace() or text[at] in "{}":
            at += 1
        elif text[at] == "." and not _HEADER.match(text, at):
            found = _ENDS_WITH_ITS_LINE.match(text, at)
            if found:
                at = found.end()
            else:
                end = text.find(";", at)
                at = len(text) if end < 0 else end + 1
        else:
            break
    return at

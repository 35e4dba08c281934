"""Compiles Triton kernels for GPUs that are not there."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moecomm.kernels.triton.compile_case import CompileCase

__all__ = ["Compiled", "cross_compile"]

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Compiled:
    """What the compilers made of one case.

    Attributes:
        name: of the case.
        capability: compute capability that it was compiled for: 80, 90 or 100.
        ptx: the text.
        log: what `ptxas -v` said.
        shared_bytes: shared memory that a block takes.
    """

    name: str
    capability: int
    ptx: str
    log: str
    shared_bytes: int

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return max(int(number) for number in _REGISTERS.findall(self.log))

    @property
    def spilled_bytes(self) -> int:
        """Bytes that a thread stores and loads because its registers do not suffice."""
        return sum(int(stores) + int(loads) for stores, loads in _SPILLS.findall(self.log))


def cross_compile(
    case: CompileCase, capability: int, cache: Path, libraries: Mapping[str, str] | None = None
) -> Compiled:
    """Compiles with Triton's own `ptxas`, with products and sums rounded one by one. Needs no device and no driver.

    Arguments:
        case: what to compile; its kernel must not have been made under TRITON_INTERPRET.
        capability: 80, 90 or 100, not below what the case needs.
        cache: a folder for results; one that was made by the same Triton from the same source is read again.
        libraries: LLVM code to link, by name.

    Raises:
        ValueError: the case is not for this capability, or its kernel is an interpreted one.
    """
    if capability < case.min_capability:
        raise ValueError(f"{case.name} needs compute capability {case.min_capability}; capability is {capability}")
    if not isinstance(case.kernel, triton.JITFunction):
        raise ValueError(f"the kernel of {case.name} is a {type(case.kernel).__name__}: is TRITON_INTERPRET set?")
    positions = {name: position for position, name in enumerate(case.kernel.arg_names)}
    attrs = {(positions[name],): [["tt.divisibility", divisor]] for name, divisor in (case.attrs or {}).items()}
    source = ASTSource(case.kernel, case.signature, case.constexprs, attrs)
    options: dict[str, Any] = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": False,
    }
    if case.max_registers is not None:
        options["maxnreg"] = case.max_registers
    key = [triton.__version__, source.hash(), case.name, capability, dict(options)]
    if libraries:
        options["extern_libs"] = dict(libraries)
        key.append({name: [path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for name, path in libraries.items()})
    kept = cache / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.json"
    if kept.exists():
        return Compiled(**json.loads(kept.read_text(encoding="utf-8")))

    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(said),
    ):
        # Triton shows what ptxas said only where it compiles, so its own cache must not answer.
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    compiled = Compiled(case.name, capability, made.asm["ptx"], said.getvalue(), made.metadata.shared)
    cache.mkdir(parents=True, exist_ok=True)
    # Several processes may write the same result: each its own file, whole before it gets its name.
    with tempfile.NamedTemporaryFile("w", dir=cache, delete=False, encoding="utf-8") as file:
        json.dump(asdict(compiled), file)
    os.replace(file.name, kept)
    return compiled

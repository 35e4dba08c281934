"""csrc/cuda/push_bulk.cu as a library for the CPU, over an emulated copy engine: how tests build and call it."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from moecomm.kernels.cuda.push_bulk import choose_launch, kernel_arguments

ROOT = Path(__file__).parents[1]
COMPILER = shutil.which("g++") or shutil.which("c++")


def build(folder, source=None):
    """The twin as a loaded library; of another text of push_bulk.cu, if there is one."""
    includes = [ROOT / "tests/cuda/emulation", ROOT / "csrc/cuda"]
    if source is not None:
        (folder / "push_bulk.cu").write_text(source, encoding="utf-8")
        includes.insert(0, folder)
    library = folder / "twin.so"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    command = [COMPILER, *flags, *(f"-I{path}" for path in includes), str(ROOT / "tests/cuda/push_bulk_twin.cc")]
    done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def push(library, rows, routes, addresses, *, num_blocks=2, piece_bytes=None, seed=0, status=None):
    """As push_rows; gives what the emulation objects to."""
    num_tokens, row_bytes = rows.shape[0], rows.shape[1] * rows.element_size()
    chosen = choose_launch(num_tokens, row_bytes, 132)
    piece_bytes = piece_bytes or chosen.piece_bytes
    shared_bytes = chosen.shared_bytes - 4 * (chosen.piece_bytes - piece_bytes)
    table = torch.tensor(addresses, dtype=torch.int64)
    numbers = kernel_arguments(rows, routes, table, piece_bytes, status)
    failure = ctypes.create_string_buffer(256)
    head = [ctypes.c_uint(num_blocks), ctypes.c_int64(shared_bytes), ctypes.c_uint(seed), failure, ctypes.c_size_t(256)]
    library.run_push_bulk(*head, *map(ctypes.c_int64, numbers))
    return failure.value.decode()

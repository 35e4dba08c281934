"""CUDA C++ sources compile for devices that are not there, and what is compiled is kept and found again."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import moecomm
from moecomm.errors import TransportUnavailable
from moecomm.kernels.cuda import loader
from moecomm.kernels.triton.ptx_rules import acquire_faults, release_faults, spill_faults

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
NVCC = shutil.which("nvcc")


def environment(**more):
    """For a process of its own that finds this checkout first."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


class FakeError(Exception):
    pass


class FakeNvrtc:
    """Compiles to a text that says what was compiled."""

    NVRTCError = FakeError

    def __init__(self, version=(13, 0)):
        self.version = version
        self.compiled = 0
        self.options = None

    def getVersion(self):
        return self.version

    def createProgram(self, source, name, headers, include_names):
        assert all(isinstance(text, bytes) for text in [*headers, *include_names])
        return (source, name, headers, include_names)

    def compileProgram(self, program, options):
        self.options = options
        if "does not compile" in program[0]:
            raise FakeError("NVRTC_ERROR_COMPILATION")

    def getProgramLog(self, program):
        return f"{program[1]}(1): error: what is this?"

    def getCUBIN(self, program):
        self.compiled += 1
        return b"\x7fELF" + repr((program, self.options)).encode()

    def destroyProgram(self, program):
        pass


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of sources in place of csrc/cuda, and a cache folder of its own."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "one.cu").write_text("#include <near.cuh>\n#include <cstdint>\nkernel\n")
    (folder / "near.cuh").write_text('  # include "far.cuh"\nnear\n')
    (folder / "far.cuh").write_text("#include <near.cuh>\nfar\n")
    monkeypatch.setattr(loader, "_source_folder", lambda: folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def nvrtc(monkeypatch):
    fake = FakeNvrtc()
    monkeypatch.setattr(loader, "_nvrtc", lambda name: fake)
    return fake


def test_headers_are_found_through_headers(sources):
    source, headers = loader.read_source("one")
    assert source.endswith("kernel\n")
    assert sorted(headers) == ["far.cuh", "near.cuh"]


def test_what_is_compiled_is_found_again(sources, nvrtc, tmp_path):
    first = loader.compiled_file("one", "sm_90a")
    assert first.parent == tmp_path / "cache" / "moecomm"
    assert first.read_bytes().startswith(b"\x7fELF")
    assert loader.compiled_file("one", "sm_90a") == first
    assert nvrtc.compiled == 1
    assert nvrtc.options == ("--gpu-architecture=sm_90a", "--std=c++17")
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_change_of_anything_compiles_again(sources, nvrtc):
    files = {loader.compiled_file("one", "sm_90a"), loader.compiled_file("one", "sm_100a")}
    for name in ("one.cu", "near.cuh", "far.cuh"):
        with (sources / name).open("a") as file:
            file.write("more\n")
        files.add(loader.compiled_file("one", "sm_90a"))
    nvrtc.version = (13, 1)
    files.add(loader.compiled_file("one", "sm_90a"))
    assert len(files) == nvrtc.compiled == 6


def test_half_a_file_is_compiled_again(sources, nvrtc):
    kept = loader.compiled_file("one", "sm_90a")
    kept.write_bytes(b"")
    assert loader.compiled_file("one", "sm_90a").read_bytes().startswith(b"\x7fELF")
    assert nvrtc.compiled == 2


def test_a_cache_that_cannot_be_written_is_done_without(sources, nvrtc, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = loader.compiled_file("one", "sm_90a")
    assert path.read_bytes().startswith(b"\x7fELF")
    assert tmp_path not in path.parents


def test_many_at_once_leave_one_whole_file(sources, nvrtc):
    with ThreadPoolExecutor(8) as pool:
        files = {
            future.result(30) for future in [pool.submit(loader.compiled_file, "one", "sm_90a") for _ in range(16)]
        }
    (path,) = files
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert path.read_bytes().startswith(b"\x7fELF")


@pytest.mark.slow
def test_processes_that_race_leave_one_whole_file(tmp_path):
    code = (
        "import sys; from pathlib import Path; from moecomm.kernels.cuda import loader\n"
        "for i in range(40):\n"
        "    path = loader._write(b'\\x7fELF' + bytes([int(sys.argv[2])]) * 100000, Path(sys.argv[1]))\n"
        "    assert len(path.read_bytes()) == 100004 and loader._is_whole(path)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "kept.cubin")]
    processes = [subprocess.Popen([*command, str(number)], env=environment()) for number in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert [one.name for one in tmp_path.iterdir()] == ["kept.cubin"]


def test_a_source_that_does_not_compile_says_where(sources, nvrtc):
    (sources / "bad.cu").write_text("this does not compile")
    with pytest.raises(RuntimeError, match=r"bad.cu does not compile with .*sm_90a(.|\n)*what is this"):
        loader.compiled_file("bad", "sm_90a")


def fake_cupy(monkeypatch, **properties):
    def of_device(device):
        if device:
            raise FakeError("cudaErrorInvalidDevice: invalid device ordinal")
        return properties

    runtime = types.SimpleNamespace(getDeviceProperties=of_device, CUDARuntimeError=FakeError)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(loader, "import_module", lambda name: cupy)


def test_without_cupy_it_says_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(loader, "import_module", missing)
    with pytest.raises(TransportUnavailable, match=r"CuPy cannot be imported .* pip install 'moecomm\[gpu\]'"):
        loader.load_kernel("push_bulk", 0, min_capability=90)


def test_a_device_that_is_not_there_or_too_old_is_refused(monkeypatch):
    fake_cupy(monkeypatch, major=8, minor=0)
    with pytest.raises(TransportUnavailable, match=r"needs compute capability 9.0; device 0 has 8.0.*Triton"):
        loader.load_kernel("push_bulk", 0, min_capability=90)
    with pytest.raises(TransportUnavailable, match=r"device 1 cannot be used \(cudaErrorInvalidDevice.*nvidia-smi"):
        loader.load_kernel("push_bulk", 1, min_capability=90)


@pytest.mark.parametrize(
    ("major", "minor", "target"), [(8, 0, "sm_80"), (9, 0, "sm_90a"), (10, 0, "sm_100a"), (10, 3, "sm_103a")]
)
def test_the_target_is_that_of_the_device(monkeypatch, major, minor, target):
    fake_cupy(monkeypatch, major=major, minor=minor)
    assert loader._architecture("one", 0, 80) == target


def test_importing_it_imports_no_cupy():
    code = "import sys, moecomm, moecomm.kernels.cuda.push_bulk; print('cupy' in sys.modules, 'triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nvcc_compiles_it_and_it_keeps_the_rules(tmp_path, source, architecture):
    flags = ["-std=c++17", f"-arch={architecture}", "-Werror", "all-warnings", "-Xptxas", "-v", f"-I{source.parent}"]
    flags += ["--keep", f"--keep-dir={tmp_path}"]
    command = [NVCC, *flags, "-cubin", "-o", str(tmp_path / "out.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.cubin").read_bytes().startswith(b"\x7fELF")
    assert spill_faults(done.stderr) == []
    ptx = (tmp_path / f"{source.stem}.ptx").read_text(encoding="utf-8")
    assert release_faults(ptx) == []
    assert acquire_faults(ptx) == []
    stores = re.findall(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", ptx)
    waits = re.findall(r"cp\.async\.bulk\.wait_group \s*0;", ptx)
    assert bool(stores) == bool(waits)


def has_nvrtc():
    if importlib.util.find_spec("cupy") is None:
        return False
    code = "from moecomm.kernels.cuda import loader; loader._nvrtc('any')"
    return (
        subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nvrtc_compiles_it(tmp_path, source):
    if not has_nvrtc():
        pytest.skip("needs CuPy and NVRTC")
    code = (
        "import json, sys; from moecomm.kernels.cuda.loader import compiled_file\n"
        "print(json.dumps([str(compiled_file(sys.argv[1], target)) for target in ('sm_90a', 'sm_100a')]))\n"
    )
    env = environment(XDG_CACHE_HOME=str(tmp_path))
    command = [sys.executable, "-c", code, source.stem]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    files = [Path(path) for path in json.loads(done.stdout)]
    assert [path.parent for path in files] == [tmp_path / "moecomm"] * 2
    assert all(path.read_bytes().startswith(b"\x7fELF") for path in files)


def test_an_installed_package_would_find_its_sources():
    assert Path(moecomm.__file__).parent / "kernels" / "cuda" == Path(loader.__file__).parent
    assert SOURCES
    for source in SOURCES:
        assert loader.read_source(source.stem)[0] == source.read_text(encoding="utf-8")

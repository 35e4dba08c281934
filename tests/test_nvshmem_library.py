"""Where NVSHMEM is looked for, which bitcode a GPU gets, and what is said where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moecomm.transports import nvshmem_library
from moecomm.transports.nvshmem_library import bitcode_in, library_folders, library_in

HOST = "libnvshmem_host.so.3"
OLD = ["libnvshmem_device.bc", "libnvshmem_device.a", HOST]
NEW = [*(f"libnvshmem_device_sm_{arch}.bc" for arch in (75, 80, 89, 90, 100)), "libnvshmem_device.a", HOST]


def tree(folder, names, version=None, headers="include"):
    """A folder like those of the wheels; gives its libraries' folder."""
    for name in names:
        path = folder / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    if version is not None:
        path = folder / headers / "non_abi" / "nvshmem_version.h"
        path.parent.mkdir(parents=True)
        kinds = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
        lines = [f"#define NVSHMEM_VENDOR_{kind}_VERSION {number}\n" for kind, number in kinds]
        path.write_text("".join(lines) + "#define NVSHMEM_TRANSPORT_PLUGIN_MAJOR_VERSION 7\n", encoding="utf-8")
    return folder / "lib"


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (75, "sm_75"),
        (80, "sm_80"),
        (86, "sm_80"),
        (87, "sm_80"),
        (89, "sm_89"),
        (90, "sm_90"),
        (100, "sm_100"),
        (103, "sm_100"),
        (120, None),
        (70, None),
    ],
)
def test_each_gpu_gets_the_highest_bitcode_of_its_family_up_to_itself(tmp_path, capability, name):
    folder = tree(tmp_path, NEW)
    found = bitcode_in(folder, capability)
    assert found == (None if name is None else folder / f"libnvshmem_device_{name}.bc")


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_one_bitcode_for_all_is_for_all(tmp_path, capability):
    folder = tree(tmp_path, OLD)
    assert bitcode_in(folder, capability) == folder / "libnvshmem_device.bc"


def test_what_was_made_for_the_family_comes_before_what_is_for_all(tmp_path):
    folder = tree(tmp_path, [*OLD, "libnvshmem_device_sm_80.bc", "libnvshmem_device_sm_90.bc.orig"])
    assert bitcode_in(folder, 86).name == "libnvshmem_device_sm_80.bc"
    assert bitcode_in(folder, 90).name == "libnvshmem_device.bc"
    assert bitcode_in(tmp_path / "missing", 90) is None


@pytest.mark.parametrize("headers", ["include", "include/nvshmem_13"])
def test_the_first_folder_with_the_library_is_taken_and_its_version_read(tmp_path, headers):
    new = tree(tmp_path / "new", NEW, (3, 8, 0), headers)
    old = tree(tmp_path / "old", OLD, (3, 4, 5), headers)
    found = library_in([tmp_path, new, old])
    assert (found.path, found.version, found.problem) == (str(new / HOST), "3.8.0", "")
    assert found.bitcode(103) == new / "libnvshmem_device_sm_100.bc"
    assert library_in([old, new]).version == "3.4.5"


def test_a_library_without_headers_is_taken(tmp_path):
    found = library_in([tree(tmp_path, OLD)])
    assert (found.version, found.problem) == ("", "")
    assert found.path


def test_a_library_that_is_too_old_is_refused_with_both_versions(tmp_path):
    found = library_in([tree(tmp_path, OLD, (3, 3, 24))])
    assert found.problem == f"NVSHMEM 3.4 or newer is needed, that in {tmp_path / 'lib'} is 3.3.24."


def test_no_library_is_said_in_a_sentence(tmp_path):
    found = library_in([tmp_path])
    assert found.problem == f"the library NVSHMEM ({HOST}) was not found."
    assert found.bitcode(90) is None


def test_what_nvshmem_home_says_comes_first_then_the_wheel(tmp_path, monkeypatch):
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    (tmp_path / "site" / "nvidia" / "nvshmem" / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    folders = library_folders()
    assert folders[:2] == [tmp_path / "lib", tmp_path / "lib64"]
    wheel = tmp_path / "site" / "nvidia" / "nvshmem" / "lib"
    assert 2 <= folders.index(wheel) < folders.index(Path("/opt/nvidia/nvshmem/lib"))


def test_a_missing_python_package_is_said(monkeypatch):
    monkeypatch.setattr(nvshmem_library.importlib.util, "find_spec", lambda name: None)
    assert nvshmem_library.missing_package() == "the Python package nvshmem4py is not installed."


def test_looking_loads_and_imports_nothing(tmp_path):
    """A file that is no library would not load; a package that is imported would leave a trace."""
    tree(tmp_path, NEW, (3, 8, 0))
    (tmp_path / "site" / "nvshmem").mkdir(parents=True)
    (tmp_path / "site" / "nvshmem" / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    code = (
        "import sys\n"
        "from moecomm.transports.nvshmem_library import find_library, missing_package\n"
        "print(find_library().version, repr(missing_package()), 'nvshmem' in sys.modules, 'triton' in sys.modules)\n"
    )
    env = {
        **os.environ,
        "NVSHMEM_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parents[1])]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3.8.0", "''", "False", "False"]

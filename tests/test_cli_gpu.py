"""What `moecomm info` says about GPUs: parts, devices, what is missing; and that nothing is imported to say it."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from moecomm.cli import gpu
from moecomm.cli.facts import collect
from moecomm.cli.main import main

FOREIGN = ("triton", "cupy", "nvshmem")


@pytest.mark.parametrize("code", ["import moecomm", "from moecomm.cli.facts import collect; collect()"])
def test_nothing_of_gpus_is_imported(code):
    show = f"import sys, json; {code}; print(json.dumps([name for name in {FOREIGN} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(("module", "packages"), [(name, parts[2]) for name, parts in gpu.GPU_PACKAGES.items()])
def test_versions_are_those_of_what_is_installed(module, packages):
    installed = []
    for package in packages:
        try:
            installed.append(version(package))
        except PackageNotFoundError:
            continue
    (part,) = [part for part in gpu.gpu_parts() if part["name"] == module]
    assert (part["version"] is None) == (not installed)
    assert all(one in part["version"] for one in installed)


def test_parts_that_are_not_installed_are_missing_and_the_remedy_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(gpu, "_nvrtc", lambda: None)
    facts = collect()
    optional = {part["name"]: part for part in facts["optional"]}
    assert optional["triton"]["version"] is optional["cupy"]["version"] is None
    missing = {one["what"].partition(":")[0]: one["remedy"] for one in facts["gpu"]["missing"]}
    assert missing["triton"].startswith("pip install triton")
    assert "pip install 'moecomm[gpu]'" in missing["cupy"]
    assert "ctk" in missing["NVRTC"]
    monkeypatch.setattr("moecomm.cli.facts.collect", lambda: facts)
    main(["info"])
    printed = capsys.readouterr().out
    assert "pip install 'moecomm[gpu]'" in printed.partition("GPUs")[2].partition("Optional parts")[0]


def test_a_module_of_no_known_package_is_there_all_the_same():
    assert gpu._version_of("json", ("no-such-package",)) == "unknown"


@pytest.mark.parametrize(
    ("cuda", "driver", "devices", "what"),
    [
        (None, False, 0, ["built without CUDA", "no NVIDIA driver"]),
        ("13.0", False, 0, ["no NVIDIA driver"]),
        ("13.0", True, 0, ["sees no device (CUDA_VISIBLE_DEVICES=-1)"]),
        ("13.0", True, 2, []),
    ],
)
def test_devices_and_what_keeps_them_away(monkeypatch, capsys, cuda, driver, devices, what):
    everything = collect()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(gpu, "_has_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    facts = gpu.gpu_facts([{"name": "triton", "version": "3", "gives": "kernels", "remedy": "none"}])
    assert [one["name"] for one in facts["devices"]] == [f"GPU {index}" for index in range(devices)]
    assert len(facts["missing"]) == len(what)
    assert all(part in one["what"] and one["remedy"] for part, one in zip(what, facts["missing"], strict=True))
    assert facts == json.loads(json.dumps(facts))
    whole = {**everything, "gpu": facts}
    monkeypatch.setattr("moecomm.cli.facts.collect", lambda: whole)
    main(["info"])
    printed = capsys.readouterr().out
    assert "device 1  GPU 1, capability 9.0" in printed if devices else "devices  none" in printed
    assert "missing   nothing" in printed if not what else what[0] in printed

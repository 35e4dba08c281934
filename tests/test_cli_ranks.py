"""`moecomm info` on several ranks: what it draws, what it says of transports, and of ranks that do not come."""

import io
import json
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from unittest import mock

import pytest
import torch
from host_worlds import why_not_ucx

from moecomm import SoloGroup, TorchGroup
from moecomm.cli import ranks
from moecomm.cli.console import Console
from moecomm.cli.main import main
from moecomm.cli.ranks import collect_ranks, print_ranks
from moecomm.cli.rendezvous import started_group
from moecomm.devices.base import DeviceIdentity
from moecomm.errors import TransportError
from moecomm.testing import launch
from moecomm.testing.hosts import Hosts, why_not
from moecomm.topology import Topology

needs_ucx = pytest.mark.skipif(bool(why_not_ucx()), reason=f"no UCX: {why_not_ucx()}")
# What a rank runs: hosts of some ranks each, then the command.
ON_HOSTS = """import os, sys
os.environ["MOECOMM_HOST_ID"] = f"host {int(os.environ['RANK']) // int(sys.argv[1])}"
from moecomm.cli.main import main
sys.exit(main(sys.argv[2:]))"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def under_torchrun(num_ranks, arguments):
    """What the ranks print, all on one host unless the program says otherwise."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), *arguments]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    environment.pop("MOECOMM_HOST_ID", None)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=90, check=False, cwd=os.getcwd()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_ranks_of_one_host_under_torchrun():
    printed = under_torchrun(2, ["-m", "moecomm", "info", "--json"])
    facts = json.loads(printed)["ranks"]  # of rank 0 alone
    assert facts["topology"]["host_of"] == facts["topology"]["domain_of"] == [0, 0]
    assert facts["topology"]["rails"] == [[0], [1]]
    assert facts["topology"]["host_names"] == [socket.gethostname()]
    assert [one["rank"] for one in facts["ranks"]] == [0, 1]
    assert len({one["pid"] for one in facts["ranks"]}) == 2
    assert facts["auto"]["transport"] == "shm"
    assert list(facts["auto"]["refusals"]) == ["local"]
    assert [(pair["domains"], pair["transport"]) for pair in facts["pairs"]] == [([0, 0], "shm")]


@needs_ucx
def test_hosts_of_three_ranks_and_one_under_torchrun(tmp_path):
    program = tmp_path / "on_hosts.py"
    program.write_text(ON_HOSTS)
    printed = under_torchrun(4, [str(program), "3", "info"])
    drawn = [" ".join(line.split()) for line in printed.partition("\nRanks\n")[2].splitlines()]
    name = socket.gethostname()
    assert printed.count("\nRanks\n") == 1
    assert drawn[0].startswith("4 ranks on 2 hosts; 2 domains")
    assert drawn[2].startswith("local index 0 1 2")
    assert drawn[3].startswith("domain 0 host 0")
    assert drawn[3].endswith("0 1 2")
    assert drawn[4].startswith("domain 1 host 1")
    assert drawn[4].endswith("3 (3)(3)")
    assert "all 4 ranks shm+ucx" in drawn
    assert "inside domain 0 shm" in drawn
    assert "between domains 0-1 shm+ucx" in drawn
    told = " ".join(drawn)
    assert told.count("not shm: rank 3 (pid ") == 1
    assert f"on {name}) runs on another host than rank 0 ({name})." in told


def test_two_hosts_joined_by_a_network(tmp_path):
    reason = why_not_ucx() or why_not()
    if reason:
        pytest.skip(reason)
    with Hosts((2, 1)) as hosts:
        started = []
        for host in range(2):
            command = hosts.torchrun(host, 29500, "-m", "moecomm", "info", "--json")
            with (tmp_path / str(host)).open("wb") as printed:
                started.append(hosts.start(host, command, env={"OMP_NUM_THREADS": "1"}, stdout=printed))
        assert [process.wait(60) for process in started] == [0, 0]
    said = [(tmp_path / str(host)).read_text() for host in range(2)]
    facts = json.loads(said[0])["ranks"]
    assert facts["topology"]["host_of"] == facts["topology"]["domain_of"] == [0, 0, 1]
    assert facts["topology"]["rails"] == [[0, 2], [1, 2], [0, 2]]
    assert facts["auto"]["transport"] == "shm+ucx"
    assert [(pair["domains"], pair["transport"]) for pair in facts["pairs"]] == [([0, 0], "shm"), ([0, 1], "shm+ucx")]
    assert said[1] == ""


# -- what it says


def drawn(facts, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    print_ranks(Console(stream), facts)
    return stream.getvalue()


def facts_of(topology, pairs, auto="shm+ucx", torch_of_last="2.13"):
    """As `collect_ranks` gives them, for a topology that nobody here has."""
    refusals = {"shm": "another host."}
    versions = [{"moecomm": "1", "torch": "2.13"}] * (topology.num_ranks - 1)
    versions.append({"moecomm": "1", "torch": torch_of_last})
    return {
        "topology": {name: list(getattr(topology, name)) for name in ("host_of", "domain_of", "host_names")},
        "ranks": [{"rank": rank, "versions": version} for rank, version in enumerate(versions)],
        "auto": {"transport": auto, "refusals": refusals},
        "pairs": [{"domains": list(both), "transport": name, "refusals": refusals} for both, name in pairs],
        "gpu": None,
    }


def test_one_process_is_one_rank(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["info"]) == 0
    printed = capsys.readouterr().out.partition("\nRanks\n")[2]
    assert "1 rank on 1 host" in printed
    assert "torchrun" in printed
    assert "auto" not in printed
    facts = collect_ranks(SoloGroup())
    assert facts == json.loads(json.dumps(facts))
    assert (facts["auto"], facts["pairs"]) == ({"transport": "local", "refusals": {}}, [])


def test_each_rank_finds_the_same():
    first, second = launch(collect_ranks, 2, backend="processes")
    assert first == second
    threads = launch(collect_ranks, 3)
    assert threads[0] == threads[2]
    assert threads[0]["auto"]["transport"] == "local"
    assert threads[0]["pairs"] == [{"domains": [0, 0], "transport": "local", "refusals": {}}]


def collect_with_gpus(group, problem_of):
    """As if each rank had a GPU, two of which are joined by NVLink, but for those with a problem."""
    me, both = f"gpu {group.rank}", tuple(f"gpu {2 * (group.rank // 2) + i}" for i in range(2))
    problem = problem_of.get(group.rank, "")
    found = (None if problem == NO_CUDA else f"cuda:{group.rank}", DeviceIdentity(me, both), problem)
    with mock.patch.object(ranks, "_my_gpu", return_value=found):
        return collect_ranks(group)


NO_CUDA = "torch finds no CUDA device"


def test_domains_of_gpus_are_drawn_beside_those_of_processes(monkeypatch):
    facts, *others = launch(collect_with_gpus, 3, {}, backend="processes")
    assert others == [facts] * 2
    assert facts["topology"]["domain_of"] == [0, 0, 0]
    assert facts["auto"]["transport"] == "shm"
    gpu = facts["gpu"]
    assert gpu["topology"]["domain_of"] == [0, 0, 1]
    assert (gpu["pairs"][0]["domains"], gpu["pairs"][0]["transport"]) == ([0, 0], "nvlink")
    assert "the GPU of rank 0 (gpu 0) cannot address that of rank 2" in gpu["auto"]["refusals"]["nvlink"]
    text = " ".join(drawn(facts, 100, monkeypatch).partition("GPUs of the ranks")[2].split())
    assert "3 ranks on 1 host; 2 domains" in text
    assert "inside domain 0 nvlink" in text
    assert "collective" not in text
    assert facts == json.loads(json.dumps(facts))


def test_ranks_whose_gpus_cannot_be_used_are_named(monkeypatch):
    (facts, _) = launch(collect_with_gpus, 2, {1: NO_CUDA}, backend="processes")
    assert list(facts["gpu"]) == ["devices"]
    assert f"warning: rank 1, no GPU: {NO_CUDA}" in drawn(facts, 100, monkeypatch)
    (facts, _) = launch(collect_with_gpus, 2, {0: NO_CUDA, 1: NO_CUDA}, backend="processes")
    assert facts["gpu"] is None
    assert "GPU" not in drawn(facts, 100, monkeypatch)


@pytest.mark.parametrize(("local_rank", "name"), [(None, "cuda:0"), ("5", "cuda:1")])
def test_whatever_keeps_a_gpu_away_is_told(monkeypatch, local_rank, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)

    def broken(device):
        raise RuntimeError(f"{device}: the driver is too old")

    monkeypatch.setattr(ranks, "find_device", broken)
    assert collect_ranks(SoloGroup())["gpu"] == {
        "devices": [{"device": name, "problem": f"{name}: the driver is too old"}]
    }


def test_pairs_that_come_to_the_same_share_a_line(monkeypatch):
    domains = range(5)
    pairs = [((d, d), "shm") for d in domains]
    pairs += [((a, b), None if b == 4 else "shm+ucx") for a in domains for b in domains if a < b]
    text = drawn(facts_of(Topology.grid(*[2] * 5), pairs, auto=None), 100, monkeypatch)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "inside domains 0, 1, 2, 3, 4 shm" in lines
    assert "between domains 0-1, 0-2, 0-3, 1-2, 1-3, 2-3 shm+ucx" in lines
    assert "between domains 0-4, 1-4, 2-4, 3-4 collective, the slow last resort" in lines
    assert "all 10 ranks collective, the slow last resort" in lines
    remedy = "remedy: Run all ranks as processes of one user, on one host and in one container, on Linux."
    assert " ".join(lines).count(remedy) == 1
    assert text.count("remedy:") == 1
    many = [((a, b), "shm+ucx") for a in range(18) for b in range(18) if a < b]
    text = drawn(facts_of(Topology.grid(*[1] * 18), many), 100, monkeypatch)
    assert "between domains 0-1, 0-2, 0-3, 0-4, 0-5, 0-6 and 147 more" in text
    assert text.count("not shm: another host.") == 1


@pytest.mark.parametrize("columns", [44, 60, 100])
def test_the_drawing_fits_the_terminal(columns, monkeypatch):
    topology = Topology((0,) * 8 + (1,) * 8, (0,) * 8 + (1,) * 8, ("a-long-name.of.some.cluster.example.com", "b"))
    text = drawn(facts_of(topology, [((0, 1), "ucx")]), columns, monkeypatch)
    assert max(map(len, text.partition("\nTransport")[0].splitlines())) <= columns


def test_versions_that_differ_are_told(monkeypatch):
    assert "versions" not in drawn(facts_of(Topology.grid(3), []), 80, monkeypatch)
    text = drawn(facts_of(Topology.grid(3), [], torch_of_last="2.9"), 80, monkeypatch)
    assert "warning: versions differ: moecomm 1 torch 2.9 on rank 2; moecomm 1 torch 2.13 on rank 0" in text


# -- ranks that do not come --------------------------------------------------------------------------------------------


def launched_as(monkeypatch, rank, size, address="127.0.0.1", port=None):
    values = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": address, "MASTER_PORT": port or free_port()}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def test_a_rank_that_does_not_come_is_named(monkeypatch, capsys):
    launched_as(monkeypatch, 0, 3)
    assert main(["info", "--timeout", "0.5"]) == 1
    text = capsys.readouterr().err
    assert "error: ranks 1, 2 of 3 did not come to 127.0.0.1, port " in text
    assert f"here: rank 0 (pid {os.getpid()} on {socket.gethostname()})" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(("rank", "address"), [(1, "127.0.0.1"), (1, "nowhere.invalid"), (0, "nowhere.invalid")])
def test_a_master_that_does_not_answer_is_named(rank, address, monkeypatch, capfd):
    launched_as(monkeypatch, rank, 2, address)
    message = f"rank {rank} of 2 did not reach MASTER_ADDR {address}, MASTER_PORT "
    with pytest.raises(TransportError, match=message), started_group(0.5):
        pytest.fail("nobody is there")
    assert capfd.readouterr().err == ""  # of torch's native part, either


def test_an_interface_that_gloo_does_not_find_is_named(monkeypatch):
    launched_as(monkeypatch, 0, 1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    message = r"rank 0 of 1 cannot connect to the others by gloo: .*GLOO_SOCKET_IFNAME \(none0\)"
    with pytest.raises(TransportError, match=message), started_group(5):
        pytest.fail("there is no such interface")


def test_a_rank_that_comes_and_falls_silent_is_an_error_in_time(monkeypatch):
    port = free_port()
    launched_as(monkeypatch, 0, 2, port=port)
    limit = timedelta(seconds=10)

    def come_and_sleep():
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        torch.distributed.PrefixStore("moecomm/info/0", store).set("rank 1", "rank 1 (a stand-in)")

    silent = threading.Thread(target=come_and_sleep)
    silent.start()
    with pytest.raises(TransportError, match="rank 0 of 2 cannot connect to the others by gloo"), started_group(1.5):
        pytest.fail("rank 1 is silent")
    silent.join(10)


def test_whoever_has_met_is_a_group(monkeypatch):
    launched_as(monkeypatch, 0, 1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with started_group(5) as group:
        assert (group.rank, group.size) == (0, 1)
        assert isinstance(group, TorchGroup)
        with started_group(5) as again:  # an application has its own
            assert again.process_group is group.process_group
    assert not torch.distributed.is_initialized()


def test_numbers_that_cannot_be_are_refused(monkeypatch):
    launched_as(monkeypatch, 2, 2)
    with pytest.raises(ValueError, match=r"RANK must be in \[0, WORLD_SIZE = 2\), got 2"), started_group(0.5):
        pytest.fail("there is no such rank")
    launched_as(monkeypatch, "first", 2)
    with pytest.raises(ValueError, match="environment variable RANK must be a number, got 'first'"), started_group(0.5):
        pytest.fail("there is no such rank")

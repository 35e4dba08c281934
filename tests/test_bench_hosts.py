"""The benchmark between hosts, as far as it needs none: figures by hand, launchers, links between threads."""

import dataclasses
import json

import pytest
import torch

from moecomm.bench.barrier import SignalBarrier
from moecomm.bench.config import BenchConfig, Routing, parse_routing
from moecomm.bench.hops import make_hops
from moecomm.bench.launched import Launched, hosts_of, launched_as
from moecomm.bench.links import HOP, STREAM, RailHop, RailStreams, make_links, own_address, rail_bytes
from moecomm.bench.records import as_json, make_records
from moecomm.bench.report import hops_table, print_header, print_table
from moecomm.bench.traffic import Traffic, count_traffic, interfaces, sent_by_interfaces
from moecomm.bench.workload import Payload, Workload
from moecomm.cli.console import Console
from moecomm.errors import PeerTimeout, TransportError
from moecomm.testing import RankFailure, launch, limited_to_groups

TWO_AND_ONE = BenchConfig(ranks=3, tokens=(2,), hidden=4, experts=3, topk=2, host_of=(0, 0, 1))
OPS = ("dispatch", "combine", "pair")


def payload(*needed, routed_far=0):
    return Payload(received=2, received_local=1, routed=2, routed_local=1, needed=needed, routed_far=routed_far)


def case(rank, needed, sent, wire, forwarded):
    """One rank's result of one case, as JSON would bring it: times in ns."""
    times = {op: [1000.0 * (1 + rank)] for op in OPS}
    traffic = {"sent": sent, "wire": wire, "forwarded": forwarded}
    return {
        "tokens": 2,
        "payload": dataclasses.asdict(payload(*needed)),
        "nanoseconds": {
            "moecomm": times,
            "bound": {"dispatch": [100], "combine": [100]},
            STREAM: {"rails": [500 + rank]},
            HOP: {"rails": [600]},
        },
        "memory": {},
        "wrong": {"moecomm": dict.fromkeys(OPS, 0)},
        "traffic": {"moecomm": {"dispatch": traffic, "combine": {**traffic, "sent": 2 * sent}}},
    }


CASES = [case(0, (0, 2), 16, 100, 1), case(1, (0, 1), 8, 100, 2), case(2, (1, 0), 8, 10, 4)]


def test_hops_by_hand():
    hops = make_hops(TWO_AND_ONE, CASES, "moecomm", "dispatch", 3.0)
    # Host 0 has ranks 0 and 1: three rows of 8 bytes; its interfaces count once.
    assert (hops.needed, hops.sent, hops.wire, hops.forwarded) == (24, 24, 100, 4)
    assert hops.wire_ratio == 110 / 32
    assert (hops.stream_us, hops.hop_us) == (0.502, 0.6)
    assert hops.link_fraction == pytest.approx(0.502 / 3)
    assert hops.hop_ratio == pytest.approx(5.0)
    assert hops.wire_gbps == pytest.approx(100 / 3000)
    assert hops.link_gbps == pytest.approx(24 / 502)


def test_hops_of_combine_go_the_other_way():
    # Host 1 must give back the three rows that it was given.
    assert make_hops(TWO_AND_ONE, [*CASES[:2], case(2, (0, 0), 8, 10, 4)], "moecomm", "combine", 3.0).needed == 24
    pair = make_hops(TWO_AND_ONE, CASES, "moecomm", "pair", 6.0)
    assert (pair.needed, pair.sent, pair.wire) == (32, 72, 200)
    assert pair.hop_us == 1.2


def test_what_nobody_counts_is_not_known():
    cases = [case(0, (0, 2), 16, None, 1), *CASES[1:]]
    hops = make_hops(TWO_AND_ONE, cases, "moecomm", "dispatch", 3.0)
    assert (hops.wire, hops.wire_ratio, hops.wire_gbps) == (None, None, None)
    times = {name: value for name, value in CASES[0]["nanoseconds"].items() if name != STREAM}
    cases = [{**one, "nanoseconds": times} for one in CASES]
    assert make_hops(TWO_AND_ONE, cases, "moecomm", "dispatch", 3.0).link_fraction is None
    one_host = dataclasses.replace(TWO_AND_ONE, host_of=())
    assert make_hops(one_host, CASES, "moecomm", "dispatch", 3.0) is None


def test_the_report_has_a_second_table(capsys):
    backend = {"name": "moecomm", "transport": "shm+ucx", "codec": "none", "layout": "expert_major"}
    results = [{"rank": rank, "backends": [backend], "cases": [one]} for rank, one in enumerate(CASES)]
    records = make_records(TWO_AND_ONE, results)
    columns, rows = hops_table(records)
    line = dict(zip([column.name for column in columns], rows[0], strict=True))
    assert (line["needed"], line["sent"], line["on wire"], line["x needed"]) == ("24 B", "24 B", "100 B", "3.438")
    console = Console(rich=False)
    print_header(console, TWO_AND_ONE)
    print_table(console, records)
    printed = capsys.readouterr().out
    assert "3 ranks on 2 hosts (2 + 1)" in printed
    assert "Between hosts" in printed
    values = as_json(TWO_AND_ONE, records[0])
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert (values["hosts"], values["needed_bytes"], values["wire_bytes"]) == ([0, 0, 1], 24, 100)


def test_rows_that_must_cross_are_counted_once_per_token_and_host():
    config = dataclasses.replace(TWO_AND_ONE, tokens=(32,), experts=7, topk=3, routing=Routing("masked", 0.3))
    # Experts 0 to 4 live on host 0, 5 and 6 on host 1.
    host_of_expert = [0, 0, 0, 0, 0, 1, 1]
    for rank, mine in enumerate(config.host_of):
        work = Workload(config, 32, rank, check=False)
        rows = [[host_of_expert[e] for e in row if e >= 0] for row in work.inputs.topk_idx.tolist()]
        assert work.payload.needed[mine] == 0
        assert work.payload.needed[1 - mine] == sum(1 - mine in row for row in rows)
        assert work.payload.routed_far == sum(row.count(1 - mine) for row in rows)


def test_rails_share_what_crosses():
    payloads = [payload(0, 5), payload(0, 3), payload(2, 0)]
    # Rank 2 is the only rail of host 1; its own rail on host 0 is rank 0.
    assert rail_bytes(TWO_AND_ONE, payloads) == [{2: 40}, {2: 24}, {0: 16}]


def test_routing_is_limited_to_groups():
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    chosen = limited_to_groups(500, 6, 3, seed=3, group_of_expert=groups, num_limited_groups=1)
    assert (chosen[:, 2] == -1).all()
    assert (groups[chosen[:, 0]] == groups[chosen[:, 1]]).all()
    assert torch.bincount(groups[chosen[:, 0]], minlength=3).min() > 100
    chosen = limited_to_groups(500, 6, 3, seed=3, group_of_expert=groups, num_limited_groups=2)
    assert {len(set(row)) for row in groups[chosen].tolist()} == {2}
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    with pytest.raises(ValueError, match="the 3 groups, got 4"):
        limited_to_groups(1, 6, 3, group_of_expert=groups, num_limited_groups=4)
    with pytest.raises(ValueError, match=r"must be \[5\], got \[6\]"):
        limited_to_groups(1, 5, 3, group_of_expert=groups, num_limited_groups=1)


def test_a_limit_of_hosts_is_held_to_the_hosts():
    limited = dataclasses.replace(TWO_AND_ONE, routing=parse_routing("limited:2"))
    assert Workload(limited, 2, 0, check=False).payload.needed[1] > 0
    with pytest.raises(ValueError, match="more hosts per token than the 1"):
        dataclasses.replace(limited, host_of=(0, 0, 0))
    with pytest.raises(ValueError, match="whole number of hosts"):
        parse_routing("limited:1.5")
    with pytest.raises(ValueError, match="each of 3 ranks"):
        dataclasses.replace(limited, host_of=(0, 1))


MEETING = {"MASTER_ADDR": "here", "MASTER_PORT": "1"}


def test_a_launcher_is_seen():
    torchrun = {"RANK": "1", "WORLD_SIZE": "4"}
    mpi = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}
    assert launched_as({}) is None
    assert launched_as({**torchrun, **MEETING}) == Launched(1, 4, by_mpi=False)
    assert launched_as({**mpi, **MEETING}) == Launched(2, 3, by_mpi=True)
    assert launched_as(torchrun) is None
    with pytest.raises(ValueError, match=r"MASTER_PORT.*mpirun -x MASTER_ADDR=HOST"):
        launched_as({**mpi, "MASTER_ADDR": "here"})


def test_hosts_are_numbered_by_their_first_rank():
    assert hosts_of(["b", "b", "a", "b"]) == (0, 0, 1, 0)


def test_interfaces_are_cards_or_else_all_but_loopback(tmp_path):
    for name, count in (("lo", 1000), ("veth0", 10), ("veth1", 5)):
        (tmp_path / name / "statistics").mkdir(parents=True)
        (tmp_path / name / "statistics" / "tx_bytes").write_text(f"{count}\n")
    assert sent_by_interfaces(tmp_path) == 15
    (tmp_path / "veth1" / "device").mkdir()
    assert [path.name for path in interfaces(tmp_path)] == ["veth1"]
    assert sent_by_interfaces(tmp_path) == 5
    assert sent_by_interfaces(tmp_path / "nothing") is None


class Turnstile:
    """A barrier for one."""

    def wait(self):
        return

    def close(self):
        return


def test_traffic_is_what_an_operation_adds():
    counters = [Traffic(5, 1)]
    counted = count_traffic(lambda: counters.append(Traffic(12, 4)), Turnstile(), lambda: counters[-1])
    assert (counted["sent"], counted["forwarded"]) == (7, 3)
    assert count_traffic(lambda: None, Turnstile(), lambda: None)["sent"] is None


def carry(group, payloads):
    """Both ways along the rails of ranks that are threads; the wrong bytes of the puts."""
    sending = rail_bytes(TWO_AND_ONE, payloads)
    streams = RailStreams(group, sending, address=own_address(group, "127.0.0.1"), timeout=10.0)
    hop = RailHop(group, sending, transport="auto", timeout=10.0)
    try:
        for _ in range(2):
            assert streams.run() > 0
            assert hop.run() > 0
        wrong = hop.wrong_bytes()
        group.all_gather(None)
        return wrong
    finally:
        streams.close()
        hop.close()


def test_streams_and_puts_carry_the_rows():
    large = payload(400_000, 0)
    assert launch(carry, 3, [payload(0, 300_000), payload(0, 0), large]) == [0, 0, 0]


def lose_a_stream(group):
    sending = rail_bytes(TWO_AND_ONE, [payload(0, 9), payload(0, 9), payload(9, 0)])
    streams = RailStreams(group, sending, address="127.0.0.1", timeout=1.0)
    group.all_gather(None)
    if group.rank != 2:
        with pytest.raises((TransportError, PeerTimeout), match="rank 2|ranks \\[2\\]"):
            run_forever(streams)
    streams.close()


def run_forever(streams):
    while True:
        streams.run()


def test_a_stream_that_ends_is_an_error():
    assert launch(lose_a_stream, 3) == [None] * 3


def meet(group, is_late):
    barrier = SignalBarrier(group, timeout=3.0)
    barrier.wait()
    if not (is_late and group.rank == 1):
        barrier.wait()
    group.all_gather(None)
    barrier.close()


def test_a_signal_barrier_names_who_is_late():
    assert launch(meet, 3, False) == [None] * 3
    with pytest.raises(RankFailure, match=r"rank 1 .*did not reach barrier 2"):
        launch(meet, 2, True)


def test_on_one_host_nothing_is_measured_of_links():
    one_host = dataclasses.replace(TWO_AND_ONE, host_of=())
    assert make_links(one_host, None, payload(0), address="") == {}

"""The benchmark's pure parts: statistics, configuration, records, table, picture."""

import json
import math

import pytest

from moecomm.bench.config import BenchConfig, Routing, parse_routing, parse_tokens
from moecomm.bench.plot import plot
from moecomm.bench.records import as_json, make_records
from moecomm.bench.report import format_bytes, format_us, print_header, print_table, table
from moecomm.bench.statistics import percentile, slowest, summarise
from moecomm.cli.console import Console

ISSUE_FIELDS = {
    *("op", "mode", "backend", "transport", "codec", "world_size", "tokens", "hidden", "experts", "topk", "dtype"),
    *("median_us", "p99_us", "min_us", "bytes", "gbps", "bound_gbps", "bound_fraction", "wrong"),
}


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5], 99, 5),
        ([3, 1, 2], 50, 2),
        ([4, 3, 2, 1], 50, 2),
        ([4, 3, 2, 1], 51, 3),
        (list(range(1, 101)), 99, 99),
        (list(range(1, 201)), 99, 198),
        (list(range(1, 11)), 99, 10),
        ([1, 2], 100, 2),
    ],
)
def test_percentile_is_the_nearest_rank(values, percent, expected):
    assert percentile(values, percent) == expected


def test_percentile_refuses_what_is_not_defined():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="percent"):
        percentile([1], 0)


def test_slowest_takes_the_maximum_of_each_iteration():
    assert slowest([[1, 9, 3], [4, 2, 3]]) == [4, 9, 3]
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        slowest([[1], [1, 2]])


def test_summary_is_taken_over_the_slowest_ranks():
    summary = summarise([[1000, 9000, 3000], [4000, 2000, 3000]])
    assert (summary.min_us, summary.median_us, summary.p99_us, summary.iterations) == (3.0, 4.0, 9.0, 3)
    assert summary.rank_median_us == (3.0, 3.0)
    assert summary.skew == 1.0
    assert summarise([[1000, 1000], [3000, 5000]]).skew == 4.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uniform", Routing("uniform")),
        ("zipf:2", Routing("zipf", 2.0)),
        ("zipf", Routing("zipf", 1.5)),
        ("hot", Routing("hot")),
        ("masked:0.25", Routing("masked", 0.25)),
    ],
)
def test_routing_is_read(text, expected):
    assert parse_routing(text) == expected
    assert parse_routing(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("zapf", "available: hot, limited, masked, uniform, zipf"),
        ("uniform:1", "takes no parameter"),
        ("zipf:0.5", "from 1 to"),
        ("zipf:", "not a number"),
        ("masked:1.5", "from 0 to 1"),
    ],
)
def test_bad_routing_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_routing(text)


def test_tokens_are_one_number_or_a_list():
    assert parse_tokens("4096") == (4096,)
    assert parse_tokens("1,8,32") == (1, 8, 32)
    for bad in ("", "1,,2", "a", "0"):
        with pytest.raises(ValueError, match="tokens"):
            parse_tokens(bad)


@pytest.mark.parametrize(
    "values",
    [{"ranks": 0}, {"dtype": "int8"}, {"mode": "fast"}, {"backends": ()}, {"iterations": 0}, {"competitors": "straw"}],
)
def test_a_bad_configuration_is_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        BenchConfig(**values)


def test_a_configuration_survives_json():
    config = BenchConfig(tokens=(1, 8), routing=Routing("zipf", 1.5), backends=("moecomm", "gloo"), iterations=3)
    assert BenchConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


def example(**changes):
    """Two ranks, one case of one token: times in ns by hand, one wrong element in gloo's combine."""
    values = {"tokens": (1,), "hidden": 4, "experts": 4, "topk": 2, "backends": ("moecomm", "gloo"), **changes}
    config = BenchConfig(**values)
    backends = [
        {"name": n, "transport": t, "codec": "none", "layout": "expert_major"}
        for n, t in (("moecomm", "shm"), ("gloo", "gloo"))
    ]

    def times(dispatch, combine):
        return {
            "dispatch": dispatch,
            "combine": combine,
            "pair": [d + c for d, c in zip(dispatch, combine, strict=True)],
        }

    def case(rank, tokens):
        nanoseconds = {"moecomm": times([1000, 2000 * (1 + rank), 3000], [500, 500, 500])}
        nanoseconds |= {"gloo": times([10_000, 20_000, 30_000], [5000, 5000, 5000])}
        nanoseconds |= {"bound": {"dispatch": [1500], "combine": [250]}}
        zero = {"dispatch": 0, "combine": 0, "pair": 0}
        return {
            "tokens": tokens,
            "payload": {"received": 3 - 2 * rank, "received_local": 1, "routed": 2, "routed_local": 1 - rank},
            "nanoseconds": nanoseconds,
            "memory": {"moecomm": 100 + rank},
            "wrong": {"moecomm": zero, "gloo": {**zero, "combine": rank}},
        }

    cases = [[case(rank, tokens) for tokens in config.tokens] for rank in range(2)]
    return config, [{"rank": rank, "backends": backends, "cases": cases[rank]} for rank in range(2)]


def test_records_by_hand():
    config, results = example()
    records = {(record.op, record.backend): record for record in make_records(config, results)}
    assert len(records) == 6
    ours = records["dispatch", "moecomm"]
    # Slowest ranks: 1000, 4000, 3000 ns. Rank 0 receives most: 3 rows of 8 bytes, one of them its own.
    assert (ours.summary.min_us, ours.summary.median_us, ours.summary.p99_us) == (1.0, 3.0, 4.0)
    assert (ours.bytes, ours.local_bytes) == (24, 8)
    assert ours.gbps == 24 / 3000
    assert ours.bound_gbps == 24 / 1500
    assert ours.bound_fraction == 0.5
    assert (ours.ratio, ours.wrong) == (1.0, 0)
    assert ours.memory == 101
    theirs = records["dispatch", "gloo"]
    assert theirs.memory is None
    assert theirs.ratio == pytest.approx(20 / 3)
    assert records["combine", "gloo"].wrong == 1
    pair = records["pair", "moecomm"]
    assert (pair.bytes, pair.bound_us) == (24 + 16, 1.75)
    assert pair.summary.median_us == 3.5


def test_json_objects_have_every_field_and_are_plain():
    config, results = example()
    for record in make_records(config, results):
        values = as_json(config, record)
        assert values.keys() >= ISSUE_FIELDS
        assert json.loads(json.dumps(values, allow_nan=False)) == values
        assert values["world_size"] == 2
        assert math.isclose(values["gbps"] * values["bound_fraction"] ** -1, values["bound_gbps"])


def test_without_check_and_bound_their_fields_are_empty():
    config, results = example(check=False, bound=False)
    values = as_json(config, make_records(config, results)[0])
    assert values["wrong"] is None
    assert values["bound_gbps"] is None
    assert values["bound_fraction"] is None


def test_the_table_names_what_is_wrong(capsys):
    config, results = example()
    records = make_records(config, results)
    console = Console(rich=False)
    print_header(console, config)
    print_table(console, records)
    printed = capsys.readouterr().out
    assert "4 x bfloat16 = 8 bytes" in printed
    assert "error: combine of gloo at 1 tokens: 1 wrong element(s)" in printed
    assert "all answers are right" not in printed
    columns, rows = table(records)
    names = [column.name for column in columns]
    line = dict(zip(names, rows[0], strict=True))
    assert line["median"] == "3 us"
    assert line["of bound"] == "50 %"
    assert line["wrong"] == "0"


@pytest.mark.parametrize(
    ("microseconds", "expected"),
    [(0.5, "0.5 us"), (12.34, "12.3 us"), (999.6, "1 ms"), (4560, "4.56 ms"), (2.5e6, "2.5 s"), (1.2e9, "1200 s")],
)
def test_times_are_readable(microseconds, expected):
    assert format_us(microseconds) == expected


@pytest.mark.parametrize(("count", "expected"), [(0, "0 B"), (67_108_864, "67.1 MB"), (1_200_000_000, "1.2 GB")])
def test_sizes_are_readable(count, expected):
    assert format_bytes(count) == expected


@pytest.mark.parametrize("tokens", [(1,), (1, 8, 64)])
def test_the_picture_is_a_png(tmp_path, tokens):
    pytest.importorskip("matplotlib")
    config, results = example(tokens=tokens)
    path = tmp_path / "bench.png"
    plot(config, make_records(config, results), path)
    assert path.read_bytes().startswith(b"\x89PNG")

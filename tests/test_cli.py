"""The command line: finding commands, printing, `info`."""

import io
import json
import subprocess
import sys

import pytest

from moecomm.cli.console import Column, Console, plain_table
from moecomm.cli.facts import OPTIONAL_PACKAGES, collect
from moecomm.cli.info import _ranges
from moecomm.cli.main import COMMANDS, main
from moecomm.errors import TransportUnavailable
from moecomm.version import __version__

COLUMNS = [Column("name"), Column("n", "right")]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_plain_table_is_aligned():
    assert plain_table(COLUMNS, [["a", "1"], ["long name", "234"]]) == "\n".join(
        ["name         n", "---------  ---", "a            1", "long name  234"]
    )
    assert plain_table(COLUMNS, []) == "name  n\n----  -"
    with pytest.raises(ValueError, match="row 0 has 1 cells"):
        plain_table(COLUMNS, [["a"]])


def test_a_long_last_column_goes_on_in_further_lines():
    columns = [COLUMNS[0], Column("why", wraps=True)]
    text = plain_table(columns, [["a", "one two three four five six-seven"], ["b", ""]], width=30)
    assert text.splitlines()[2:] == ["a     one two three four five", "        six-seven", "b"]
    wide = ["a" * 50, "one two three four five"]  # never so narrow that nobody could read it
    assert plain_table(columns, [wide], width=30).splitlines()[2:] == ["  ".join(wide)]
    assert plain_table(columns, [["a", "x " * 100]]).splitlines()[2] == "a     " + " ".join("x" * 100)


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_info_fits_the_terminal_and_says_each_reason_once(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))

    def without_triton(device):
        raise TransportUnavailable(f"device {device!r}", "there is no Triton.", "Get it.")

    monkeypatch.setattr("moecomm.devices.registry.find_device", without_triton)
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    transports = printed.partition("Transports")[2].partition("Environment")[0]
    of_gpus = [line for line in transports.splitlines() if "no Triton" in line]
    assert [line.split()[0] for line in of_gpus] == ["nvlink", "nvshmem"]
    assert transports.count("remedy: Get it.") == 2
    assert max(map(len, transports.splitlines())) <= min(columns, 100)


def test_what_is_not_a_terminal_gets_plain_text():
    stream = io.StringIO()
    console = Console(stream)
    assert not console.is_rich
    console.heading("things")
    console.pairs([("a", "1\n2"), ("long", "[bold]3")])
    console.table(COLUMNS, [["x", "1"]], title="table")
    console.warning("careful")
    with console.progress("work", 2.0) as bar:
        bar.update(1.0)
    lines = stream.getvalue().splitlines()
    assert lines[:5] == ["", "things", "  a     1", "        2", "  long  [bold]3"]
    assert lines[-1] == "warning: careful"
    assert "\x1b" not in stream.getvalue()


def test_plain_progress_speaks_now_and_then(monkeypatch):
    monkeypatch.setattr("moecomm.cli.console.PLAIN_PROGRESS_SECONDS", 0.0)
    stream = io.StringIO()
    with Console(stream, rich=False).progress("work", 4.0) as bar:
        bar.update(1.0)
        bar.update(4.0, "nearly")
    assert stream.getvalue() == "work: 25 %\nnearly: 100 %\n"


def test_a_terminal_gets_rich():
    pytest.importorskip("rich")
    stream = Terminal()
    console = Console(stream)
    assert console.is_rich
    console.table(COLUMNS, [["[x]", "1"]], title="table")
    console.pairs([("a", "[red]1\n2")])
    console.line("a [b] c")
    with console.progress("work", 2.0) as bar:
        bar.update(1.0, "more")
    printed = stream.getvalue()
    assert all(text in printed for text in ("table", "[x]", "[red]1", "a [b] c"))


def test_a_terminal_without_rich_gets_plain_text(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not Console(Terminal()).is_rich


def test_every_command_explains_itself(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert f"moecomm {name}" in printed
        for empty in ("None", "False", ")"):
            assert f"default: {empty}" not in printed


def test_no_command_and_an_unknown_one_are_refused(capsys):
    for arguments in ([], ["fly"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    ("option", "value", "available"),
    [
        ("routing", "zapf", "hot, limited, masked, uniform, zipf"),
        ("transport", "pigeons", "auto, local, shm, nvlink, shm+ucx, ucx, nvshmem, collective"),
        ("codec", "morse", "none"),
    ],
)
def test_bad_values_are_one_line_on_stderr(capsys, option, value, available):
    assert main(["bench", f"--{option}", value]) == 1
    printed = capsys.readouterr()
    assert printed.err.strip() == f"error: {option} {value!r} is unknown; available: {available}"
    assert "Traceback" not in printed.out


def test_python_m_moecomm():
    done = subprocess.run(
        [sys.executable, "-m", "moecomm", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"moecomm {__version__}\n"


def test_info_as_json(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == json.loads(json.dumps(facts))
    assert facts["moecomm"]["version"] == __version__
    assert facts["native"]["instruction_sets"]["generic"] is True
    assert facts["limits"].keys() == {"RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_AS"}
    answers = {transport["name"]: transport for transport in facts["transports"]}
    assert answers["local"]["reaches"] == ["threads of one process"]
    assert answers["shm"]["reaches"] == ["processes of this host"]


def test_info_in_words(capsys, monkeypatch):
    monkeypatch.setenv("MOECOMM_EXAMPLE", "yes")
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for text in (
        f"moecomm {__version__}",
        "instruction set",
        "RLIMIT_NOFILE",
        "shm",
        "MOECOMM_EXAMPLE",
        *OPTIONAL_PACKAGES,
    ):
        assert text in printed


def test_info_names_what_is_missing_and_what_helps(capsys, monkeypatch):
    facts = collect()
    facts["native"] = {"built": False, "reason": "no _C", "remedy": "pip install ."}
    facts["transports"].append(
        {
            **facts["transports"][0],
            **{"name": "pigeon", "answers": False, "reaches": [], "remedy": "Feed it."},
            "refuses": {"processes of this host": "it is asleep."},
        }
    )
    facts["transports"].append(
        {
            **facts["transports"][0],
            **{"name": "snail", "answers": True, "reaches": ["neighbours"], "remedy": "Buy it a boat."},
            **{"crosses_hosts": True, "refuses": {"other hosts": "it cannot swim.", "threads of one process": "hm."}},
        }
    )
    facts["optional"] = [{"name": "rich", "version": None, "gives": "colours", "remedy": "pip install rich"}]
    monkeypatch.setattr("moecomm.cli.facts.collect", lambda: facts)
    assert main(["info"]) == 1
    printed = capsys.readouterr().out
    for text in ("missing: no _C", "remedy: pip install .", "it is asleep.", "remedy: Feed it.", "pip install rich"):
        assert text in printed
    # Of a transport that answers, what it is for and does not reach.
    for text in ("neighbours", "it cannot swim.", "Buy it a boat."):
        assert text in printed
    assert "hm." not in printed


def test_ranges():
    assert _ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert _ranges([3]) == "3"

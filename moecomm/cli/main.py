"""The entry point of the command `moecomm`: finds the subcommand, parses its arguments, runs it.

A subcommand is a module with `HELP: str`, `add_arguments(parser)` and `run(args) -> int` (the exit status). What it
needs for its work it imports when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from moecomm.cli.console import Console
from moecomm.errors import MoecommError
from moecomm.version import __version__

__all__ = ["COMMANDS", "Command", "main"]

COMMANDS = {"info": "moecomm.cli.info", "bench": "moecomm.cli.bench", "demo": "moecomm.demo"}


class Command(Protocol):
    """What the module of a subcommand offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommand's arguments to `parser`."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit status."""


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names defaults, but for those that say nothing: none, switches that are off, and what the text tells itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is None or action.default is False or action.default == ""
        is_told = "default" in (action.help or "")
        return action.help if says_nothing or is_told else super()._get_help_string(action)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, Command]]:
    parser = argparse.ArgumentParser(
        prog="moecomm", description="Dispatch and combine for Mixture-of-Experts models with expert parallelism."
    )
    parser.add_argument("--version", action="version", version=f"moecomm {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    commands: dict[str, Command] = {}
    for name, module in COMMANDS.items():
        command = cast("Command", importlib.import_module(module))
        commands[name] = command
        subparser = subparsers.add_parser(name, help=command.HELP, description=command.HELP, formatter_class=_Help)
        command.add_arguments(subparser)
    return parser, commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Arguments:
        arguments: what follows the program's name; `None` = `sys.argv[1:]`.

    Returns:
        The exit status: 0 done, 1 failed or a wrong answer was found, 130 interrupted. Arguments that cannot be parsed
        end the program with 2.
    """
    parser, commands = _parser()
    args = parser.parse_args(arguments)
    try:
        return commands[args.command].run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`moecomm info | head`): the flush at exit must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MoecommError, ValueError, OSError) as error:
        Console(sys.stderr).error(str(error))
        return 1

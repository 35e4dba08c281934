"""`moecomm demo`: trains a small Mixture-of-Experts language model on text that every Python ships.

run.py -> ranks.py (in each process) -> training.py -> model.py, text.py
       -> checkpoint.py, generation.py (the saved model in one process), pictures.py
decode.py -> serving.py (in each process) -> requests.py, decoder.py (`moecomm demo --decode`)
"""

from __future__ import annotations

import argparse

__all__ = ["HELP", "add_arguments", "run"]

HELP = "train a small Mixture-of-Experts language model over several processes, in under four minutes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's arguments to `parser`."""
    parser.add_argument("--ranks", type=int, default=2, help="processes to spread experts and batches over")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps, instead of as many as it takes")
    parser.add_argument("--short", action="store_true", help="a smaller model and fewer steps: under 40 seconds")
    parser.add_argument("--output", default="demo-out", metavar="FOLDER", help="where model and pictures go")
    parser.add_argument("--transport", default="auto", help="transport of the communicator")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and the sample")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which training is given up")
    parser.add_argument(
        "--decode", action="store_true", help="let the saved model answer requests; trains one shortly if there is none"
    )
    parser.add_argument("--no-bench", action="store_true", help="leave out the short benchmark at the end")


def run(args: argparse.Namespace) -> int:
    """Runs the demo and returns the exit status; 0 = it learned, and every check agreed."""
    if args.decode:
        from moecomm.demo.decode import run_decode

        return run_decode(args)
    from moecomm.demo.run import run_demo

    return run_demo(args)

"""Decoding in the demo: slots, the step with kept keys against the whole model, answers that depend on nobody else."""

import re
import subprocess
import sys

import pytest
import torch

from moecomm.demo.checkpoint import save_model
from moecomm.demo.decoder import Decoder
from moecomm.demo.model import LanguageModel, make_communicator
from moecomm.demo.requests import Request, Slots, make_requests
from moecomm.demo.serving import Plan, serve
from moecomm.demo.settings import Settings
from moecomm.groups import SoloGroup
from moecomm.testing import launch

TINY = Settings(ranks=1, window=16, layers=2, hidden=16, heads=2, experts=4, intermediate=16, batch=2)


def tiny_model(communicator):
    model = LanguageModel(TINY, communicator=communicator, loss_group=SoloGroup()).eval()
    torch.nn.init.normal_(model.head.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.pt"
    with make_communicator(SoloGroup(), TINY) as communicator:
        save_model(tiny_model(communicator), TINY, path, group=SoloGroup())
    return path


def test_requests_have_slots_of_their_own_and_wait_for_them():
    requests = [Request(0, 0, b"ab", 2), Request(1, 3, b"c", 1), Request(2, 0, b"d", 9), Request(4, 0, b"e", 1)]
    slots = Slots(requests, 2, rank=0, num_ranks=2)  # numbers 0, 1 and 4 are this rank's
    seen = []
    for step in range(6):
        slots.admit(step)
        symbols, positions = slots.inputs()
        seen.append([(s, p) for s, p in zip(symbols.tolist(), positions.tolist(), strict=True) if p >= 0])
        slots.take([ord("x"), ord("y")], step)
    a, b, c, e, x = map(ord, "abcex")
    assert seen == [[(a, 0)], [(b, 1)], [(x, 2)], [(e, 0), (c, 0)], [], []]
    assert slots.is_done
    assert [(bytes(answer.text), answer.begin, answer.end) for answer in slots.answers] == [
        (b"xx", 0, 3),
        (b"x", 3, 4),
        (b"y", 3, 4),
    ]


def test_an_answer_ends_with_an_empty_line():
    slots = Slots([Request(0, 0, b"a", 9)], 1, rank=0, num_ranks=1)
    for step in range(2):
        slots.admit(step)
        slots.take([ord("\n")], step)
    assert slots.is_done
    assert bytes(slots.answers[0].text) == b"\n\n"


def test_a_step_agrees_with_the_whole_model():
    symbols = torch.randint(256, (2, TINY.window), generator=torch.Generator().manual_seed(2))
    with make_communicator(SoloGroup(), TINY) as communicator:
        model = tiny_model(communicator)
        with torch.no_grad():
            whole = model(symbols)
        decoder = Decoder(model, num_slots=3, window=TINY.window)
        for position in range(TINY.window):
            inputs = torch.cat([symbols[:, position], torch.zeros(1).long()])
            logits = decoder.step(inputs, torch.tensor([position, position, -1]))
            torch.testing.assert_close(logits[:2], whole[:, position], rtol=1e-4, atol=1e-4)


def answers_of(services):
    assert len({len(service.nanoseconds) for service in services}) == 1  # all ranks make the same number of steps
    texts = {answer.request.number: bytes(answer.text) for service in services for answer in service.answers}
    return texts, {number: digest for service in services for number, digest in service.digests.items()}


@pytest.mark.parametrize("num_requests", [1, 9])
def test_answers_do_not_depend_on_ranks_or_mode(saved, num_requests):
    requests = make_requests(num_requests, longest=20, seed=3)
    plan = Plan(saved, requests, num_slots=2)
    alone = answers_of([serve(SoloGroup(), plan)])
    assert set(alone[0]) == set(range(num_requests))
    for ranks, mode in [(2, "low_latency"), (3, "low_latency"), (2, "throughput")]:
        services = launch(serve, ranks, Plan(saved, requests, num_slots=2, mode=mode))
        assert answers_of(services) == alone, (ranks, mode)
        assert 0 in [number for service in services for number in service.num_tokens]
    assert answers_of(launch(serve, 2, plan, backend="processes")) == alone


@pytest.mark.slow
def test_the_command_trains_decodes_and_compares(tmp_path):
    command = [sys.executable, "-m", "moecomm", "demo", "--decode", "--short", "--steps", "20"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out")], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"2 ranks +low_latency +shm +[\d,]+ +\d+ +[\d.]+ ms", done.stdout)
    assert re.search(r"all 12 answers \(\d+ bytes\) equal those of one process byte for byte", done.stdout)
    assert not done.stderr

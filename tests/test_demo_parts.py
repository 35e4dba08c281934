"""The parts of the demo: text, baselines, pictures, generation, the saved model."""

import math

import pytest
import torch

from moecomm.demo.checkpoint import load_model, load_settings, save_model
from moecomm.demo.generation import generate
from moecomm.demo.model import LanguageModel, make_communicator
from moecomm.demo.settings import Settings
from moecomm.demo.text import Text, baselines, load_text, sample_windows, window_grid
from moecomm.demo.training import Course, evaluate, share_of, train
from moecomm.groups import SoloGroup
from moecomm.testing import launch

TINY = Settings(
    steps=4, batch=6, window=16, layers=2, hidden=16, heads=2, experts=5, intermediate=8, warmup=2, evaluations=2
)


def tiny_text():
    letters = torch.randint(97, 123, (4000,), generator=torch.Generator().manual_seed(0))
    return Text(train=letters[:3000], held_out=letters[3000:3400])


def test_held_out_paragraphs_are_not_learned_from():
    text = load_text()
    assert text.train.numel() > 200_000
    assert 0.08 < text.held_out.numel() / text.train.numel() < 0.15
    assert int(text.train.min()) >= 0
    assert int(text.train.max()) < 256
    train = bytes(text.train.tolist())
    paragraphs = bytes(text.held_out.tolist()).split(b"\n\n")
    assert sum(f"\n\n{p.decode()}\n\n".encode() in train for p in paragraphs if p) == 0


def test_windows():
    symbols = torch.arange(100)
    windows = sample_windows(symbols, num_windows=50, length=9, seed=3)
    assert windows.shape == (50, 10)
    assert (windows.diff(dim=1) == 1).all()
    assert torch.equal(windows, sample_windows(symbols, num_windows=50, length=9, seed=3))
    assert not torch.equal(windows, sample_windows(symbols, num_windows=50, length=9, seed=4))
    grid = window_grid(symbols, length=9)
    assert grid[:, 1:].flatten().tolist() == list(range(1, 100))


def test_baselines_of_a_text_that_is_known():
    pattern = torch.tensor([97, 98] * 5000)
    values = baselines(Text(train=pattern, held_out=pattern[:100]))
    assert values["unigram"] == pytest.approx(math.log(2), rel=0.05)
    assert values["bigram"] < 0.01


def test_shares_cover_the_batch_and_may_be_empty():
    windows = torch.arange(2).unsqueeze(1)
    shares = launch(lambda group: share_of(windows, group), 3)
    assert [share.shape[0] for share in shares] == [1, 1, 0]
    assert torch.equal(torch.cat(shares), windows)


def course_of(group, settings):
    with make_communicator(group, settings) as communicator:
        model = LanguageModel(settings, communicator=communicator, loss_group=group)
        return train(model, tiny_text(), settings, group=group, communicator=communicator, num_steps=settings.steps)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_training_is_the_same_on_any_number_of_ranks(ranks):
    (alone,) = launch(course_of, 1, TINY)
    # Stepped: first weights come from torch's one generator, which threads that run freely would share.
    for course in launch(course_of, ranks, TINY, backend="stepped"):
        assert course.losses == pytest.approx(alone.losses, rel=1e-5)
        assert course.gradient_norms == pytest.approx(alone.gradient_norms, rel=1e-4)
        assert course.balance_losses == pytest.approx(alone.balance_losses, rel=1e-3)
        assert [step for step, _ in course.held_out] == [2, 4]
        assert [loss for _, loss in course.held_out] == pytest.approx([loss for _, loss in alone.held_out], rel=1e-5)
        assert torch.equal(course.loads[0], alone.loads[0])
        assert all(0 < one < whole for one, whole in zip(course.exchange_seconds, course.seconds, strict=True))


def saved(group, path):
    with make_communicator(group, TINY) as communicator:
        model = LanguageModel(TINY, communicator=communicator, loss_group=group)
        save_model(model, TINY, path, group=group)
        return evaluate(model, tiny_text(), TINY, group=group)


def loaded(group, path):
    model, communicator = load_model(path, group=group)
    with communicator:
        loss = evaluate(model, tiny_text(), TINY, group=group)
        return loss, generate(model, "abc", num_bytes=20, window=TINY.window, temperature=0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_model_saved_by_two_ranks_is_the_same_on_any_number(ranks, tmp_path):
    path = tmp_path / "model.pt"
    losses = launch(saved, 2, path, backend="stepped")
    assert load_settings(path) == TINY
    (_, continuation), *_ = launch(loaded, 1, path)
    for loss, text in launch(loaded, ranks, path, backend="stepped"):
        assert loss == pytest.approx(losses[0], rel=1e-6)
        assert text == continuation


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from moecomm.demo.pictures import draw_experts, draw_loss

    course = Course(
        losses=[5.0 - 0.01 * step for step in range(300)],
        held_out=[(150, 4.0), (300, 2.5)],
        loads=[torch.arange(3 * 5).view(3, 5) + step for step in range(300)],
    )
    draw_loss(course, tmp_path / "loss.png", baselines={"unigram": 3.3}, title="loss")
    draw_experts(course, tmp_path / "experts.png", ranks=7, title="load")
    for name in ("loss.png", "experts.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_generation_looks_back_no_further_than_its_window():
    with make_communicator(SoloGroup(), TINY) as communicator:
        model = LanguageModel(TINY, communicator=communicator, loss_group=SoloGroup())
        one = generate(model, "x" * 30 + "the same end....", num_bytes=5, window=16, seed=1)
        other = generate(model, "y" * 30 + "the same end....", num_bytes=5, window=16, seed=1)
    assert one == other


def test_settings_are_checked():
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        Settings(batch=0)

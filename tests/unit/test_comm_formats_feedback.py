"""What a lossy format leaves out comes later: nothing is lost, and training ends where it should."""

from __future__ import annotations

import pytest
import torch

from braid.comm.formats import ErrorFeedback, Int8, TopKFormat, WireFormat, by_name
from braid.errors import ConfigError

lossy = pytest.mark.parametrize(
    "name", ["bf16", "float16", "int8", "int8:stochastic", "topk:0.01", "topk:0.3"]
)


def form_of(name: str) -> WireFormat:
    return by_name(name, generator=torch.Generator().manual_seed(7))


def noise(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def sent(form: WireFormat, x: torch.Tensor, feedback: ErrorFeedback | None) -> torch.Tensor:
    """What arrives of `x`."""
    into = torch.empty(form.nbytes(x.numel()), dtype=torch.uint8)
    written = form.encode(x, into) if feedback is None else feedback.encode(form, x, into)
    out = torch.empty_like(x)
    form.decode(into[:written], out)
    return out


def residual(feedback: ErrorFeedback) -> torch.Tensor:
    return feedback.state_dict()["residual"]


@lossy
def test_all_that_was_sent_and_what_is_left_is_all_that_was_given(name):
    form, feedback = form_of(name), ErrorFeedback(1000)
    given, arrived = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    for step in range(20):
        x = noise(1000, step)
        given += x
        arrived += sent(form, x, feedback)
    # every step rounds three times, numbers of at most about 4 * 20
    torch.testing.assert_close(
        arrived + residual(feedback), given, rtol=0, atol=20 * 3 * 80 * 2.0**-24
    )


@lossy
def test_numbers_are_left_alone(name):
    x = noise(1000, 0)
    sent(form_of(name), x, ErrorFeedback(1000))
    assert torch.equal(x, noise(1000, 0))


def test_a_lossless_format_leaves_nothing():
    feedback = ErrorFeedback(1000)
    sent(form_of("float32"), noise(1000, 0), feedback)
    assert residual(feedback).count_nonzero() == 0


def distance_after_training(*, with_feedback: bool) -> float:
    """SGD on the average of two ranks' quadratics, each sending the two largest of 200 gradients.

    Two parameters pull the ranks in opposite directions, so that their sum is 0 where each is largest: without feedback
    they are all that is ever sent.
    """
    target = 1 + noise(200, 3).abs()
    pull = torch.zeros(200)
    pull[:2] = 50.0
    target[:2] = 0.0
    feedbacks = [ErrorFeedback(200) if with_feedback else None for _ in range(2)]
    form, x = TopKFormat(0.01), torch.zeros(200)
    for _ in range(1500):
        arrived = torch.zeros(200)
        for sign, feedback in zip((1, -1), feedbacks, strict=True):
            arrived += sent(form, x - target + sign * pull, feedback)
        x -= 0.005 * arrived / 2
    return float((x - target).norm() / target.norm())


def test_sgd_that_sends_one_percent_converges_with_feedback_and_not_without():
    assert distance_after_training(with_feedback=True) < 0.1
    assert distance_after_training(with_feedback=False) > 0.9


@lossy
def test_a_step_that_overflowed_leaves_no_trace(name):
    form, feedback, x = form_of(name), ErrorFeedback(600), noise(600, 0)
    x[3], x[300], x[599] = torch.nan, torch.inf, torch.finfo(torch.float32).max
    arrived = sent(form, x, feedback)
    assert arrived[[3, 300]].isfinite().tolist() == [False, False]
    assert residual(feedback)[[3, 300]].tolist() == [0.0, 0.0]
    assert residual(feedback).isfinite().all()
    if not arrived[599].isfinite():  # rounded to infinity
        assert residual(feedback)[599] == 0
    assert sent(form, noise(600, 1), feedback).isfinite().all()


def test_correct_and_settle_are_the_two_halves_of_encode():
    whole, halves, form = ErrorFeedback(300), ErrorFeedback(300), form_of("int8")
    for step in range(3):
        x = noise(300, step)
        sent(form, x, whole)
        halves.mark_sent(sent(form, halves.correct(x), None))
    assert torch.equal(residual(whole), residual(halves))


def test_what_was_lost_survives_a_checkpoint_and_not_a_reset():
    first, second = ErrorFeedback(300), ErrorFeedback(300)
    sent(Int8(), noise(300, 0), first)
    state = first.state_dict()
    second.load_state_dict(state)
    assert torch.equal(sent(Int8(), noise(300, 1), second), sent(Int8(), noise(300, 1), first))
    first.reset()
    assert (residual(first).count_nonzero(), state["residual"].count_nonzero() > 0) == (0, True)


def test_tensors_that_do_not_fit_are_refused_and_change_nothing():
    feedback = ErrorFeedback(4)
    feedback.mark_sent(torch.ones(4))
    into = torch.empty(64, dtype=torch.uint8)
    for x, room, says in (
        (
            torch.zeros(5),
            into,
            r"ErrorFeedback\(4, device='cpu'\) is for tensors of 4 numbers, got 5",
        ),
        (torch.zeros(4, dtype=torch.float64), into, "not torch.float64"),
        (torch.zeros(4), into[:3], "into has 3 bytes"),
    ):
        with pytest.raises(ConfigError, match=says):
            feedback.encode(Int8(), x, room)
    for state, says in (({}, r"holds \[\]"), ({"residual": torch.zeros(3)}, "got 3")):
        with pytest.raises(ConfigError, match=says):
            feedback.load_state_dict(state)
    assert residual(feedback).tolist() == [-1.0] * 4

"""Models of many kinds in plain torch are captured, and their replay in parts has their bits."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from braid.parallel.graph import capture, segments
from capture_checks import check_replay
from plain_models import MODELS, Checkpointed, Frozen, numbers


@pytest.mark.parametrize("name", MODELS)
def test_the_replay_in_parts_has_the_outputs_and_gradients_of_the_model(name):
    make, batch = MODELS[name]
    check_replay(make, batch)


def test_parts_that_are_moved_make_their_tensors_on_the_device_of_the_batch():
    with torch.random.fork_rng():
        first, second = segments(capture(Frozen(), **numbers(4)), 2)
    result = second.to("meta")(first.to("meta")(numbers(5)["x"].to("meta")))
    assert (result["rows"], result["x"].device.type) == (5, "meta")


class Noting(nn.Module):
    """Notes which of the earlier results are alive."""

    def __init__(self, results: list[weakref.ref[torch.Tensor]], alive: list[int]) -> None:
        super().__init__()
        self.results, self.alive = results, alive

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.alive.append(sum(result() is not None for result in self.results))
        y = x + 1
        self.results.append(weakref.ref(y))
        return y


def test_values_and_modules_that_nobody_needs_are_freed():
    results: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    model = nn.Sequential(*(Noting(results, alive) for _ in range(6)))
    first, last = segments(capture(model, torch.ones(4, 4)), 2)
    module = weakref.ref(model[5])
    del model, alive[:], results[:]
    with torch.no_grad():
        last(first(torch.ones(4, 4)))
    assert alive == [0, 1, 1, 1, 2, 2]  # the caller holds what the second part was given
    del last
    gc.collect()
    assert module() is None
    assert len(list(first.modules())) == 1 + 3


def test_modules_under_a_checkpoint_are_run_again_in_backward():
    with torch.random.fork_rng():
        model = Checkpointed()
        (part,) = segments(capture(model, **numbers(4)), 1)
        calls = [0] * 4
        for number, block in enumerate(model.blocks):

            def count(*_: object, number: int = number) -> None:
                calls[number] += 1

            block[0].register_forward_hook(count)
        result = part(numbers(4)["x"].requires_grad_())
        assert calls == [1, 1, 1, 1]
        result.sum().backward()
    assert calls == [1, 2, 2, 2]

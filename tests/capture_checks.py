"""Holds the replay of a captured model against the model: outputs, gradients and buffers."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.comm.autograd.nested import flatten, tensors_in
from braid.parallel.graph import capture, segments
from braid.parallel.graph.conversion import Made, convert

Batch = dict[str, Any]


@contextmanager
def written(made: Made, num_stages: int, directory: Path) -> Iterator[Any]:
    """Write a model as stages, and import what was written."""
    convert(made, num_stages, directory)
    before = set(sys.modules)
    sys.path.insert(0, str(directory))
    try:
        yield importlib.import_module("fused").Fused(made.model)
    finally:
        sys.path.remove(str(directory))
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent == directory:
                del sys.modules[name]


def check_written(
    make: Callable[[], nn.Module], batch: Callable[[int], Batch], num_stages: int, directory: Path
) -> None:
    """Compare a model and its written stages, in training and evaluation, for other rows, too."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = make()
    state = copy.deepcopy(model.state_dict())
    made = Made(model, (), batch(4), __name__, "make")
    with written(made, num_stages, directory) as fused:
        assert len(fused.stages) == num_stages
        for trains in (True, False):
            for rows in (4, 6):
                given = batch(rows)
                results = []
                for call in (lambda: model(**given), lambda: fused(*tensors_in(given))):  # noqa: B023
                    model.load_state_dict(state)
                    fused.train(trains)
                    model.train(trains)
                    results.append(results_of(model, call))
                assert_equal(*results)


class Results(NamedTuple):
    """What a model has done."""

    result: Any
    outputs: list[torch.Tensor]
    grads: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def results_of(model: nn.Module, call: Callable[[], Any]) -> Results:
    """Outputs of a call with its gradients, drawn from seed 0."""
    model.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result = call()
        outputs = list(tensors_in(result))
        floats = [x for x in outputs if x.requires_grad]
        if floats:
            sum(
                (x.float() * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in floats
            ).backward()
    return Results(
        flatten(result)[0],
        [x.detach() for x in outputs],
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        {name: b.clone() for name, b in model.named_buffers()},
    )


def assert_equal(one: Results, other: Results) -> None:
    assert one.result == other.result
    assert type(one.result) is type(other.result)
    assert len(one.outputs) == len(other.outputs)
    for a, b in zip(one.outputs, other.outputs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    for own, others in ((one.grads, other.grads), (one.buffers, other.buffers)):
        assert own.keys() == others.keys()
        for name in own:
            a, b = own[name], others[name]
            assert (a is None) == (b is None), name
            assert a is None or torch.equal(a, b), name


def check_replay(
    make: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    *,
    parts: Sequence[int] = (1, 2, 3),
    rows: Sequence[int] = (4, 6),
    captured_in: Sequence[bool] = (True, False),
) -> None:
    """Compare a model and its replay in parts, in training and evaluation, captured in either."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = make()
    state = copy.deepcopy(model.state_dict())
    for was_training in captured_in:
        model.load_state_dict(state)
        model.train(was_training)
        graph = capture(model, **batch(4))
        assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
        for trains in (True, False):
            for number in rows:
                given = batch(number)
                model.load_state_dict(state)
                model.train(trains)
                expected = results_of(model, lambda: model(**given))  # noqa: B023 - called at once
                for count in parts:
                    model.load_state_dict(state)
                    pieces = segments(graph, count)
                    assert len(pieces) == count
                    for piece in pieces:
                        piece.train(trains)
                    model.train(trains)

                    def replay() -> Any:
                        value: Any = tuple(tensors_in(given))  # noqa: B023
                        for piece in pieces:  # noqa: B023
                            value = piece(value)
                        return value

                    assert_equal(results_of(model, replay), expected)

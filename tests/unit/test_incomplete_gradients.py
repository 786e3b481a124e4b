"""Torch's clipping and scaling are refused for gradients that a rank has in part, and for no others."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from braid.errors import ConfigError
from braid.parallel.gradients.incomplete import (
    PartOfModel,
    forget_incomplete,
    mark_part,
    note_incomplete,
    unmark_part,
)
from braid.parallel.gradients.state_parts import note_parts

CALLS = PartOfModel("engine.clip()", "EngineScaler()")


class Engine:
    pass


def trained() -> nn.Linear:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    return model


def step_scaled(scaler: torch.amp.GradScaler, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_functions_that_were_imported_before_are_refused_while_the_engine_exists():
    model, engine = trained(), Engine()
    note_incomplete(engine, lambda _: model.parameters(), CALLS.refusal)
    with pytest.raises(ConfigError, match=r"call engine\.clip\(\) instead"):
        clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ConfigError, match=r"use EngineScaler\(\) instead"):
        step_scaled(torch.amp.GradScaler("cpu"), model)
    clip_grad_value_(model.parameters(), 1.0)
    clip_grad_norm_(trained().parameters(), 1.0)
    del engine
    gc.collect()
    clip_grad_norm_(model.parameters(), 1.0)
    step_scaled(torch.amp.GradScaler("cpu"), model)


def test_a_refusal_is_asked_at_each_call_and_the_newest_one_first():
    model, first, second = trained(), Engine(), Engine()
    texts = {"first": "", "second": ""}
    note_incomplete(first, lambda _: model.parameters(), lambda *_: texts["first"])
    note_incomplete(second, lambda _: model.parameters(), lambda *_: texts["second"])
    clip_grad_norm_(model.parameters(), 1.0)
    texts |= {"first": "one", "second": "other"}
    with pytest.raises(ConfigError, match="other"):
        clip_grad_value_(model.parameters(), 1.0)
    forget_incomplete(second)
    with pytest.raises(ConfigError, match="one"):
        clip_grad_norm_(model.weight, 1.0)
    forget_incomplete(first)
    clip_grad_norm_(model.weight, 1.0)


def test_the_norm_of_gradients_is_refused_by_the_gradients_alone():
    model, engine = trained(), Engine()
    note_incomplete(engine, lambda _: model.parameters(), CALLS.refusal)
    grads = [param.grad for param in model.parameters()]
    with pytest.raises(ConfigError, match=r"call engine\.clip\(\) instead, which returns"):
        get_total_norm(grads)
    get_total_norm([grad.clone() for grad in grads])
    mark_part(model.bias, CALLS)
    forget_incomplete(engine)
    get_total_norm(grads)
    note_parts(model)
    with pytest.raises(ConfigError, match="get_total_norm computes the norm of this rank's"):
        get_total_norm([model.bias.grad])
    get_total_norm([model.weight.grad])


def test_optimizers_that_need_more_than_elements_are_refused_on_parts():
    parts, whole = trained(), trained()
    mark_part(parts.weight, CALLS)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        kind(parts.parameters(), lr=0.1).step()
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS):
        kind(whole.parameters(), lr=0.1).step(lambda: torch.zeros(()))
        with pytest.raises(ConfigError, match=r"use AdamW, or another optimizer"):
            kind(parts.parameters(), lr=0.1).step(lambda: torch.zeros(()))


def test_a_disabled_scaler_and_one_that_lets_ranks_agree_are_allowed():
    class Agreeing(torch.amp.GradScaler):
        pass

    model, engine = trained(), Engine()
    note_incomplete(engine, lambda _: model.parameters(), CALLS.refusal)
    step_scaled(torch.amp.GradScaler("cpu", enabled=False), model)
    step_scaled(Agreeing("cpu"), model)


def test_parameters_without_gradients_do_not_count():
    model, engine = trained(), Engine()
    note_incomplete(engine, lambda _: [model.weight], CALLS.refusal)
    mark_part(model.bias, CALLS)
    model.weight.grad = model.bias.grad = None
    clip_grad_norm_(model.parameters(), 1.0)
    model.bias.grad = torch.ones(2)
    with pytest.raises(ConfigError):
        clip_grad_norm_(model.parameters(), 1.0)
    unmark_part(model.bias)
    clip_grad_norm_(model.bias, 1.0)


def test_a_noted_model_may_be_converted_and_freed():
    model = trained()
    note_incomplete(model, nn.Module.parameters, CALLS.refusal)
    other = nn.Linear(3, 2)
    torch.utils.swap_tensors(model.weight, other.weight)  # refuses tensors with weak references
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_clipping_can_be_compiled_without_a_break():
    model, engine = trained(), Engine()
    note_incomplete(engine, lambda _: nn.Linear(1, 1).parameters(), CALLS.refusal)

    def clip() -> torch.Tensor:
        return clip_grad_norm_(model.parameters(), 0.1)

    compiled = torch.compile(clip, backend="eager", fullgraph=True)
    before = [param.grad.clone() for param in model.parameters()]
    norm = compiled()
    assert torch.equal(norm, torch.stack([grad.norm() for grad in before]).norm())
    assert clip().item() == pytest.approx(0.1, rel=1e-4)


def test_torch_still_warns_of_an_empty_generator():
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((param for param in ()), 1.0)

"""Placed models in one process: what is equal to one process, what is refused, what is drawn."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.errors import ConfigError
from braid.strategies import placed
from placed_models import OneProcess, is_equal


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + self.drop(torch.tanh(block(x)))
        return self.last(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.middle = nn.Linear(8, 8)

    def forward(self, ids):
        x = self.middle(self.token(ids))
        return x @ self.token.weight.t() + self.token(ids).sum()


def spread(dropout: float = 0.0, **options):
    """Return a net of which each layer has another device, and the same net in one process."""
    torch.manual_seed(0)
    net = Net(dropout)
    devices = {"first": "/cpu:0", "blocks.0": "/cpu:1", "blocks.1": "/cpu:2", "last": "/cpu:0"}
    example = torch.randn(6, 8)
    return placed.place(net, example, devices=devices, num_cpus=3, **options), copy.deepcopy(net)


BATCH = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
TARGET = torch.tensor([0, 1, 2, 3, 0, 1])
cross_entropy = functional.cross_entropy


def test_a_shared_parameter_has_the_gradient_of_one_process():
    torch.manual_seed(0)
    net, ids = Tied(), torch.tensor([1, 5, 5, 2])
    alone = OneProcess(net, lr=0.5)
    devices = {"token": "/cpu:0", "middle": "/cpu:1"}
    with placed.place(net, ids, devices=devices, num_cpus=2) as program:
        program.optimizer(torch.optim.SGD, lr=0.5)
        assert {node: device[-1] for node, device in program.devices.items()}["middle"] == "1"
        for _ in range(3):
            loss = program.step(ids, ids, loss=cross_entropy)
            assert torch.equal(loss, alone.step((ids,), ids, cross_entropy))
        assert is_equal(program.state_dict(), alone.model)


def test_random_numbers_do_not_depend_on_the_placement():
    program, net = spread(dropout=0.5, seed=3)
    with program, placed.place(net, BATCH, seed=3) as alone:
        for each in (program, alone):
            each.optimizer(torch.optim.SGD, lr=0.1)
        losses = [[each.step(BATCH, TARGET, loss=cross_entropy) for each in (program, alone)]]
        losses += [[each.step(BATCH, TARGET, loss=cross_entropy) for each in (program, alone)]]
    assert all(torch.equal(one, other) for one, other in losses)
    assert losses[0][0] != losses[1][0]


def test_random_numbers_that_would_depend_on_the_placement_are_refused():
    net = nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.5), nn.Linear(8, 4))
    with placed.place(net, BATCH, devices={"0": "/cpu:0", "2": "/cpu:1"}, num_cpus=2) as program:
        with pytest.raises(ConfigError, match="draws random numbers that would depend"):
            program.step(BATCH, TARGET, loss=cross_entropy)
        assert program.gradients() == dict.fromkeys(program.state_dict())
        assert program.num_pending == 0


def test_autocast_around_a_step_holds_in_all_parts():
    program, net = spread()
    with program, torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(program.predict(BATCH), net(BATCH))
        assert program.predict(BATCH).dtype == torch.bfloat16


def test_a_node_is_fetched_and_fed_without_the_nodes_before_it():
    program, net = spread()
    with program:
        hidden = net.first(BATCH).detach()
        assert torch.equal(program.run(["first"], BATCH)[0], hidden)
        output, again = program.run(["last", "first"], BATCH, feeds={"first": hidden * 2})
        x = hidden * 2
        for block in net.blocks:
            x = x + torch.tanh(block(x))
        assert torch.equal(output, net.last(x))
        assert torch.equal(again, hidden * 2)
        kinds = [span.name for span in program.timeline().spans if span.kind == "forward"]
        assert not any(name.startswith("first") for name in kinds)
        with pytest.raises(ConfigError, match="the graph has no node 'frist'"):
            program.run(["frist"], BATCH)


def test_a_lambda_is_registered_once_and_old_plans_are_dropped():
    program, _ = spread()
    with program:
        for _ in range(3):
            program.step(BATCH, TARGET, loss=lambda y, t: cross_entropy(y, t) * 2)
        assert len(program._plans) == 1
        for weight in range(20):
            program.step(BATCH, (TARGET, weight), loss=weighted)
        hosted = program._tasks.worker._graphs[program._name]
        assert len(hosted.programs) == 3 * 16


def weighted(output, target):
    return cross_entropy(output, target[0]) * target[1]


def test_a_state_is_loaded_into_all_parts():
    program, net = spread()
    with program:
        state = {key: torch.randn_like(x) for key, x in program.state_dict().items()}
        program.load_state_dict(state)
        net.load_state_dict(state)
        assert is_equal(program.state_dict(), net)
        assert torch.equal(program.predict(BATCH), net(BATCH))
        state["more"] = state.pop("last.bias")
        with pytest.raises(ConfigError, match=r"missing \['last.bias'\], unknown \['more'\]"):
            program.load_state_dict(state)


def test_parameters_that_are_frozen_or_never_used_stay():
    net = Net()
    net.unused = nn.Linear(2, 2)
    net.first.weight.requires_grad_(False)
    alone = OneProcess(net, lr=0.1)
    with placed.place(net, BATCH, devices={"blocks.1": "/cpu:1"}, num_cpus=2) as program:
        program.optimizer(torch.optim.SGD, lr=0.1)
        program.step(BATCH, TARGET, loss=cross_entropy)
        alone.step((BATCH,), TARGET, cross_entropy)
        assert is_equal(program.state_dict(), alone.model)


class Scoped(Net):
    def forward(self, x):
        with placed.device("/job:worker"), placed.device("/device:cpu:1"):
            x = self.first(x)
            with placed.device("/device:cpu:2"):
                x = torch.tanh(x)
            with placed.device(None):
                x = self.blocks[0](x)
        return self.last(x)


def test_scopes_of_a_model_place_its_calls():
    with placed.place(Scoped(), BATCH, devices={"last": "/cpu:0"}, num_cpus=3) as program:
        numbers = [device[-1] for device in program.devices.values()]
        assert (numbers[0], numbers[1], numbers[3]) == ("1", "2", "0")
        with pytest.raises(ConfigError, match="is not a name of a device"):
            placed.device("worker 1")


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        with placed.device("/device:cpu:1"):
            return x * self.weight if x.sum() > 0 else x


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        view = x[:, :4]
        view.relu_()
        return self.last(x)


class Failing(nn.Module):
    def forward(self, x):
        if x.abs().sum() > 1e6:
            raise KeyError("too large")
        return x * 1


@pytest.mark.parametrize(
    ("net", "devices", "message"),
    [
        (Net(), {"first": "/task:3"}, r"first \(.*\) is placed on /task:3, which does not exist"),
        (Net(), {"frist": "/cpu:0"}, r"'frist' in devices matches no module.*first"),
        (nn.Sequential(Inside(), nn.Linear(8, 4)), {}, "entered inside of 0, which is captured"),
        (
            nn.Sequential(nn.TransformerEncoderLayer(8, 2), nn.Linear(8, 4)),
            {"0.linear1": "/cpu:1"},
            r"'0.linear1' is inside of 0, which runs as one call and cannot be divided",
        ),
        (
            Written(),
            {"first": "/cpu:0", "relu_ at 2": "/cpu:1"},
            r"first \(.*\) is .* on /device:cpu:0 and relu_ at 2 \(.*\) on .*cpu:1.*writes to .* in place",
        ),
        (
            Net(),
            {"first": "@last", "last": "@first"},
            "these nodes are colocated in a cycle: '(first' with 'last', 'last' with 'first|last' with 'first', 'first)",
        ),
        (
            Net(),
            {"first": "@last", "blocks.0": "/cpu:0", "last": "/cpu:1", "blocks": "@first"},
            r"'blocks' is placed with 'first'",
        ),
    ],
    ids=["device", "name", "scope inside", "inside", "in place", "cycle", "conflict"],
)
def test_a_placement_that_cannot_be_is_refused(net, devices, message):
    example = torch.randn(6, 3, 8) if "0.linear1" in devices else BATCH
    with pytest.raises(ConfigError) as caught:
        placed.place(net, example, devices=devices, num_cpus=2)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_an_exception_of_a_node_names_node_line_device_and_step():
    net = nn.Sequential(nn.Linear(8, 8), Failing(), nn.Linear(8, 4))
    devices = {"0": "/cpu:0", "1": "/cpu:1", "2": "/cpu:0"}
    with placed.place(net, BATCH, devices=devices, num_cpus=2) as program:
        program.optimizer(torch.optim.SGD, lr=0.1)
        program.step(BATCH, TARGET, loss=cross_entropy)
        before = program.state_dict()
        with pytest.raises(KeyError) as caught:
            program.step(BATCH * 1e9, TARGET, loss=cross_entropy)
        text = r"too large.*\(in step 2: 1 at .*, on /job:worker/task:0/device:cpu:1\)"
        assert re.search(text, str(caught.value))
        assert program.num_pending == 0
        assert all(torch.equal(x, before[key]) for key, x in program.state_dict().items())
        program.step(BATCH, TARGET, loss=cross_entropy)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, _: y, "must return one floating point number"),
        (lambda y, _: y.detach().sum(), "depends on no parameter"),
        (nn.Linear(4, 4), "the loss has parameters"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(loss, message):
    program, _ = spread()
    with program, pytest.raises(ConfigError, match=message):
        program.step(BATCH, TARGET, loss=loss)


def test_inputs_that_do_not_fit_are_refused():
    program, _ = spread()
    with program:
        with pytest.raises(ConfigError, match="needs 1 input tensors, got 2"):
            program.predict((BATCH, BATCH + 1))
        with pytest.raises(ConfigError, match="an input requires a gradient"):
            program.step(BATCH.clone().requires_grad_(), TARGET, loss=cross_entropy)


def test_the_placement_and_the_timeline_are_drawn(tmp_path):
    program, _ = spread()
    with program:
        program.step(BATCH, TARGET, loss=cross_entropy)
        program.draw(tmp_path / "placed.svg")
        program.draw(tmp_path / "placed.txt")
        timeline = program.timeline()
    assert (tmp_path / "placed.txt").read_text().splitlines()[0] == (
        "first        /job:worker/task:0/device:cpu:0   sends 1 to /job:worker/task:0/device:cpu:1"
    )
    assert (tmp_path / "placed.svg").read_text().count("<rect") == len(program.devices) + 2
    assert len(timeline.lanes) == 3
    assert {span.kind for span in timeline.spans} == {"forward", "backward", "wait"}
    assert "backward blocks.1" in str(timeline)
    assert timeline.to_svg().startswith("<svg")


def test_arguments_that_differ_from_the_example_are_refused():
    class Scaled(nn.Linear):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    net = Scaled(8, 4)
    with placed.place(net, {"x": BATCH, "scale": 2.0}) as program:
        assert torch.equal(program.predict({"x": BATCH, "scale": 2.0}), net(BATCH, 2.0))
        for wrong in ({"x": BATCH, "scale": 3.0}, {"x": BATCH}, BATCH):
            with pytest.raises(ConfigError, match="give the same arguments in the same order"):
                program.predict(wrong)

"""Compiled modules are bound to the one that was compiled: one replica runs them, several are refused before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.errors import ConfigError
from braid.parallel.data_parallel.replicas.data_parallel import DataParallel
from braid.parallel.data_parallel.replicas.replicate import replicate


class Net(nn.Module):
    """A layer and a batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


class Squashed(Net):
    """Calls a function that is an attribute of its own."""

    def __init__(self, squash: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.squash = squash

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.squash(super().forward(x))


def _around(net: Net) -> nn.Module:
    return torch.compile(net, backend="eager")


def _inside(net: Net) -> nn.Module:
    net.layer = torch.compile(net.layer, backend="eager")
    return net


def _in_place(net: Net) -> nn.Module:
    net.compile(backend="eager")
    return net


def _layer_in_place(net: Net) -> nn.Module:
    net.layer.compile(backend="eager")
    return net


def _forward(net: Net) -> nn.Module:
    net.layer.forward = torch.compile(net.layer.forward, backend="eager")
    return net


def _another_method(net: Net) -> nn.Module:
    net.step = torch.compile(net.forward, backend="eager")
    return net


def _method_of_a_layer(net: Net) -> nn.Module:
    net.apply_layer = torch.compile(net.layer.forward, backend="eager")
    return net


WAYS = {
    "around": (_around, "compiled it for this one Net"),
    "inside": (_inside, "compiled layer of it for this one Net"),
    "in place": (_in_place, "compiled it for this one Net"),
    "layer in place": (_layer_in_place, "compiled layer of it for this one Net"),
    "forward": (_forward, "compiled layer of it for this one Net"),
    "another method": (_another_method, "compiled it for this one Net"),
    "method of a layer": (_method_of_a_layer, "compiled it for this one Net"),
}


@pytest.mark.parametrize(("compiled", "words"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "act", [lambda module: DataParallel(module, ["cpu"] * 2), lambda module: replicate(module, ["cpu"])]
)  # fmt: skip
def test_replicas_of_compiled_modules_are_refused_and_nothing_changes(act, compiled, words):
    net = Net().eval()
    x = torch.ones(4, 4)
    expected = net(x)
    module = compiled(net)
    before = copy.copy(vars(net)), list(net.state_dict())
    with pytest.raises(ConfigError, match=words):
        act(module)
    assert (vars(net), list(net.state_dict())) == before
    assert torch.equal(module(x), expected)


def test_a_module_that_is_compiled_after_wrapping_is_refused():
    net = Net()
    wrapped = DataParallel(net, ["cpu"] * 2)
    net.compile(backend="eager")
    with pytest.raises(
        ConfigError, match="pass the original module, or use one process per device"
    ):
        wrapped(torch.ones(4, 4))
    assert net.norm.num_batches_tracked == 0


def test_a_compiled_criterion_is_refused_like_a_module():
    criterion = torch.compile(nn.CrossEntropyLoss(), backend="eager")
    with pytest.raises(ConfigError, match="compiled it for this one CrossEntropyLoss"):
        DataParallel(Net(), ["cpu"] * 2, criterion=criterion)


@pytest.mark.parametrize("compiled", [way for way, _ in WAYS.values()], ids=WAYS)
def test_one_replica_runs_what_is_compiled(compiled):
    plain = Net()
    net = copy.deepcopy(plain)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    plain(x).square().sum().backward()
    DataParallel(compiled(net), ["cpu"])(x).square().sum().backward()
    assert torch.equal(net.norm.running_mean, plain.norm.running_mean)
    assert [p.grad.tolist() for p in net.parameters()] == [
        p.grad.tolist() for p in plain.parameters()
    ]


def test_compiled_functions_of_no_module_are_called_by_every_replica():
    plain = Squashed(functional.gelu)
    net = Squashed(torch.compile(functional.gelu, backend="eager"))
    net.load_state_dict(plain.state_dict())
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # or the compiler warns of the gradient of what it is called with
        assert torch.equal(DataParallel(net, ["cpu"] * 2)(x), DataParallel(plain, ["cpu"] * 2)(x))

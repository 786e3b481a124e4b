"""Remote calls with tensors of a device: device maps, remote modules, distributed autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from gpu_models import lost
from torch import nn

from braid.comm import Group
from braid.compat.torch_rpc import DistributedOptimizer, RemoteModule, dist_autograd, rpc
from braid.rpc.outcomes import RpcError


def on(device: str) -> str:
    """Return the device with its number."""
    return device if device == "cpu" else f"{device}:0"


@contextlib.contextmanager
def node(group: Group, path: str, maps: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Make this rank a node of remote calls, and give the name of the other one."""
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{path}", device_maps=maps, allowed_modules=[__name__], rpc_timeout=30
    )
    rpc.init_rpc(
        f"w{group.rank}", rank=group.rank, world_size=group.size, rpc_backend_options=options
    )
    try:
        yield f"w{1 - group.rank}"
    finally:
        rpc.shutdown()


def to_itself(group: Group, device: str) -> dict[str, dict[str, str]]:
    """Return a map of the shared device to itself; tensors of the CPU need none."""
    return {} if device == "cpu" else {f"w{1 - group.rank}": {on(device): on(device)}}


def numbers(device: str) -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4).to(on(device))


def product(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, str]:
    """Return a product, and where it was computed."""
    return x @ x.T * scale, str(x.device)


def linear(width: int, seed: int) -> nn.Linear:
    """Return a layer with the same parameters in any process, whatever its other threads draw."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.utils.skip_init(nn.Linear, 4, width)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 2)
    return layer


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x).tanh()
        return y


def encoder(device: str) -> nn.Linear:
    return linear(4, 1).to(on(device))


def _calls(group: Group, device: str, path: str) -> list[Any]:
    with node(group, path, to_itself(group, device)) as peer:
        x = numbers(device)
        y, there = rpc.rpc_sync(peer, product, (x, 2.0))
        z = rpc.remote(peer, product, (x, 3.0)).to_here()[0]
        same = [torch.equal(y, product(x, 2.0)[0]), torch.equal(z, product(x, 3.0)[0])]
        return [*same, str(y.device), str(z.device), there]


def test_calls_compute_on_the_mapped_device_as_here(procs, device, tmp_path):
    expected = [True, True, on(device), on(device), on(device)]
    assert procs(2, _calls, device, str(tmp_path / "store")) == [expected] * 2


def _modules(group: Group, device: str, path: str) -> list[Any]:
    with node(group, path, to_itself(group, device)) as peer:
        x = numbers(device)
        module = RemoteModule(f"{peer}/{on(device)}", Decoder)
        y = module(x)
        here = Decoder().to(on(device))(x)
        params = [param.to_here() for param in module.remote_parameters()]
        return [lost([y.detach()], [here.detach()]), {str(t.device) for t in (y, *params)}]


def test_a_remote_module_computes_on_its_device(procs, device, tmp_path):
    for error, devices in procs(2, _modules, device, str(tmp_path / "store")):
        assert error < 1e-6
        assert devices == {on(device)}


def _trained(group: Group, device: str, path: str) -> list[torch.Tensor]:
    """Train a layer here and one in the other node; both nodes do this at the same time."""
    with node(group, path, to_itself(group, device)) as peer:
        x, first = numbers(device), encoder(device)
        module = RemoteModule(f"{peer}/{on(device)}", Decoder)
        references = [*map(rpc.RRef, first.parameters()), *module.remote_parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
        for _ in range(3):
            with dist_autograd.context() as context_id:
                loss = module(first(x)).square().sum()
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
        return [reference.to_here().detach().cpu() for reference in references]


def _trained_here(device: str) -> list[torch.Tensor]:
    first, second = encoder(device), Decoder().to(on(device))
    params = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        second(first(numbers(device))).square().sum().backward()
        optimizer.step()
    return [param.detach().cpu() for param in params]


def test_distributed_autograd_trains_like_one_process(procs, device, tmp_path):
    expected = _trained_here(device)
    for found in procs(2, _trained, device, str(tmp_path / "store")):
        assert lost(found, expected) < 1e-5


def _lost_device(group: Group, path: str) -> str:
    maps = {f"w{1 - group.rank}": {"cuda:0": "cuda:99"}}
    with node(group, path, maps) as peer:
        with pytest.raises(RpcError) as caught:
            rpc.rpc_sync(peer, product, (numbers("cuda"), 2.0))
        y, _ = rpc.rpc_sync(peer, product, (numbers("cpu"), 2.0))  # the node goes on
        assert torch.equal(y, product(numbers("cpu"), 2.0)[0])
        return str(caught.value)


def test_a_map_to_a_device_that_is_not_there_is_refused_by_name(procs, device, tmp_path):
    if device == "cpu":
        pytest.skip("tensors of the CPU have no map")
    texts = procs(2, _lost_device, str(tmp_path / "store"))
    for rank, text in enumerate(texts):
        assert f"worker:{rank} maps a tensor to cuda:99" in text

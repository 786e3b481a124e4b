"""16-bit forwards of layers that keep running statistics: weights and statistics stay in 32 bits, inputs and outputs are 16."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.comm import Group
from braid.parallel.data_parallel import DistributedDataParallel, MixedPrecision
from braid.parallel.data_parallel.sync_batch_norm import SyncBatchNorm
from support.seeded import filled

LOW = torch.bfloat16
RANKS = 2
NORMS = {
    "batch": nn.BatchNorm2d,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True, track_running_stats=True),
    "without statistics": lambda channels: nn.BatchNorm2d(channels, track_running_stats=False),
}


def _net(norm: str) -> nn.Sequential:
    conv = nn.utils.skip_init(nn.Conv2d, 1, 3, 3)  # draws no random numbers
    head = nn.utils.skip_init(nn.Linear, 3 * 4, 2)
    return filled(nn.Sequential(conv, NORMS[norm](3), nn.ReLU(), nn.Flatten(), head))


def _x(rank: int) -> torch.Tensor:
    return torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(10 + rank))


def _by_hand(net: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The forward, with every cast written out."""
    conv, norm, _, _, head = net
    x = functional.conv2d(x.to(LOW), conv.weight.to(LOW), conv.bias.to(LOW))
    keeps = norm.running_mean is not None
    weight, bias = (p if keeps else p.to(LOW) for p in (norm.weight, norm.bias))
    mean, var = norm.running_mean, norm.running_var
    if isinstance(norm, nn.InstanceNorm2d):
        x = functional.instance_norm(x, mean, var, weight, bias, norm.training)
    else:
        if norm.training and keeps:
            norm.num_batches_tracked.add_(1)
        x = functional.batch_norm(x, mean, var, weight, bias, norm.training or not keeps)
    return functional.linear(x.relu().flatten(1), head.weight.to(LOW), head.bias.to(LOW))


def _steps(forward, net: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """What a step in training and then an evaluation leave."""
    y = forward(_x(rank))
    y.float().square().mean().backward()
    found = {"y": y.detach()}
    net.eval()
    found["evaluated"] = forward(_x(rank)).detach()
    grads = {f"{name}.grad": p.grad.clone() for name, p in net.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    return {**found, **grads, **buffers}


def _mixed(group: Group, norm: str) -> dict[str, torch.Tensor]:
    net = _net(norm)
    precision = MixedPrecision(param_dtype=LOW)
    wrapped = DistributedDataParallel(
        net, process_group=group, mixed_precision=precision, broadcast_buffers=False
    )
    return _steps(wrapped, net, group.rank)


@pytest.mark.parametrize("norm", NORMS)
def test_layers_with_statistics_equal_what_is_cast_by_hand(world, norm):
    expected = []
    for rank in range(RANKS):
        net = _net(norm)
        expected.append(_steps(lambda x, net=net: _by_hand(net, x), net, rank))
    for rank, found in enumerate(world(RANKS, _mixed, norm)):
        assert found.keys() == expected[rank].keys()
        for name, x in found.items():
            own = expected[rank][name]
            if name.endswith(".grad"):
                own = (expected[0][name] + expected[1][name]) / 2
            assert x.dtype == own.dtype, name
            assert torch.equal(x, own), name


def _dtypes(
    group: Group, precision: MixedPrecision, synchronised: bool
) -> list[tuple[str, torch.dtype]]:
    """Of the weights and statistics of a layer while it is called, of what it returns, and of gradients."""
    net = _net("batch")
    if synchronised:
        net = SyncBatchNorm.convert_sync_batchnorm(net, group)
    seen = []
    net[1].register_forward_hook(
        lambda norm, _, y: seen.extend([norm.weight.dtype, norm.running_var.dtype, y.dtype])
    )
    wrapped = DistributedDataParallel(net, process_group=group, mixed_precision=precision)
    wrapped(_x(group.rank)).float().sum().backward()
    wrapped.eval()
    wrapped(_x(group.rank))
    return [*seen, net[1].weight.grad.dtype]


@pytest.mark.parametrize("synchronised", [False, True])
@pytest.mark.parametrize("buffers", [None, LOW])
def test_weights_beside_statistics_have_their_dtype(world, buffers, synchronised):
    precision = MixedPrecision(param_dtype=LOW, buffer_dtype=buffers)
    kept = buffers or torch.float32
    expected = [kept, kept, LOW] * 2 + [torch.float32]
    assert world(RANKS, _dtypes, precision, synchronised) == [expected] * RANKS


class _Own(nn.BatchNorm1d):
    """Computes by itself, from what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) * self.weight + self.bias


def _own_forward(group: Group) -> torch.dtype:
    net = filled(nn.Sequential(_Own(3), nn.utils.skip_init(nn.Linear, 3, 2)))
    precision = MixedPrecision(param_dtype=LOW)
    wrapped = DistributedDataParallel(net, process_group=group, mixed_precision=precision)
    y = wrapped(torch.ones(4, 3))
    y.sum().backward()
    return y.dtype


def test_a_layer_with_a_forward_of_its_own_gets_16_bits(world):
    assert world(1, _own_forward) == [LOW]


def _synchronised(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    net = SyncBatchNorm.convert_sync_batchnorm(_net("batch"), group)
    wrapped = DistributedDataParallel(
        net, process_group=group, mixed_precision=MixedPrecision(param_dtype=LOW)
    )
    wrapped(_x(group.rank)).float().square().mean().backward()
    return net[1].weight.grad.clone(), net[1].running_var.clone()


def test_a_synchronised_layer_in_16_bits_is_that_of_the_whole_batch(world):
    net = _net("batch")
    _by_hand(net, torch.cat([_x(rank) for rank in range(RANKS)])).float().square().mean().backward()
    for grad, variance in world(RANKS, _synchronised):
        # statistics are of the same 16-bit numbers; gradients of 16 bits have relative errors of 2^-8, a few of them in a row
        torch.testing.assert_close(variance, net[1].running_var)
        torch.testing.assert_close(grad, net[1].weight.grad, rtol=2**-5, atol=2**-5)


def _shared(group: Group) -> list[torch.dtype]:
    """A module under two names, and replicas on several devices."""
    norm = nn.BatchNorm1d(3)
    first, second = (nn.utils.skip_init(nn.Linear, width, 3) for width in (4, 3))
    net = filled(nn.Sequential(first, norm, second, norm))
    wrapped = DistributedDataParallel(
        net,
        device_ids=["cpu", "cpu"],
        process_group=group,
        mixed_precision=MixedPrecision(param_dtype=LOW),
    )
    y = wrapped(torch.randn(6, 4, generator=torch.Generator().manual_seed(group.rank)))
    y.float().square().sum().backward()
    return [y.dtype, *(p.grad.dtype for p in net.parameters())]


def test_layers_with_two_names_and_several_devices_run_in_16_bits(world):
    assert world(RANKS, _shared) == [[LOW, *[torch.float32] * 6]] * RANKS

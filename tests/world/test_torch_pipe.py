"""Scripts for torch's Pipe run, and give the bits of their nn.Sequential."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from braid.compat.torch_pipe import NoChunk, Pipe, WithDevice
from braid.compat.torch_pipe.checkpoint import is_recomputing
from braid.compat.torch_pipe.pipe import PipeSequential
from braid.compat.torch_pipe.skip import pop, skippable, stash
from braid.compat.torch_pipe.utils import partition_model
from braid.compat.torch_rpc import dist_autograd
from rpc_nodes import first_of
from support.seeded import filled


@pytest.fixture(autouse=True)
def node():
    with first_of(1) as agents:
        yield agents[0]


def layers() -> nn.Sequential:
    inner = nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = nn.Sequential(nn.Linear(4, 6), inner, WithDevice(nn.ReLU(), "cpu"), nn.Linear(6, 2))
    return filled(model, 3)


def batch(rows: int = 10) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_training_has_the_bits_of_the_sequential(checkpoint):
    model, expected = Pipe(layers(), chunks=4, checkpoint=checkpoint), layers()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, expected)]
    for rows in (11, 8):
        x = batch(rows).requires_grad_()
        model(x).local_value().square().mean().backward()
        # one process: the micro-batches in turn, and a loss of the joined outputs
        outputs = [expected(part) for part in x.detach().chunk(4)]
        whole = torch.cat([output.detach() for output in outputs]).requires_grad_()
        whole.square().mean().backward()
        sizes = [len(output) for output in outputs]
        for output, grad in zip(outputs, whole.grad.split(sizes), strict=True):
            output.backward(grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = [*model.parameters(), *model.buffers()]
    assert all(map(torch.equal, found, [*expected.parameters(), *expected.buffers()]))


def test_it_is_a_sequence_of_layers_with_the_names_of_torch():
    model = Pipe(layers(), 3)
    assert [len(part) for part in model.partitions] == [1, 3, 1, 1]
    assert (len(model), type(model[2]), list(model)[-1]) == (6, nn.Linear, model[-1])
    assert [str(device) for device in model.devices] == ["cpu"] * 4
    assert (model.chunks, model.checkpoint) == (3, "except_last")
    names = [f"partitions.{i}.{j}.weight" for i, j in ((0, 0), (1, 1), (1, 2), (3, 0))]
    assert [name for name, _ in model.named_parameters() if "weight" in name] == names
    with pytest.raises(IndexError):
        model[6]
    with pytest.raises(TypeError, match="a Pipe places its layers on its devices itself"):
        model.cuda()
    assert next(model.double().parameters()).dtype == torch.float64


def test_layers_on_one_device_share_a_stage_and_with_device_moves():
    # `meta` is a device other than the CPU that every machine has
    model = nn.Sequential(
        *(nn.Linear(1, 1, device="meta") for _ in range(2)),
        WithDevice(nn.ReLU(), "meta"),
        nn.Linear(1, 1),
    )
    pipe = Pipe(model)
    assert [len(part) for part in pipe.partitions] == [3, 1]
    assert [device.type for device in pipe.devices] == ["meta", "cpu"]


class Attention(nn.Module):
    """Takes a batch, a table for all micro-batches, and a number; passes all on."""

    def forward(self, x: torch.Tensor, table: torch.Tensor, power: int) -> Any:
        return x @ table, table, power + 1


def test_several_inputs_no_chunk_and_other_values_pass():
    model = Pipe(nn.Sequential(Attention(), PipeSequential(Attention(), Attention())), chunks=3)
    x, table = batch(5).requires_grad_(), batch(4).requires_grad_()
    out, tables, powers = model(x, NoChunk(table), 0).local_value()
    assert torch.equal(tables, torch.cat([table] * 3))
    assert powers == [3, 3, 3]
    out.sum().backward()
    wanted = [t.detach().clone().requires_grad_() for t in (x, table)]
    parts = [part @ wanted[1] @ wanted[1] @ wanted[1] for part in wanted[0].chunk(3)]
    torch.cat(parts).sum().backward()
    assert torch.equal(out, torch.cat(parts))
    assert torch.equal(x.grad, wanted[0].grad)
    # micro-batches add to the gradient of a shared input in the order in which they end: three terms
    torch.testing.assert_close(table.grad, wanted[1].grad, rtol=1e-6, atol=1e-6)


def test_skip_connections_cross_stages():
    @skippable(stash=["early"])
    class Enters(nn.Module):
        def forward(self, x):
            yield stash("early", x * 2)
            return x.tanh()

    @skippable(pop=["early"])
    class Leaves(nn.Module):
        def forward(self, x):
            early = yield pop("early")
            return x + early

    model = nn.Sequential(Enters(), nn.Sequential(nn.Identity(), nn.Tanh()), Leaves())
    x, y = batch().requires_grad_(), batch().requires_grad_()
    Pipe(model, chunks=2)(x).local_value().sum().backward()
    (y.tanh().tanh() + y * 2).sum().backward()
    assert torch.equal(x.grad, y.grad)
    with pytest.raises(TypeError, match="no module declared 'early' as poppable but stashed"):
        Pipe(model[:2])
    with pytest.raises(TypeError, match="'0' declared 'early' as poppable but it was not stashed"):
        Pipe(nn.Sequential(nn.Sequential(Leaves(), Enters())))


def test_dropout_and_deferred_statistics_do_not_depend_on_chunks():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    found = []
    for chunks in (1, 3):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            pipe = Pipe(copy.deepcopy(model), chunks, "always", True)
            pipe.train()(batch()).local_value()
            norm = pipe[0]
            dropped = Pipe(model[1:], chunks)(batch()).local_value() == 0
        found.append((norm.running_mean, dropped))
    assert found[0][1].any()
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[0][0], found[1][0])


def test_hooks_of_partitions_and_layers_run_and_recomputation_is_visible():
    seen: list[tuple[str, bool]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: seen.append((name, is_recomputing()))

    model = Pipe(layers()[:1], checkpoint="always")
    model.partitions[0].register_forward_hook(note("partition"))
    model[0].register_forward_hook(note("layer"))
    model(batch()).local_value().sum().backward()
    again = [("layer", True), ("partition", True)]
    assert seen == [("layer", False), ("partition", False), *again]


def test_evaluation_and_an_empty_model_return_references():
    model = Pipe(layers(), chunks=3).eval()
    with torch.no_grad():
        found = model(batch()).local_value()
    assert not found.requires_grad
    expected = torch.cat([layers().eval()(part) for part in batch().chunk(3)])
    assert torch.equal(found, expected)
    assert Pipe(nn.Sequential())(found).to_here() is found


class Returns(nn.Module):
    """Returns other things for the micro-batches 0 and 1."""

    def __init__(self, *values: Any) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: torch.Tensor) -> Any:
        return self.values[int(x[0, 0])]


def returned(*values: Any) -> Any:
    pipe = Pipe(nn.Sequential(Returns(*values)), 2, "never")
    return pipe(torch.arange(2.0).view(2, 1)).local_value()


ONE = torch.ones(1, 1)
TWICE = nn.Linear(1, 1)
SPLIT = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Pipe(nn.Linear(1, 1)), TypeError, "module must be nn.Sequential to be partitioned"),
        (lambda: Pipe(nn.Sequential(), chunks=0), ValueError, "must be positive integer, got 0"),
        (lambda: Pipe(nn.Sequential(), 1, "some"), ValueError, "'except_last', or 'never'"),
        (lambda: Pipe(nn.Sequential(TWICE, TWICE)), ValueError, "duplicate children"),
        (lambda: Pipe(nn.Sequential(SPLIT)), ValueError, "single device, .* got cpu, meta"),
        (lambda: NoChunk([1]), TypeError, r"NoChunk only supported for tensors, found: \[1\]"),
        (lambda: Pipe(layers())(1, NoChunk(batch())), TypeError, "do not have any tensors"),
        (lambda: Pipe(layers())(batch().to("meta")), ValueError, "first partition, cpu, got meta"),
        (lambda: Pipe(layers(), 4)(batch(4), batch(3)), RuntimeError, "inputs: 3 and 4: .*NoChunk"),
        (lambda: Pipe(layers(), 2)(batch(0)), ValueError, "a batch of 0 rows"),
        (lambda: returned("a", ONE), TypeError, "No tensors found in batch: 'a': return a tensor"),
        (lambda: returned((ONE, 1), (ONE, "b")), TypeError, "found: <class 'int'> and <class 'str'>"),
        (lambda: returned((ONE, 1), (ONE,)), TypeError, r"tuples of different lengths, \[2, 1\]"),
        (lambda: partition_model(layers(), [1, 1]), ValueError, r"\[1, 1\] must add up to the 4"),
    ],
)  # fmt: skip
def test_mistakes_have_the_exceptions_of_torch(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_partition_model_makes_stages_by_balance():
    model = partition_model(layers(), [1, 3], ["cpu", "cpu"])
    assert [len(part) for part in model] == [1, 3]
    assert [len(part) for part in Pipe(model).partitions] == [1, 3]


def test_a_distributed_backward_adds_to_the_gradients_of_the_parameters():
    model, plain = Pipe(layers(), chunks=2), Pipe(layers(), chunks=2)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model(batch()).to_here().sum()])
        assert dist_autograd.get_gradients(context_id) == {}
    plain(batch()).to_here().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(param.grad, expected.grad) for param, expected in pairs)

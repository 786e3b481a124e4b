"""torchgpipe's interface on the devices of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from braid.compat import torchgpipe
from braid.compat.torch_pipe import Pipe
from braid.compat.torchgpipe import GPipe, is_checkpointing, is_recomputing
from braid.compat.torchgpipe.balance import balance_by_size, balance_by_time
from braid.compat.torchgpipe.balance.blockpartition import solve
from braid.compat.torchgpipe.batchnorm import DeferredBatchNorm
from braid.compat.torchgpipe.gpipe import BalanceError
from braid.compat.torchgpipe.microbatch import Batch, check, gather, scatter
from braid.compat.torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables


def test_a_script_runs_after_changing_the_import():
    """The shape of torchgpipe's own tutorial: input to the first device, target to the last."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    model = GPipe(model, balance=[1, 2, 2], chunks=8)
    assert len(model.devices) == 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    in_device, out_device = model.devices[0], model.devices[-1]
    x = torch.randn(64, 8)
    y = (x[:, :3] * 3).argmax(1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        output = model(x.to(in_device, non_blocking=True))
        loss = nn.functional.cross_entropy(output, y.to(out_device, non_blocking=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert not is_checkpointing()
    assert not is_recomputing()
    assert torchgpipe.__version__ == "0.0.7"


def test_it_is_a_sequence_of_layers_with_the_names_of_torchgpipe():
    a, b, c = nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)
    model = GPipe(nn.Sequential(a, b, c), [2, 1], devices=["cpu", "cpu", "cpu"], chunks=3)
    assert (len(model), list(model), model[0], model[-1]) == (3, [a, b, c], a, c)
    assert (model.balance, model.chunks, model.checkpoint) == ([2, 1], 3, "except_last")
    assert [str(device) for device in model.devices] == ["cpu", "cpu"]
    assert [list(part) for part in model.partitions] == [[a, b], [c]]
    assert list(model.state_dict())[-1] == "partitions.1.2.bias"
    with pytest.raises(IndexError):
        model[3]


def test_micro_batches_are_those_of_torch_chunk():
    rows = []
    spy = nn.Identity()
    spy.register_forward_hook(lambda _module, args, _out: rows.append(len(args[0])))
    model = GPipe(nn.Sequential(spy, nn.Identity()), [1, 1], chunks=4, checkpoint="never")
    with torch.no_grad():
        model(torch.zeros(10, 1))
    assert rows == [3, 3, 3, 1]


def test_moving_is_denied_and_dtypes_change():
    model = GPipe(nn.Sequential(nn.Linear(1, 1)), [1])
    for move in (
        model.cuda,
        model.cpu,
        lambda: model.to("cpu"),
        lambda: model.to(torch.device("cpu")),
        lambda: model.to(torch.zeros(1)),
        lambda: model.to(device="cpu"),
    ):
        with pytest.raises(TypeError, match="places its layers on its devices itself"):
            move()
    assert next(model.to(torch.float64).parameters()).dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (GPipe, ValueError, "balance is required: .*balance_by_time"),
        (lambda m: GPipe(m, [1, 1, 1]), BalanceError, r"\(module: 2, sum of balance: 3\)"),
        (lambda m: GPipe(m, [2, 0]), BalanceError, "must be positive integer"),
        (lambda m: GPipe(m, [1, 1], chunks=0), ValueError, "positive integer, got 0"),
        (lambda m: GPipe(m, [1, 1], chunks=-1), ValueError, "positive integer"),
        (lambda m: GPipe(m, [1, 1], checkpoint="INVALID"), ValueError, "'except_last', or 'never'"),
        (lambda _: GPipe(nn.Linear(1, 1), [1]), TypeError, "must be nn.Sequential"),
        (lambda m: GPipe(m, [1, 1], devices=["cpu"]), IndexError, r"devices: 1, partitions: 2"),
        (lambda m: GPipe(m, [2])({"x": torch.ones(1)}), TypeError, "got dict"),
    ],
)
def test_mistakes_have_the_exceptions_of_torchgpipe(make, error, text):
    with pytest.raises(error, match=text):
        make(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))


def test_torchs_pipe_without_rpc_names_the_missing_call():
    with pytest.raises(RuntimeError, match=r"Please initialize RPC framework.*rpc.init_rpc\("):
        Pipe(nn.Sequential(nn.Linear(1, 1)))


def test_tuples_pass_and_shared_parameters_are_one_parameter():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, xy):
            x, y = xy
            return self.linear(x), y + 1

    first, last = Pair(), Pair()
    last.linear.weight = first.linear.weight
    model = GPipe(nn.Sequential(first, last), [1, 1], chunks=2)
    x, y = model((torch.ones(4, 2), torch.zeros(4)))
    (x.sum() + y.sum()).backward()
    assert y.tolist() == [2.0] * 4
    expected = first.linear.weight.grad.clone()
    first.zero_grad()
    last.zero_grad()
    last(first((torch.ones(4, 2), torch.zeros(4))))[0].sum().backward()
    torch.testing.assert_close(expected, first.linear.weight.grad)


def test_an_empty_model_returns_its_input():
    x = torch.tensor(42)
    model = GPipe(nn.Sequential(), [])
    assert (model(x), model((x,)), len(model)) == (x, (x,), 0)


def test_texts_that_are_equal_to_a_mode_are_one():
    class Mode:
        def __eq__(self, other):
            return other == "never"

        def __hash__(self):
            return hash("never")

    assert GPipe(nn.Sequential(nn.Linear(1, 1)), [1], checkpoint=Mode()).checkpoint == "never"


@pytest.mark.parametrize(("checkpoint", "runs"), [("never", 2), ("always", 4)])
def test_hooks_of_partitions_run_once_per_forward_of_a_micro_batch(checkpoint, runs):
    layers = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    model = GPipe(layers, [2, 1], chunks=2, checkpoint=checkpoint)
    rows, grads = [], []
    for partition in model.partitions:
        partition.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
        partition.register_full_backward_hook(lambda _, __, outputs: grads.append(outputs[0]))
    model.partitions[1].register_forward_hook(lambda _, __, output: 2 * output)
    x = torch.ones(4, 1, requires_grad=True)
    y = model(x)
    torch.testing.assert_close(y, 2 * layers(x))
    y.sum().backward()
    assert rows == [2] * 2 * runs
    assert len(grads) == 4


def test_copies_of_a_namespace_are_equal_to_it():
    namespace = Namespace()
    for twin in (copy.copy(namespace), copy.deepcopy(namespace)):
        assert twin == namespace != Namespace()
        assert twin is not namespace


def test_a_batch_of_one_tensor_takes_a_tuple_of_one():
    batch = Batch(torch.tensor(1))
    batch[:] = (torch.tensor(2),)
    assert (batch.atomic, int(batch.tensor)) == (True, 2)


def test_skips_over_partitions_and_isolation():
    @skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, x):
            yield stash("skip", x)
            return x * 2

    @skippable(pop=["skip"])
    class Pop(nn.Module):
        def forward(self, x):
            skip = yield pop("skip")
            return x + skip

    outer, inner = Namespace(), Namespace()
    layers = nn.Sequential(
        Stash().isolate(outer),
        Stash().isolate(inner),
        Pop().isolate(inner),
        Pop().isolate(outer, only=["skip"]),
    )
    verify_skippables(layers)
    model = GPipe(layers, [1, 1, 1, 1], chunks=2)
    x = torch.ones(4, 1, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.tolist() == [[7.0]] * 4
    with pytest.raises(TypeError, match="'1' redeclared 'skip' as stashable but not isolated"):
        verify_skippables(nn.Sequential(Stash(), Stash(), Pop(), Pop()))


def test_deferred_batch_norm_converts_and_commits_after_its_chunks():
    plain = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm1d(2)))
    converted = DeferredBatchNorm.convert_deferred_batch_norm(plain, chunks=2)
    assert isinstance(converted[0], DeferredBatchNorm)
    assert isinstance(converted[1][0], DeferredBatchNorm)
    norm, x = converted[0], torch.randn(6, 3, 2, 2) + 5
    norm(x[:4])
    assert norm.running_mean.eq(0).all()
    norm(x[4:])
    torch.testing.assert_close(norm.running_mean, 0.1 * x.mean((0, 2, 3)))
    assert norm.num_batches_tracked == 1


def test_batches_are_cut_and_joined():
    pair = (torch.arange(5), torch.arange(5) * 2)
    batches = scatter(pair, 2)
    assert [len(batch) for batch in batches] == [2, 2]
    assert [x.tolist() for x in gather(batches)] == [x.tolist() for x in pair]
    atomic = scatter(pair[0], 2)
    assert [batch.tensor.tolist() for batch in atomic] == [[0, 1, 2], [3, 4]]
    assert gather(atomic).tolist() == [0, 1, 2, 3, 4]
    one = Batch(torch.ones(1)).call(lambda x: x + 1)
    one[0] = one[0] + 1
    assert one.value.item() == 3
    one[:] = torch.zeros(1)
    assert one.tensor.item() == 0
    for wrong, error in [
        (lambda: one.tensors, AttributeError),
        (lambda: batches[0].tensor, AttributeError),
        (lambda: one.__setitem__(slice(None), (torch.ones(1),) * 2), TypeError),
        (lambda: one.__setitem__(slice(1), torch.ones(1)), NotImplementedError),
        (lambda: check([torch.ones(1)]), TypeError),
        (lambda: check((torch.ones(1), 1)), TypeError),
    ]:
        with pytest.raises(error):
            wrong()
    check(pair)


def test_balance_by_time_and_by_size_give_numbers_of_layers():
    layers = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2048), nn.Linear(2048, 4))
    sample = torch.randn(32, 256)
    by_time = balance_by_time(2, layers, sample, timeout=0.05, device="cpu")
    by_size = balance_by_size(2, layers, sample, chunks=4, param_scale=4.0, device="cpu")
    assert sum(by_time) == 4
    assert len(by_time) == 2
    assert by_size == [2, 2]
    assert isinstance(by_size, list)
    assert len(GPipe(layers, by_size, chunks=2)) == 4


def test_block_partition_has_the_cases_of_torchgpipe():
    assert solve([1, 2, 3, 4, 5, 6], partitions=2) == [[1, 2, 3, 4], [5, 6]]
    assert solve([5], 1) == [[5]]
    with pytest.raises(ValueError, match=r"positive integer \(partitions: 0\)"):
        solve([42], 0)
    with pytest.raises(ValueError, match=r"\(sequence: 1, partitions: 2\)"):
        solve([42], 2)

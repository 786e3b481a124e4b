"""Pipelines over the devices of one process, here threads that all have the CPU."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from braid.comm.autograd import checkpoint, recompute_layers
from braid.errors import BraidError, ConfigError
from braid.parallel.pipeline import DevicePipeline
from braid.parallel.pipeline.deferred_batch_norm import DeferredBatchNorm
from braid.parallel.pipeline.local_carrier import LocalWire
from braid.parallel.pipeline.recomputing import is_checkpointing, is_recomputing
from braid.parallel.pipeline.skip import Namespace, pop, skippable, stash
from support.seeded import filled


@skippable(stash=["early"])
class Enters(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        yield stash("early", x * 2)
        return x.tanh()


@skippable(pop=["early"])
class Leaves(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        early = yield pop("early")
        return x + early


def layers() -> nn.Sequential:
    outer, inner = Namespace(), Namespace()
    model = nn.Sequential(
        nn.Linear(4, 6),
        Enters().isolate(outer),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        Enters().isolate(inner),
        nn.Linear(6, 6),
        Leaves().isolate(inner),
        Leaves().isolate(outer),
        nn.Linear(6, 2),
    )
    return filled(model, 3)


def batch(rows: int = 10) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def reference(x: torch.Tensor, sizes: list[int]) -> tuple[nn.Sequential, torch.Tensor]:
    """The model after one backward over micro-batches in turn, and the gradient of its input."""
    model = layers()
    x = x.clone().requires_grad_()
    parts = [part.detach().requires_grad_() for part in x.split(sizes)]
    outputs = [model(part) for part in parts]
    whole = torch.cat([output.detach() for output in outputs]).requires_grad_()
    whole.square().mean().backward()
    for output, grad in zip(outputs, whole.grad.split(sizes), strict=True):
        output.backward(grad)
    return model, torch.cat([part.grad for part in parts])


@pytest.mark.parametrize("balance", [[9], [4, 5], [2, 2, 5], [3, 1, 3, 2]])
@pytest.mark.parametrize("recompute", ["always", "except_last", "never"])
def test_gradients_and_buffers_have_the_bits_of_one_process(balance, recompute):
    x = batch().requires_grad_()
    pipeline = DevicePipeline(
        layers(), ["cpu"] * 4, balance=balance, num_microbatches=4, recompute=recompute
    )
    output = pipeline(x)
    output.square().mean().backward()
    model, grad = reference(batch(), [3, 3, 2, 2])
    for (name, own), (_, expected) in zip(
        pipeline.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(own.grad, expected.grad), name
    for (name, own), (_, expected) in zip(
        pipeline.named_buffers(), model.named_buffers(), strict=True
    ):
        assert torch.equal(own, expected), name
    assert torch.equal(x.grad, grad)


def test_names_are_those_of_torchgpipe_and_evaluation_keeps_nothing():
    pipeline = DevicePipeline(layers(), ["cpu"] * 2, balance=[3, 6], num_microbatches=3).eval()
    assert list(pipeline.state_dict())[:2] == ["partitions.0.0.weight", "partitions.0.0.bias"]
    assert "partitions.1.8.weight" in pipeline.state_dict()
    with torch.no_grad():
        output = pipeline(batch())
    assert not output.requires_grad
    torch.testing.assert_close(output, layers().eval()(batch()))


def test_two_forwards_may_precede_their_backwards_in_any_order():
    pipeline = DevicePipeline(layers().eval(), ["cpu"] * 2, balance=[4, 5], num_microbatches=2)
    pipeline.eval()
    first, second = pipeline(batch(4)), pipeline(batch(6))
    second.sum().backward()
    first.sum().backward()
    model = layers().eval()
    (model(batch(4)).sum() + model(batch(6)).sum()).backward()
    grads = [p.grad for p in pipeline.parameters()]
    torch.testing.assert_close(grads, [p.grad for p in model.parameters()])


def test_a_second_backward_is_refused():
    output = DevicePipeline(layers(), ["cpu"], balance=[9])(batch()).sum()
    output.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="has run already"):
        output.backward()


class Containers(nn.Module):
    def forward(self, value: Any) -> dict[str, Any]:
        x = value["x"] if isinstance(value, dict) else value[0]
        return {"x": x * 2, "rows": torch.arange(len(x)), "text": ("a", 1)}


def test_containers_and_tensors_without_gradient_pass():
    pipeline = DevicePipeline(
        nn.Sequential(Containers(), Containers()), ["cpu"] * 2, balance=[1, 1], num_microbatches=2
    )
    x = batch(4).requires_grad_()
    output = pipeline((x, torch.zeros(4)))
    torch.testing.assert_close(output["x"], x * 4)
    assert output["rows"].tolist() == [0, 1, 0, 1]
    assert output["x"].requires_grad
    assert not output["rows"].requires_grad
    output["x"].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 4))


class Fails(nn.Module):
    def __init__(self, *, in_backward: bool) -> None:
        super().__init__()
        self.in_backward = in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_backward:
            raise KeyError("shard")
        y = x * 1
        y.register_hook(self._fail)
        return y

    @staticmethod
    def _fail(_grad: torch.Tensor) -> None:
        raise KeyError("shard")


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_exception_of_a_layer_is_raised_and_the_next_batch_works(in_backward):
    model = nn.Sequential(nn.Linear(4, 4), Fails(in_backward=in_backward), nn.Linear(4, 4))
    pipeline = DevicePipeline(
        model, ["cpu"] * 3, balance=[1, 1, 1], num_microbatches=2, recompute="never"
    )
    began = time.monotonic()
    with pytest.raises(KeyError, match="shard"):
        pipeline(batch()).sum().backward()
    assert time.monotonic() - began < 10
    model[1].forward = lambda x: x
    pipeline(batch()).sum().backward()


def test_copies_and_pickles_work_alone():
    pipeline = DevicePipeline(layers(), ["cpu"] * 2, balance=[4, 5], num_microbatches=2)
    pipeline(batch()).sum().backward()
    for twin in (copy.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):
        twin.zero_grad()
        twin(batch()).sum().backward()
        assert all(p.grad is not None for p in twin.parameters())


class Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.append((is_checkpointing(), is_recomputing()))
        return x


@pytest.mark.parametrize(
    ("recompute", "training", "expected"),
    [
        ("always", True, [(True, False)] * 2 + [(False, True)] * 2),
        ("except_last", True, [(True, False), (False, False), (False, True)]),
        ("never", True, [(False, False)] * 2),
        ("always", False, [(False, False)] * 2),
    ],
)
def test_layers_can_ask_whether_they_are_recomputed(recompute, training, expected):
    notes = Notes()
    pipeline = DevicePipeline(
        nn.Sequential(nn.Linear(4, 4), notes),
        ["cpu"] * 2,
        balance=[1, 1],
        num_microbatches=2,
        recompute=recompute,
    ).train(training)
    pipeline(batch()).sum().backward()
    assert notes.notes == expected


def test_dropout_follows_the_seed_and_not_the_micro_batches():
    def output(num_microbatches: int, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        pipeline = DevicePipeline(
            nn.Sequential(nn.Identity(), nn.Dropout(0.5)),
            ["cpu"] * 2,
            balance=[1, 1],
            num_microbatches=num_microbatches,
        )
        return pipeline(torch.ones(64, 8))

    with torch.random.fork_rng():
        assert torch.equal(output(4, 0), output(3, 0))
        assert not torch.equal(output(4, 0), output(4, 1))


class Checkpoints(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(torch.tanh(self.linear(x)), 0.5)
        return x * torch.rand_like(x).sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.2)
        if self.how == "torch":
            return torch_checkpoint(self.drop, x, use_reentrant=False)
        return checkpoint(self.drop, x) if self.how == "braid" else self.drop(x)


def gradients_with(how: str, recompute: str = "never") -> list[torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(Checkpoints(how) for _ in range(4)))
        if how == "layers":
            recompute_layers(model, 4)
        pipeline = DevicePipeline(
            model, ["cpu"] * 2, balance=[2, 2], num_microbatches=2, recompute=recompute
        )
        pipeline(batch()).sum().backward()
    return [param.grad for param in pipeline.parameters()]


@pytest.mark.parametrize("how", ["braid", "layers"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_checkpoint_inside_of_a_layer_repeats_the_random_numbers(how, recompute):
    found = gradients_with(how, recompute)
    assert all(map(torch.equal, found, gradients_with("plain")))


def test_torchs_checkpoint_with_dropout_inside_of_a_layer_is_refused():
    with pytest.raises(
        ConfigError, match=r"use braid.comm.autograd.checkpoint there, or recompute="
    ):
        gradients_with("torch")


def test_stages_work_at_the_same_time_and_in_the_order_of_micro_batches():
    meeting = threading.Barrier(2, timeout=20)

    class Meets(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x[0, 0] == self.number:  # micro-batch 1 here while 0 is in the other stage
                meeting.wait()
            return x

    first, second = Meets(), Meets()
    first.number, second.number = 1.0, 0.0
    pipeline = DevicePipeline(
        nn.Sequential(first, second), ["cpu"] * 2, balance=[1, 1], num_microbatches=3
    )
    pipeline.spans = []
    pipeline(torch.arange(3.0).unsqueeze(1))
    order = [(s.rank, s.microbatch) for s in pipeline.spans if s.name.startswith("F")]
    for rank in range(2):
        assert [i for own, i in order if own == rank] == [0, 1, 2]
    by_place = {(s.rank, s.microbatch): s for s in pipeline.spans if s.name.startswith("F")}
    assert by_place[0, 1].begin_ns < by_place[1, 0].end_ns
    assert by_place[1, 0].begin_ns < by_place[0, 1].end_ns


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_deferred_batch_norm_has_the_running_statistics_of_whole_batches(momentum, recompute):
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum))
    pipeline = DevicePipeline(
        copy.deepcopy(plain),
        ["cpu"] * 2,
        balance=[1, 1],
        num_microbatches=4,
        recompute=recompute,
        deferred_batch_norm=True,
    )
    for rows in (10, 8, 12):
        pipeline(batch(rows) + 3).sum().backward()
        plain(batch(rows) + 3)
    own, expected = pipeline.partitions[1][0], plain[1]
    assert isinstance(own, DeferredBatchNorm)
    assert own.num_batches_tracked == 3
    torch.testing.assert_close(own.running_mean, expected.running_mean)
    torch.testing.assert_close(own.running_var, expected.running_var)
    assert list(own.state_dict()) == list(expected.state_dict())
    assert pipeline.eval()(batch()).shape == (10, 4)


def test_bad_arguments_are_all_named_at_once():
    with pytest.raises(ConfigError) as caught:
        DevicePipeline(layers(), ["cpu"], balance=[3, 3], num_microbatches=0, recompute="sometimes")
    text = str(caught.value)
    assert "add up to the 9 layers, got [3, 3], which add up to 6" in text
    assert "2 stages need one device each, got 1" in text
    assert "micro-batches must be at least 1, got 0" in text
    assert "recompute must be one of always, except_last, never, got 'sometimes'" in text
    with pytest.raises(ConfigError, match="a batch of 0 rows"):
        DevicePipeline(layers(), ["cpu"], balance=[9])(batch()[:0])
    with pytest.raises(TypeError, match="no module declared 'early' as poppable but stashed"):
        DevicePipeline(nn.Sequential(Enters()), ["cpu"], balance=[1])
    with pytest.raises((ConfigError, BraidError), match="rows"):
        DevicePipeline(layers(), ["cpu"], balance=[9])((batch(3), batch(4)))


class Changes(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x if x[0, 0] else (x, x * 2)


def test_outputs_of_other_structures_are_refused():
    pipeline = DevicePipeline(nn.Sequential(Changes()), ["cpu"], balance=[1], num_microbatches=2)
    with pytest.raises(ConfigError, match="micro-batches returned 1, 2 tensors"):
        pipeline(torch.arange(2.0).unsqueeze(1))


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_a_stage_may_begin_with_a_module_that_works_in_place(recompute):
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))

    with torch.random.fork_rng():
        model = make()
        pipeline = DevicePipeline(
            make(), ["cpu"] * 3, balance=[1, 1, 1], num_microbatches=2, recompute=recompute
        )
    pipeline(batch()).square().sum().backward()
    model(batch()).square().sum().backward()
    for own, param in zip(pipeline.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, param.grad)


def test_a_message_that_comes_while_its_queue_is_made_is_not_lost():
    wire = LocalWire([torch.device("cpu")] * 2)

    def slow() -> deque[Any]:
        time.sleep(0.05)
        return deque()

    wire._lines = defaultdict(slow)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(wire.get, 0, 1, 0)
        time.sleep(0.01)
        wire.put(0, 1, 0, "value")
        try:
            assert received.result(5.0) == "value"
        finally:
            wire.abort("the test is over")

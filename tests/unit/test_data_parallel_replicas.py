"""Replicas of one process: equal to a loop over shares, bit by bit, on several CPU replicas."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.comm.autograd import checkpoint, recompute_layers
from braid.comm.tensors.reduction import combine
from braid.errors import ConfigError
from braid.parallel.data_parallel.replicas.data_parallel import DataParallel, data_parallel
from braid.parallel.data_parallel.replicas.parallel_apply import parallel_apply
from braid.parallel.data_parallel.replicas.replicate import replicate, write_back
from braid.parallel.data_parallel.replicas.scatter import share_sizes
from support.seeded import filled

WIDTH = 6

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices to copy between"
)


def _x(num_rows: int, *others: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, *others, generator=generator)


class Branching(nn.Module):
    """Tied weights and modules, a parameter that only some shares use, an unused one, a frozen one, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.head = self.embed
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.again = self.layer
        self.rare = nn.Parameter(torch.empty(WIDTH))
        self.never = nn.Parameter(torch.empty(WIDTH))
        self.frozen = nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.several = nn.ParameterList([torch.empty(WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        assert self.embed is self.head
        assert self.layer is self.again
        x = torch.tanh(self.again(x @ self.embed)) * self.frozen * scale
        for p in self.several:
            x = x + p
        if x.shape[0] > 2:
            x = x * self.rare
        return self.layer(x) @ self.head.t()


class Recurrent(nn.LSTM):
    """Keeps its weights in a list, too."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, None])[0][:, 0]


def _spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).eval()


def _replaced_forward() -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    module.forward = module.forward  # a bound method, as libraries leave it that wrap it
    return module


def _recomputed() -> nn.Module:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(9)))
    recompute_layers(module)
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "branching": Branching,
    "recurrent": Recurrent,
    "parametrised": _spectral,
    "replaced forward": _replaced_forward,
    "recomputed layers": _recomputed,
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
    "bfloat16": lambda: Branching().bfloat16(),
}


def _loop(module: nn.Module, x: torch.Tensor, upstream: torch.Tensor, count: int):
    """Outputs, and the gradients of shares summed in their order."""
    sizes = share_sizes(len(x), count)
    outputs, columns = [], []
    for share, dy in zip(x.split(sizes), upstream.split(sizes), strict=True):
        module.zero_grad()
        outputs.append(module(share))
        outputs[-1].backward(dy)
        columns.append([p.grad for p in module.parameters()])
    summed = []
    for grads in zip(*columns, strict=True):
        present = [g for g in grads if g is not None]
        total = torch.empty_like(present[0]) if present else None
        if present:
            combine(present, total, "sum", None)
        summed.append(total)
    return torch.cat(outputs).detach(), summed


class _Scaling(nn.Linear):
    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return super().forward(x) * factor


def _same(ours, theirs) -> bool:
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize(("count", "num_rows"), [(1, 4), (2, 6), (3, 8), (4, 2)])
def test_outputs_and_gradients_are_those_of_a_loop_over_shares(make, count, num_rows):
    module = filled(make())
    dtype = next(module.parameters()).dtype
    x, upstream = _x(num_rows, WIDTH).to(dtype), _x(num_rows + 1, WIDTH)[1:].to(dtype)
    expected, gradients = _loop(copy.deepcopy(module), x, upstream, count)
    wrapped = DataParallel(module, ["cpu"] * count)
    for _ in range(2):  # threads end in another order each time
        module.zero_grad()
        y = wrapped(x)
        y.backward(upstream)
        assert torch.equal(y, expected)
        assert _same([p.grad for p in module.parameters()], gradients)


@pytest.mark.parametrize("inputs", [(torch.ones(5, 4), 2.0), (torch.ones(5, 4),)])
def test_a_forward_without_a_wrapper_is_that_of_a_wrapper(inputs):
    module = _Scaling(4, 4)
    named = {} if len(inputs) == 2 else {"factor": 2.0}
    whole = data_parallel(module, inputs, ["cpu"] * 2, module_kwargs=named)
    assert torch.equal(whole, DataParallel(module, ["cpu"] * 2)(inputs[0], 2.0))
    assert torch.equal(data_parallel(nn.ReLU(), inputs[0], ["cpu"] * 2), inputs[0])


def test_training_is_that_of_one_process():
    ours, theirs = filled(Branching()), filled(Branching())
    wrapped = DataParallel(ours, ["cpu"] * 2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (wrapped, theirs)]
    for step in range(3):
        x = _x(5 + step, WIDTH)
        optimizers[0].zero_grad()
        wrapped(x).backward(torch.ones_like(x))
        _, gradients = _loop(theirs, x, torch.ones_like(x), 2)
        for p, grad in zip(theirs.parameters(), gradients, strict=True):
            p.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    assert _same(ours.parameters(), theirs.parameters())


class Remembering(nn.Module):
    """Changes buffers in place, replaces others, and keeps attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))
        self.register_buffer("absent", None)
        self.inner = nn.BatchNorm1d(1)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum()
        self.last = x[0]
        self.num_calls += 1
        self.inner(x)
        return x + self.seen


def test_what_the_first_replica_changes_is_kept_and_what_others_change_is_not():
    module, alone = Remembering(), Remembering()
    seen, statistics = module.seen, module.inner.running_mean
    wrapped = DataParallel(module, ["cpu"] * 2)
    x = torch.tensor([[1.0], [2.0], [10.0], [20.0]])
    # both start from the same buffers, and add what they see themselves
    assert wrapped(x).flatten().tolist() == [4.0, 5.0, 40.0, 50.0]
    assert wrapped(x).flatten().tolist() == [7.0, 8.0, 43.0, 53.0]
    for _ in range(2):
        alone(x[:2])
    assert module.seen is seen
    assert module.inner.running_mean is statistics
    assert _same(module.buffers(), alone.buffers())
    assert module.num_calls == 2
    assert "last" in module.state_dict()
    assert vars(module).keys() == vars(alone).keys()


def test_replicas_have_parameters_that_share_the_modules_memory():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    first, second = replicate(module, ["cpu", "cpu"])
    for replica in (first, second):
        assert [n for n, _ in replica.named_parameters()] == [
            n for n, _ in module.named_parameters()
        ]
        pairs = zip(replica.parameters(), module.parameters(), strict=True)
        assert all(a.data_ptr() == b.data_ptr() and not a.is_leaf for a, b in pairs)
    assert first[1].running_mean is module[1].running_mean
    assert second[1].running_mean.data_ptr() != module[1].running_mean.data_ptr()


def test_replicas_use_their_own_parameters_by_whichever_way_they_are_reached():
    recurrent, module = Recurrent(), nn.Sequential(_replaced_forward(), nn.ReLU())
    vars(module)["main"] = module[0]  # past registration
    for replica in replicate(recurrent, ["cpu", "cpu"]):
        assert all(a is b for a, b in zip(replica._flat_weights, replica.parameters(), strict=True))
    for replica in replicate(module, ["cpu", "cpu"]):
        assert replica.main is replica[0]
        assert replica[0].forward.__self__ is replica[0]
    for replica in replicate(_recomputed(), ["cpu", "cpu"]):
        assert all(layer.forward.layer is layer for layer in replica)


def test_writing_back_leaves_a_module_alone_that_was_not_replicated():
    module = Remembering()
    before = dict(vars(module))
    write_back(module, module)
    assert vars(module) == before


def test_buffers_with_gradients_are_replicated_like_parameters():
    module = nn.Module()
    module.register_buffer("scale", torch.tensor(2.0, requires_grad=True))
    replicas = replicate(module, ["cpu"] * 3)
    sum((i + 1) * r.scale for i, r in enumerate(replicas)).backward()
    assert module.scale.grad.item() == 6.0


def test_gradients_can_be_differentiated():
    module = filled(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))).double()
    x = _x(5, 2).double()

    def penalty(call: nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        grads = torch.autograd.grad(call(x).sum(), [*module.parameters()], create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        # the last bias has a constant gradient
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    torch.testing.assert_close(penalty(DataParallel(module, ["cpu"] * 3)), penalty(module))


class Recomputed(nn.Module):
    """Keeps nothing for backward but its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Branching()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x)


def test_replicas_can_be_recomputed():
    found = []
    for module in (filled(Branching()), filled(Recomputed())):
        y = DataParallel(module, ["cpu"] * 2)(_x(5, WIDTH))
        y.sum().backward()
        found.append([y.detach(), *(p.grad for p in module.parameters())])
    assert _same(*found)


class Word(NamedTuple):
    """A batch of another kind, which a subclass knows how to cut."""

    letters: str


class OfWords(DataParallel):
    def scatter(self, inputs, kwargs, device_ids):
        letters = inputs[0].letters[: len(device_ids)]
        return [(x,) for x in letters], [kwargs] * len(letters)

    def gather(self, outputs, output_device):
        return "".join(outputs) + f" on {output_device}"


def test_subclasses_replace_steps():
    class Upper(nn.Module):
        def forward(self, letter: str, *, times: int) -> str:
            return letter.upper() * times

    assert OfWords(Upper(), ["cpu"] * 3)(Word("abc"), times=2) == "AABBCC on cpu"


def test_sparse_gradients_stay_sparse():
    module = nn.Embedding(5, 2, sparse=True, _weight=torch.ones(5, 2))
    DataParallel(module, ["cpu"] * 2)(torch.tensor([0, 1, 1, 4])).sum().backward()
    assert module.weight.grad.is_sparse
    assert module.weight.grad.to_dense()[:, 0].tolist() == [1, 2, 0, 0, 1]


CRITERIA = {
    "mean": (functional.cross_entropy, None),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), None),
    "its own mean": (nn.CrossEntropyLoss(), None),
    "told sum": (lambda y, t: functional.cross_entropy(y, t, reduction="sum"), "sum"),
    "samples": (nn.CrossEntropyLoss(reduction="none"), None),
}


@pytest.mark.parametrize(("criterion", "reduction"), CRITERIA.values(), ids=CRITERIA)
@pytest.mark.parametrize("num_rows", [1, 5, 6])
def test_the_loss_of_shares_is_the_loss_of_the_batch(criterion, reduction, num_rows):
    module = filled(nn.Linear(WIDTH, 3)).double()
    x, target = _x(num_rows, WIDTH).double(), torch.arange(num_rows) % 3
    expected = criterion(module(x), target)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    wrapped = DataParallel(module, ["cpu"] * 2, criterion=criterion, reduction=reduction)
    loss = wrapped(x, target=target)
    loss.sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([p.grad for p in module.parameters()], gradients)
    assert wrapped(x).shape == (num_rows, 3)  # without a target


class Learned(nn.Module):
    """A criterion with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.scale * (y - target)).square().mean()


def test_a_criterion_with_parameters_learns():
    criterion = Learned()
    wrapped = DataParallel(nn.Identity(), ["cpu"] * 2, criterion=criterion)
    wrapped(torch.ones(4), target=torch.zeros(4)).backward()
    assert criterion.scale.grad.item() == 4.0
    assert [name for name, _ in wrapped.named_parameters()] == ["criterion.scale"]


def test_a_target_without_a_criterion_is_the_modules_own_argument():
    class Own(nn.Module):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return x - target

    assert DataParallel(Own(), ["cpu"] * 2)(torch.ones(3), target=torch.ones(3)).tolist() == [0] * 3


def test_losses_that_the_module_computes_become_a_vector_without_a_warning():
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": x.mean(), "count": torch.tensor(len(x))}

    found = DataParallel(Loss(), ["cpu"] * 2)(torch.arange(3.0))
    assert {name: x.tolist() for name, x in found.items()} == {"loss": [0.5, 2.0], "count": [2, 1]}


def test_a_criterion_that_returns_more_than_a_number_is_refused():
    wrapped = DataParallel(nn.Identity(), ["cpu"] * 2, criterion=lambda y, t: y - t)
    with pytest.raises(ConfigError, match=r"one number per share, got shape \[2\].*'none'"):
        wrapped(torch.ones(4), target=torch.ones(4))


def test_no_arguments_and_no_tensors_run_one_replica():
    class Constant(nn.Module):
        def forward(self, *words: str, **named: str) -> tuple[int, int]:
            return len(words), len(named)

    wrapped = DataParallel(Constant(), ["cpu"] * 3)
    assert wrapped() == (0, 0)
    assert wrapped("a", b="c") == (1, 1)


def test_attributes_of_the_module_can_be_read_and_copies_can_be_made():
    module = Remembering()
    wrapped = DataParallel(module, ["cpu"] * 2)
    assert wrapped.num_calls == 0
    assert wrapped.inner is module.inner
    assert wrapped.seen is module.seen
    twin = copy.deepcopy(wrapped)
    assert twin.module is not module
    assert twin.num_calls == 0
    assert next(iter(wrapped.state_dict())) == "module.seen"
    with pytest.raises(AttributeError, match="'Remembering' object has no attribute 'nothing'"):
        _ = wrapped.nothing


def test_without_devices_one_replica_runs_where_the_module_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    wrapped = DataParallel(nn.Linear(1, 1, device="meta"))
    assert wrapped.device_ids == [wrapped.output_device] == [torch.device("meta")]
    assert wrapped(torch.ones(2, 1, device="meta")).shape == (2, 1)
    assert DataParallel(nn.Identity()).device_ids == [torch.device("cpu")]


class Wrong(nn.Module):
    """Fails for some samples."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 1:
            raise self.error
        return x


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("no such word"), ValueError, "replica 1 of 3 on cpu: no such word"),
        (KeyError("word"), KeyError, "replica 1 of 3 on cpu: 'word'"),
        (UnicodeDecodeError("ascii", b"x", 0, 1, "why"), RuntimeError, "UnicodeDecodeError in replica 1 of 3"),
    ],
)  # fmt: skip
def test_an_exception_names_its_replica_and_keeps_its_type(error, kind, words):
    with pytest.raises(kind, match=words) as caught:
        DataParallel(Wrong(error), ["cpu"] * 3)(torch.tensor([0.0, 2.0, 2.0]))
    assert "(replica 2 failed, too)" in str(caught.value)
    assert caught.value.__cause__ is error
    assert not [t for t in threading.enumerate() if t.name.startswith("braid-data_parallel")]


def test_what_a_failed_forward_made_goes_with_its_exception():
    made: list[weakref.ref[torch.Tensor]] = []

    class Greedy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            large = x + 1
            made.append(weakref.ref(large))
            msg = "out of memory"
            raise torch.OutOfMemoryError(msg)

    gc.disable()  # which is what a loop that halves the batch and tries again counts on
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            DataParallel(Greedy(), ["cpu"] * 2)(torch.ones(2))
        assert [x() for x in made] == [None, None]
    finally:
        gc.enable()


def test_an_exit_in_a_replica_is_an_exit():
    with pytest.raises(SystemExit):
        DataParallel(Wrong(SystemExit(3)), ["cpu"] * 2)(torch.tensor([0.0, 2.0]))


def test_a_single_replica_raises_its_own_exceptions():
    error = ValueError("no such word")
    with pytest.raises(ValueError, match=r"^no such word$"):
        DataParallel(Wrong(error), ["cpu"])(torch.tensor([2.0]))


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="")


def test_replicas_run_side_by_side_in_the_callers_surroundings():
    together = threading.Barrier(2, timeout=30)

    def look(x: torch.Tensor, *, word: str) -> tuple[object, ...]:
        together.wait()
        kind = (x @ x).dtype
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return word, kind, modes, VARIABLE.get(), threading.current_thread().name

    x = torch.ones(2, 2)

    def call() -> list[tuple[object, ...]]:
        return parallel_apply([look] * 2, [x, (x,)], [{"word": "a"}, {"word": "b"}], ["cpu"] * 2)

    token = VARIABLE.set("mine")
    names = [f"braid-data_parallel-{i}" for i in range(2)]
    assert call() == [(w, torch.float32, (True, False), "mine", n) for w, n in zip("ab", names)]  # noqa: B905
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = call()
    assert [row[1:3] for row in found] == [(torch.bfloat16, (False, False))] * 2
    with torch.inference_mode():
        assert [row[2] for row in call()] == [(False, True)] * 2
    VARIABLE.reset(token)


def test_replicas_find_their_device_themselves():
    assert parallel_apply([torch.neg] * 2, [torch.ones(()), torch.zeros(())]) == [-1, 0]
    assert parallel_apply([len], [("word",)]) == [4]


@pytest.mark.parametrize(("inputs", "devices"), [([1], ["cpu"] * 2), ([1, 2], ["cpu"])])
def test_other_numbers_of_inputs_or_devices_are_refused(inputs, devices):
    with pytest.raises(
        ConfigError, match=r"inputs, .* keyword arguments and .* devices for 2 replicas"
    ):
        parallel_apply([abs, abs], inputs, None, devices)


def _elsewhere() -> None:
    wrapped = DataParallel(nn.Linear(1, 1), ["cpu"] * 2)
    wrapped.module.to("meta")
    wrapped(torch.ones(2, 1))


def _scripted() -> None:
    class Scripted(torch.jit.ScriptModule):
        pass

    replicate(nn.Sequential(Scripted()), ["cpu"])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: DataParallel(nn.Identity(), []), "device_ids is empty"),
        (lambda: DataParallel(nn.Identity(), ["cpu"], 99), "device 99 does not exist: this process sees"),
        (lambda: DataParallel(nn.Identity(), ["cpu"], reduction="max"), "reduction='max' is unknown: choose one of mean, sum, none"),
        (lambda: DataParallel(nn.Sequential(nn.SyncBatchNorm(1)), ["cpu"] * 2), "0 is a SyncBatchNorm"),
        (_elsewhere, r"weight is on meta, but .* on cpu, the first of device_ids: call \.to\('cpu'\)"),
        (_scripted, "Scripted in Sequential is a TorchScript module"),
        (lambda: replicate(nn.Sequential(nn.LazyLinear(1)), ["cpu"]), r"0\.weight, 0\.bias of Sequential have no shapes yet"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(act, words):
    with pytest.raises(ConfigError, match=words):
        act()


def test_a_criterion_goes_where_the_module_goes():
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    wrapped = DataParallel(nn.Linear(4, 3), ["meta"], criterion=criterion, reduction="sum")
    assert (
        criterion.weight.device == next(wrapped.module.parameters()).device == torch.device("meta")
    )


@needs_a_gpu
def test_replicas_on_one_gpu_equal_a_loop_over_shares():
    module = filled(Branching()).cuda()
    x = _x(8, WIDTH).cuda()
    expected, gradients = _loop(copy.deepcopy(module), x, torch.ones_like(x), 3)
    y = DataParallel(module, [0, "cuda:0", torch.device("cuda", 0)])(x.cpu())
    y.backward(torch.ones_like(y))
    assert torch.equal(y, expected)
    assert _same([p.grad for p in module.parameters()], gradients)


@needs_two_gpus
def test_replicas_on_several_gpus_equal_a_loop_over_shares():
    count = torch.cuda.device_count()
    module = filled(Branching())
    x = _x(4 * count, WIDTH).cuda()
    expected, gradients = _loop(copy.deepcopy(module).cuda(), x, torch.ones_like(x), count)
    y = DataParallel(module)(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(y, expected)
    assert _same([p.grad for p in module.parameters()], gradients)

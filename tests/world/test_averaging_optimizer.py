"""Optimizers that average, that step inside backward, that scale by layer; and clipping."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import said_by, values

from braid.comm import Group
from braid.errors import CommError, ConfigError, MismatchError
from braid.parallel.data_parallel import (
    LAMB,
    LARS,
    AveragingOptimizer,
    DistributedDataParallel,
    NonFiniteError,
    accumulate,
    clip_grad_norm_,
    grad_norm,
)
from support.seeded import filled

STEPS = 3


def net(width: int = 5) -> nn.Sequential:
    layers = [nn.utils.skip_init(nn.Linear, 3, width), nn.utils.skip_init(nn.Linear, width, 2)]
    return filled(nn.Sequential(layers[0], nn.Tanh(), layers[1]), width)


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step))
    return module(x).square().mean()


def reference(size: int) -> list[torch.Tensor]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        accumulate(module, [lambda r=r, s=step: loss_of(module, r, s) for r in range(size)])
        optimizer.step()
    return values(module)


def _patched(group: Group) -> tuple[list[torch.Tensor], bool]:
    module = net()
    if group.rank:
        with torch.no_grad():
            module[0].weight.zero_()  # rank 0's are copied
    plain = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ConstantLR(plain, factor=1.0)
    optimizer = AveragingOptimizer(plain, module.named_parameters(), process_group=group)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(module, group.rank, step).backward()
        optimizer.step()
        scheduler.step()
    return values(module), optimizer is plain and isinstance(optimizer, torch.optim.SGD)


def _inside(group: Group) -> tuple[list[torch.Tensor], bool]:
    module = net()
    wrapped = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-5)
    wrapped.step_in_backward(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    for step in range(STEPS):
        loss_of(wrapped, group.rank, step).backward()
    return values(module), all(param.grad is None for param in module.parameters())


@pytest.mark.parametrize("train", [_patched, _inside])
@pytest.mark.parametrize("size", [1, 3])
def test_a_patched_optimizer_and_one_inside_backward_give_the_weights_of_one_process(
    world, size, train
):
    for found, kept in world(size, train):
        assert kept
        assert all(map(torch.equal, found, reference(size)))


class Failing(torch.optim.SGD):
    """Its step raises when it is told to."""

    fails = False

    def step(self, closure: None = None) -> None:
        if self.fails:
            raise ArithmeticError
        super().step(closure)


def _fails_inside(group: Group) -> tuple[list[str], int]:
    module = nn.Sequential(net(), nn.BatchNorm1d(2))
    wrapped = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-5)
    steps = wrapped.step_in_backward(lambda params: Failing(params, lr=0.1))
    said = []
    for step in range(4):
        steps["0.2.weight"].fails = group.rank == 1 and step in {0, 2}
        try:
            loss_of(wrapped, group.rank, step).backward()
            said.append("")
        except (ArithmeticError, CommError, ConfigError) as error:
            said.append(type(error).__name__)
    return said, wrapped._reducer.num_reductions


@pytest.mark.filterwarnings("ignore:.* parameters differ between ranks")
def test_a_step_inside_backward_that_raises_leaves_the_others_alone(world):
    failed = ["ArithmeticError", ""] * 2
    assert world(2, _fails_inside) == [([""] * 4, 4), (failed, 4)]


def _accumulates(group: Group) -> list[torch.Tensor]:
    module = net()
    optimizer = AveragingOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        process_group=group,
        gradient_accumulation_steps=2,
    )
    for step in range(2):
        loss_of(module, group.rank, step).backward()
    optimizer.step()
    return values(module)


def test_two_backwards_make_one_step(world):
    module = net()
    own = []
    for rank in range(2):
        module.zero_grad()
        for step in range(2):
            loss_of(module, rank, step).backward()
        own.append([param.grad for param in module.parameters()])
    for param, *both in zip(module.parameters(), *own, strict=True):
        param.grad = (both[0] + both[1]) / 2
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    for found in world(2, _accumulates):
        for a, b in zip(found, module.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach())


def _refused(group: Group, what: str) -> str:
    module = net(4 if what == "shape" and group.rank else 5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    named = list(module.named_parameters())[: 1 if what == "names" else None]
    return said_by(
        lambda: AveragingOptimizer(optimizer, named, process_group=group),
        (ConfigError, MismatchError),
    )


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("names", "3 of the optimizer's 4 parameters have no name"),
        ("shape", "0.weight float32[4, 3]"),
    ],
)
def test_names_and_shapes_are_compared(world, what, words):
    assert all(words in text for text in world(2, _refused, what))


def test_norms_are_those_of_one_vector_sparse_and_16_bit_gradients_included():
    dense, low = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    low.data = low.data.bfloat16()
    sparse = nn.Parameter(torch.zeros(4, 2))
    unused = nn.Parameter(torch.zeros(2))
    dense.grad = torch.tensor([1.0, 2.0, 2.0])
    low.grad = torch.tensor([4.0, 0.0, 0.0], dtype=torch.bfloat16)
    sparse.grad = torch.sparse_coo_tensor(
        [[1, 1]], torch.tensor([[6.0, 0.0], [6.0, 0.0]]), (4, 2), check_invariants=True
    )
    params = [dense, low, sparse, unused]
    assert grad_norm(params).item() == 13.0
    assert grad_norm(params, float("inf")).item() == 12.0
    assert grad_norm([*params, params[0]]).item() == 13.0  # one that comes twice counts once
    assert clip_grad_norm_(params, 6.5).item() == 13.0
    assert grad_norm(params).item() == pytest.approx(6.5, rel=1e-3)
    before = [param.grad.clone() for param in params[:3]]
    clip_grad_norm_(params, 100.0)  # is none where they are small
    assert all(
        torch.equal(a.to_dense(), p.grad.to_dense())
        for a, p in zip(before, params[:3], strict=True)
    )
    assert grad_norm([unused]).item() == 0.0
    with pytest.raises(ConfigError, match="norm_type must be above 0"):
        grad_norm(params, 0.0)
    dense.grad[0] = float("nan")
    with pytest.raises(ConfigError, match="nonfinite="):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def test_norms_count_gradients_without_numbers_as_nothing():
    words = nn.Embedding(4, 2, sparse=True)
    words.weight.data.zero_()
    words(torch.zeros(0, dtype=torch.int64)).sum().backward()
    empty = nn.Parameter(torch.zeros(0))
    empty.grad = torch.zeros(0)
    assert grad_norm([words.weight, empty], float("inf")).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_16_bits_are_clipped_by_factors_that_16_bits_do_not_have(dtype):
    param = nn.Parameter(torch.zeros(4, dtype=dtype))
    param.grad = torch.full((4,), 30000.0, dtype=dtype)
    clip_grad_norm_([param], 0.01)  # by 1.7e-7
    assert grad_norm([param]).item() == pytest.approx(0.01, rel=2**-8)


def test_lars_moves_every_layer_by_the_same_share_of_its_size():
    big, small = (nn.Parameter(torch.ones(4) * size) for size in (100.0, 0.01))
    before = [big.detach().clone(), small.detach().clone()]
    optimizer = LARS([big, small], lr=1.0, momentum=0.0, trust_coefficient=0.1)
    big.grad, small.grad = torch.ones(4), torch.full((4,), 1000.0)
    optimizer.step()
    for param, old in zip((big, small), before, strict=True):
        assert ((old - param).norm() / old.norm()).item() == pytest.approx(0.1, rel=1e-4)


def test_lars_is_algorithm_1_of_its_paper():
    param = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = LARS([param], lr=0.5, momentum=0.9, weight_decay=0.1, trust_coefficient=0.02)
    w, v = param.detach().double(), torch.zeros(2, dtype=torch.float64)
    for step in range(3):
        g = torch.tensor([1.0, -2.0 * step])
        param.grad = g.clone()
        optimizer.step()
        local = 0.02 * w.norm() / (g.double().norm() + 0.1 * w.norm())
        v = 0.9 * v + 0.5 * local * (g + 0.1 * w)
        w = w - v
        torch.testing.assert_close(param.detach().double(), w, rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_weights_that_begin_at_zero_take_plain_steps(make):
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    groups = [
        {"params": [p], "trust": trust} for p, trust in zip(params, (True, False), strict=True)
    ]
    for param in params:
        param.grad = torch.tensor([1.0, 2.0, 3.0])
    make(groups, lr=0.1).step()
    assert params[0].tolist() == params[1].tolist() != [0.0] * 3


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_without_trust_is_momentum_sgd(nesterov):
    one, other = net(), net()
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    ours = LARS([{"params": one.parameters(), "trust": False}], **options)
    theirs = torch.optim.SGD(other.parameters(), **options)
    for step in range(4):
        for module, optimizer in ((one, ours), (other, theirs)):
            optimizer.zero_grad()
            loss_of(module, 0, step).backward()
            optimizer.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_lamb_without_trust_is_adam_and_with_it_moves_by_the_size_of_the_weights():
    one, other = net(), net()
    ours = LAMB([{"params": one.parameters(), "trust": False}], lr=0.01, eps=1e-8)
    theirs = torch.optim.Adam(other.parameters(), lr=0.01)
    for step in range(4):
        for module, optimizer in ((one, ours), (other, theirs)):
            optimizer.zero_grad()
            loss_of(module, 0, step).backward()
            optimizer.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    trusting = copy.deepcopy(one)
    optimizer = LAMB(trusting.parameters(), lr=0.1)
    loss_of(trusting, 0, 0).backward()
    before = values(trusting)
    optimizer.step()
    for old, new in zip(before, trusting.parameters(), strict=True):
        assert ((old - new).norm() / old.norm()).item() == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_optimizers_by_layer_refuse_sparse_gradients(make):
    words = nn.utils.skip_init(nn.Embedding, 4, 2, sparse=True)
    words(torch.tensor([1])).sum().backward()
    with pytest.raises(
        ConfigError, match=r"of shape \(4, 2\) has layout .*: use torch.optim.SparseAdam"
    ):
        make(words.parameters()).step()


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_optimizers_by_layer_go_on_from_their_state(make):
    def trained(pause: int) -> list[torch.Tensor]:
        module = net()
        optimizer = make(module.parameters(), lr=0.1)
        for step in range(4):
            if step == pause:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = make(module.parameters(), lr=1.0)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            loss_of(module, 0, step).backward()
            optimizer.step()
        return values(module)

    assert all(map(torch.equal, trained(2), trained(-1)))


def _steps_of(make, options: dict, parts: bool) -> torch.Tensor:
    """Steps of a complex parameter, or of its real view; the gradient is that of a conjugate."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(4, 3, dtype=torch.complex64, generator=generator) for _ in range(5)]
    param = nn.Parameter(torch.view_as_real(drawn[0]).clone() if parts else drawn[0].clone())
    optimizer = make([param], lr=0.1, weight_decay=0.1, **options)
    for given in drawn[1:]:
        grad = given.conj()
        param.grad = torch.view_as_real(grad.resolve_conj()) if parts else grad
        optimizer.step()
    found = param.detach()
    return found if parts else torch.view_as_real(found)


def test_lamb_takes_complex_parameters_as_their_parts():
    assert torch.equal(_steps_of(LAMB, {}, False), _steps_of(LAMB, {}, True))


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_takes_complex_parameters_as_their_parts(nesterov):
    options = {"trust_coefficient": 0.5, "nesterov": nesterov}
    torch.testing.assert_close(_steps_of(LARS, options, False), _steps_of(LARS, options, True))


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": float("nan")}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        LAMB([nn.Parameter(torch.ones(1))], **wrong)


# Gradients that are not finite.


def _spoils(group: Group, nonfinite: str) -> tuple[str, bool]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    AveragingOptimizer(
        optimizer, module.named_parameters(), process_group=group, nonfinite=nonfinite
    )
    said = ""
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(module, group.rank, step)
        if step and group.rank == 1:
            loss = loss * float("inf")
        try:
            loss.backward()
        except NonFiniteError as error:
            said = str(error)
            break
        optimizer.step()
        if not step:
            after_one = values(module)
    return said, all(map(torch.equal, values(module), after_one))


@pytest.mark.filterwarnings("ignore:gradients of:RuntimeWarning")
@pytest.mark.parametrize(("nonfinite", "words"), [("raise", "on rank 1 in step 2"), ("skip", "")])
def test_the_optimizer_does_about_nan_what_the_wrapper_does(world, nonfinite, words):
    for said, kept in world(2, _spoils, nonfinite):
        assert words in said
        assert kept


def _misspelt(group: Group) -> str:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    return said_by(
        lambda: AveragingOptimizer(optimizer, process_group=group, nonfinite="explode"), ConfigError
    )


def test_other_words_are_refused_before_the_optimizer_is_changed(world):
    assert "choose one of 'ignore', 'warn', 'raise', 'skip'" in world(1, _misspelt)[0]


# torch.autograd.grad.


def _grad(group: Group) -> tuple[str, bool, bool]:
    module = net()
    params = list(module.parameters())
    optimizer = AveragingOptimizer(
        torch.optim.SGD(params, lr=0.1), module.named_parameters(), process_group=group
    )
    try:
        torch.autograd.grad(loss_of(module, group.rank, 0), params[2:])
        said = "nothing happened"
    except ConfigError as error:
        said = str(error)
    with optimizer.no_sync():
        own = torch.autograd.grad(loss_of(module, group.rank, 0), params)
    x = torch.ones(1, 3, requires_grad=True)
    (by_input,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    by_input.square().sum().backward()  # averages as any other
    alone = net()
    loss_of(alone, group.rank, 0).backward()
    local = all(torch.equal(a, p.grad) for a, p in zip(own, alone.parameters(), strict=True))
    return said, local, params[0].grad is not None


def test_autograd_grad_of_parameters_is_refused_outside_of_no_sync(world):
    for said, local, penalized in world(2, _grad):
        assert "torch.autograd.grad of" in said
        assert "no_sync() of an AveragingOptimizer" in said
        assert (local, penalized) == (True, True)


def _forgotten(group: Group) -> tuple[int, int]:
    module = net()
    params = list(module.parameters())
    optimizer = AveragingOptimizer(torch.optim.SGD(params, lr=0.1), process_group=group)
    before = sum(len(param._backward_hooks or ()) for param in params)
    del optimizer
    gc.collect()
    return before, sum(len(param._backward_hooks or ()) for param in params)


def test_an_optimizer_that_is_gone_leaves_no_hooks_on_parameters(world):
    assert world(1, _forgotten) == [(4, 0)]


# Re-entrant checkpointing.


class Deep(nn.Module):
    """Layers of which some are checkpointed."""

    def __init__(self, checkpointed: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(net(3) for _ in range(4))
        self.back = nn.ParameterList([nn.Parameter(torch.ones(2, 3)) for _ in range(4)])
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(4):
            if number in self.checkpointed:
                x = checkpoint(self.one, number, x, use_reentrant=True)
            else:
                x = self.one(number, x)
        return x

    def one(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers[number](x) @ self.back[number])


def deep_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step))
    return module(x.requires_grad_()).square().mean()


def _checkpointed(
    group: Group, which: tuple[int, ...], passes: int
) -> tuple[list[torch.Tensor], int, bool]:
    module = Deep(which)
    optimizer = AveragingOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        module.named_parameters(),
        process_group=group,
        gradient_accumulation_steps=passes,
    )
    early = True
    for step in range(STEPS):
        optimizer.zero_grad()
        for one in range(passes):
            deep_loss(module, group.rank, passes * step + one).backward()
        early = early and optimizer._reducer.num_reductions == step + 1
        optimizer.step()
    return values(module), optimizer._reducer.num_reductions, early


@pytest.mark.filterwarnings("ignore:gradients were averaged in step:UserWarning")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("which", "early"),
    [((0, 1, 2, 3), False), ((1, 2, 3), True), ((1, 3), True), ((0, 1, 2), True), ((), True)],
)
def test_gradients_of_reentrant_checkpoints_are_averaged_once_a_backward(
    world, which, early, passes
):
    module = Deep(())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        own = []
        for rank in range(2):
            module.zero_grad()
            for one in range(passes):
                deep_loss(module, rank, passes * step + one).backward()
            own.append([param.grad for param in module.parameters()])
        for param, a, b in zip(module.parameters(), *own, strict=True):
            param.grad = (a + b) / 2
        optimizer.step()
    for found, reductions, in_backward in world(2, _checkpointed, which, passes):
        assert (reductions, in_backward) == (STEPS, early)
        for a, b in zip(found, module.parameters(), strict=True):
            assert torch.equal(a, b.detach())


def _clips(group: Group, how: str) -> tuple[list[torch.Tensor], list[str]]:
    module = Deep((0, 1, 2, 3))
    optimizer = AveragingOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), process_group=group
    )
    deep_loss(module, group.rank, 0).backward()
    if how == "synchronize":
        optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    return [param.grad.clone() for param in module.parameters()], [str(w.message) for w in caught]


def test_averages_that_come_in_step_are_told_once_and_not_after_synchronize(world):
    for how, number in (("synchronize", 0), ("step", 1)):
        ((_, said),) = world(1, _clips, how)
        assert [text[:39] for text in said] == ["gradients were averaged in step(), not "] * number
    first, second = world(2, _clips, "synchronize")
    assert all(map(torch.equal, first[0], second[0]))


def _breaks(group: Group) -> list[str]:
    module = Deep((0, 1, 2, 3))
    optimizer = AveragingOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), process_group=group
    )
    said = []
    for step in range(2):
        try:
            optimizer.zero_grad()
            loss = deep_loss(module, group.rank, step)
            handle = module.back[1].register_hook(_stop) if (step, group.rank) == (0, 1) else None
            loss.backward()
            optimizer.step()
        except (ArithmeticError, CommError) as error:
            said.append(str(error))
            if isinstance(error, ArithmeticError):
                handle.remove()
                with contextlib.suppress(CommError):
                    optimizer.zero_grad()
    return said


def _stop(_grad: torch.Tensor) -> None:
    msg = "stop"
    raise ArithmeticError(msg)


@pytest.mark.filterwarnings("ignore:gradients were averaged in step:UserWarning")
def test_a_rank_that_leaves_a_checkpoint_by_an_exception_is_named_to_the_others(world):
    first, second = world(2, _breaks)
    assert ["an exception ended the backward of rank 1" in text for text in first] == [True]
    assert second == ["stop"]


class Blind(torch.autograd.Function):
    """A product whose backward returns None for the second factor."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Undefined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Blind.apply(self.net(x), self.weight)


def _undefined(group: Group, wraps: bool) -> tuple[list[str], list[float], int]:
    module = model = Undefined()
    optimizer = torch.optim.AdamW(module.parameters(), weight_decay=0.5)
    if wraps:
        model = DistributedDataParallel(module, process_group=group, find_unused_parameters=True)
    else:
        AveragingOptimizer(optimizer, process_group=group)
    for step in range(STEPS):
        loss_of(model, group.rank, step).backward()
        optimizer.step()
        without = [name for name, param in module.named_parameters() if param.grad is None]
        optimizer.zero_grad()
    return without, module.weight.tolist(), len(optimizer.state)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_gradient_that_a_function_leaves_undefined_stays_none(world, wraps):
    assert world(2, _undefined, wraps) == [(["weight"], [1.0, 1.0], 4)] * 2


def _train_frozen(
    seed: int, module: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]
) -> None:
    """Freeze and unfreeze parameters in any place of a loop; drop gradients in it sometimes."""
    rng = random.Random(seed)
    for step in range(8):
        for param in module.parameters():
            if rng.random() < 0.4:
                param.requires_grad_(not param.requires_grad)
        if not any(param.requires_grad for param in module.parameters()):
            next(module.parameters()).requires_grad_()
        losses = [loss_of(module, rank, step) / len(ranks) for rank in ranks]
        for loss in losses:
            loss.backward()
        optimizer.step()
        if rng.random() < 0.8:
            optimizer.zero_grad()


def _frozen(group: Group, seeds: list[int]) -> list[list[torch.Tensor]]:
    found = []
    for seed in seeds:
        module = net()
        params = list(module.parameters())
        params[seed % 4].requires_grad_(requires_grad=False)
        optimizer = AveragingOptimizer(torch.optim.SGD(params, lr=0.1), process_group=group)
        _train_frozen(seed, module, optimizer, [group.rank])
        optimizer.close()
        found.append(values(module))
    return found


def test_parameters_may_be_frozen_and_unfrozen_in_any_place(world):
    """Hooks on frozen parameters, since a program may unfreeze them after the last call before a backward."""
    seeds = list(range(30))
    ranks = world(2, _frozen, seeds)
    for seed in seeds:
        module = net()
        params = list(module.parameters())
        params[seed % 4].requires_grad_(requires_grad=False)
        _train_frozen(seed, module, torch.optim.SGD(params, lr=0.1), [0, 1])
        for found in ranks:
            torch.testing.assert_close(found[seed], values(module))

"""Averaging of models equals what one process computes that holds all of them."""

from __future__ import annotations

import ast
import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training import said_by

from braid.comm import Group
from braid.errors import ConfigError, MismatchError, StaleError
from braid.parallel.data_parallel import (
    DiLoCo,
    DistributedDataParallel,
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDHook,
    PostLocalSGDOptimizer,
    PowerSGDOptions,
)

WIDTH = 6


class Model(nn.Module):
    """Two dtypes, a parameter without a gradient, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) * 0.4)
        self.second = nn.Parameter(torch.randn(WIDTH, generator=generator).double())
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ self.first).double() @ self.second).square().mean()


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _marked(group: Group, make: Any, steps: int) -> list[float]:
    """Parameters begin as the rank; what they are after each step."""
    param = nn.Parameter(torch.full((3,), float(group.rank)))
    averager = make(group)
    found = []
    for _ in range(steps):
        with torch.no_grad():
            param.add_(8.0 * group.rank)
        averager.average_parameters(iter([param]))
        found.append(param[0].item())
    return found


def _periodic(group: Group) -> PeriodicModelAverager:
    return PeriodicModelAverager(period=3, warmup_steps=1, process_group=group)


def test_a_periodic_averager_waits_and_then_averages_every_few_steps(world):
    # steps 1 and 4 of 0..5, as torch's counts them
    assert world(2, _marked, _periodic, 6) == [
        [0.0, 8.5, 8.5, 8.5, 20.5, 20.5],
        [9.0, 8.5, 16.5, 24.5, 20.5, 28.5],
    ]


def _hierarchical(group: Group) -> HierarchicalModelAverager:
    return HierarchicalModelAverager({2: 2, 4: 4}, 1, group)


def test_a_hierarchical_averager_takes_the_longest_period_that_is_due(world):
    # step 2: pairs, step 4: all
    told = world(4, _marked, _hierarchical, 5)
    values = [float(r) for r in range(4)]
    expected = []
    for step in range(5):
        values = [value + 8.0 * rank for rank, value in enumerate(values)]
        if step == 2:
            values = [(values[r - r % 2] + values[r - r % 2 + 1]) / 2 for r in range(4)]
        if step == 4:
            values = [sum(values) / 4] * 4
        expected.append(list(values))
    assert told == [list(column) for column in zip(*expected, strict=True)]


def _unfrozen(group: Group) -> list[float]:
    params = [nn.Parameter(torch.full((2,), float(group.rank))) for _ in range(2)]
    params[1].requires_grad_(False)
    averager = PeriodicModelAverager(2, 0, group)
    found = []
    for _ in range(3):
        averager.average_parameters(params)
        found.append(params[1][0].item())
        params[1].requires_grad_(True)
    return found


def test_parameters_that_are_unfrozen_are_averaged_from_then_on(world):
    assert world(2, _unfrozen) == [[0.0, 0.0, 0.5], [1.0, 1.0, 0.5]]


def _refused(group: Group, case: str) -> str:
    calls = {
        "period": lambda: PeriodicModelAverager(0, 0, group),
        "warmup": lambda: PeriodicModelAverager(2, -1, group),
        "empty": lambda: PeriodicModelAverager(2, 0, group).average_parameters(iter([])),
        "text": lambda: PeriodicModelAverager(2, 0, group).average_parameters(["x"]),
        "no levels": lambda: HierarchicalModelAverager({}, 0, group),
        "too large": lambda: HierarchicalModelAverager({2: 4}, 0, group),
        "shrinks": lambda: HierarchicalModelAverager({4: 1, 2: 2}, 0, group),
        "start": lambda: PostLocalSGDHook(-1),
        "lr": lambda: DiLoCo(torch.optim.SGD([nn.Parameter(torch.ones(1))]), lr=0),
        "broken period": lambda: PeriodicModelAverager(2.5, 0, group),
        "broken warmup": lambda: PeriodicModelAverager(2, 0.5, group),
        "broken level": lambda: HierarchicalModelAverager({1.5: 2}, 0, group),
        "broken start": lambda: PostLocalSGDHook(1.5),
        "diloco's": lambda: DiLoCo(torch.optim.SGD([nn.Parameter(torch.ones(1))]), period=2.5),
        "powersgd's": lambda: PowerSGDOptions(rank=1.5, start=0.5),
    }
    return said_by(calls[case], ConfigError)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("period", "got 0"),
        ("warmup", "got -1"),
        ("empty", "no parameter requires a gradient"),
        ("text", "a str is not a parameter"),
        ("no levels", "must be 2, the size of the group, as in {4: 2}"),
        ("too large", "period_group_size_dict={2: 4} is not a hierarchy"),
        ("shrinks", "must be integers that grow"),
        ("start", "got -1"),
        ("lr", "lr=0"),
        ("broken period", "period must be an integer of at least 1 (steps), got 2.5"),
        ("broken warmup", "warmup_steps must be an integer of at least 0, got 0.5"),
        ("broken level", "must be integers that grow"),
        ("broken start", "start must be an integer of at least 0 (steps), got 1.5"),
        ("diloco's", "period=2.5"),
        ("powersgd's", "powersgd got rank=1.5, start=0.5"),
    ],
)
def test_what_makes_no_sense_is_refused(world, case, words):
    assert all(words in text for text in world(2, _refused, case))


def _advised(group: Group) -> str:
    with pytest.raises(ConfigError, match="as in ") as caught:
        HierarchicalModelAverager({}, 0, group)
    return str(caught.value).partition("as in ")[2]


def _is_taken(group: Group, sizes: dict[int, int]) -> bool:
    HierarchicalModelAverager(sizes, 0, group).close()
    return True


@pytest.mark.parametrize("size", [1, 4, 5])
def test_the_hierarchy_that_is_advised_is_none_that_is_refused(world, size):
    (advised,) = set(world(size, _advised))
    assert all(world(size, _is_taken, ast.literal_eval(advised)))  # one thread: Python 3.11.7


def _closed(group: Group) -> tuple[bool, float]:
    averager = HierarchicalModelAverager({2: 1, 4: 2}, 0, group)
    averager.close()
    averager.step = 2
    try:
        averager.average_parameters([nn.Parameter(torch.ones(1))])
    except StaleError:
        return True, group.all_reduce(torch.ones(1)).item()
    return False, 0.0


def test_a_hierarchy_gives_its_own_groups_back_and_no_others(world):
    assert world(2, _closed) == [(True, 2.0)] * 2


def _swapped(group: Group, kind: str) -> str:
    shapes = [(2, 3), (3, 2)][:: -1 if group.rank else 1]
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    calls = {
        "averager": lambda: PeriodicModelAverager(2, 0, group).average_parameters(params),
        "diloco": lambda: DiLoCo(torch.optim.SGD(params, lr=0.1), process_group=group),
    }
    return said_by(calls[kind], MismatchError)


@pytest.mark.parametrize("kind", ["averager", "diloco"])
def test_another_order_of_parameters_on_a_rank_is_refused_on_all(world, kind):
    for text in world(2, _swapped, kind):
        assert "rank 0  0 float32[2, 3]" in text
        assert "rank 1  0 float32[3, 2]" in text


OTHERS: dict[str, tuple[Any, Any, list[str]]] = {
    "period": ((3, 1), (2, 1), ["rank 0  period=3", "rank 1  period=2"]),
    "warmup": ((3, 1), (3, 4), ["rank 0  warmup_steps=1", "rank 1  warmup_steps=4"]),
    "levels": (({2: 1, 4: 2}, 0), ({4: 2}, 0), ["={2: 1, 4: 2}", "={4: 2}"]),
    "periods of levels": (({2: 1, 4: 2}, 0), ({3: 1, 4: 2}, 0), ["={2: 1,", "={3: 1,"]),
    "warmup of levels": (({2: 1, 4: 2}, 0), ({2: 1, 4: 2}, 4), ["warmup_steps=4"]),
}


def _in_other_steps(group: Group, case: str) -> tuple[str, list[float]]:
    arguments = OTHERS[case][group.rank % 2]
    kind = PeriodicModelAverager if isinstance(arguments[0], int) else HierarchicalModelAverager
    param = nn.Parameter(torch.full((2,), float(group.rank)))
    try:
        averager = kind(*arguments, group)
        for _ in range(8):
            averager.average_parameters([param])
    except MismatchError as error:
        return str(error), param.tolist()
    return "", param.tolist()


@pytest.mark.parametrize("case", OTHERS)
def test_models_of_different_steps_are_not_averaged(world, case):
    for rank, (text, values) in enumerate(world(2, _in_other_steps, case)):
        assert "arguments differ between ranks" in text
        assert all(word in text for word in OTHERS[case][2])
        assert values == [rank] * 2


def _of_another_type(group: Group) -> float:
    whole = np.int64 if group.rank else int
    param = nn.Parameter(torch.full((2,), float(group.rank)))
    PeriodicModelAverager(whole(2), whole(0), group).average_parameters([param])
    HierarchicalModelAverager({whole(2): whole(2)}, whole(0), group)
    return param[0].item()


def test_whole_numbers_of_other_types_are_the_same_numbers(world):
    assert world(2, _of_another_type) == [0.5, 0.5]


def _averaged_in_every_step(group: Group) -> None:
    with pytest.warns(UserWarning, match="averaged in every step"):
        PeriodicModelAverager(1, 0, group)


def test_averaging_in_every_step_is_said_to_be_a_waste(world):
    world(1, _averaged_in_every_step)


def _post_local(group: Group, start: int, steps: int, pause: int = -1) -> list[torch.Tensor]:
    """Wrapped anew after `pause` steps."""
    model = Model()

    def make() -> tuple[DistributedDataParallel, PostLocalSGDOptimizer]:
        wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
        wrapped.register_comm_hook(None, PostLocalSGDHook(start))
        averager = PeriodicModelAverager(3, start, group)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return wrapped, PostLocalSGDOptimizer(inner, averager)

    wrapped, optimizer = make()
    for step in range(steps):
        if step == pause:
            state = copy.deepcopy(
                [model.state_dict(), wrapped.hook_state(), optimizer.state_dict()]
            )
            wrapped, optimizer = make()
            model.load_state_dict(state[0])
            wrapped.load_hook_state(state[1])
            optimizer.load_state_dict(state[2])
        optimizer.zero_grad()
        wrapped(_batch(group.rank, step)).backward()
        optimizer.step()
    return _values(model)


def _post_local_in_one_process(size: int, start: int, steps: int) -> list[list[torch.Tensor]]:
    models = [Model() for _ in range(size)]
    params = [[p for p in model.parameters() if p.requires_grad] for model in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(_batch(rank, step)).backward()
        if step < start:
            for column in zip(*params, strict=True):
                if column[0].grad is not None:
                    average = sum(p.grad for p in column) / size
                    for p in column:
                        p.grad = average.clone()
        with torch.no_grad():
            for p in [p for row in params for p in row if p.grad is not None]:
                p.sub_(0.1 * p.grad)
            if step >= start and (step - start) % 3 == 0:
                for column in zip(*params, strict=True):
                    average = sum(p.clone() for p in column) / size
                    for p in column:
                        p.copy_(average)
    return [_values(model) for model in models]


@pytest.mark.parametrize(("start", "steps"), [(2, 5), (2, 6), (0, 3), (4, 4)])
def test_post_local_sgd_averages_gradients_and_then_models(world, start, steps):
    told = world(3, _post_local, start, steps)
    expected = _post_local_in_one_process(3, start, steps)
    torch.testing.assert_close(told, expected, rtol=1e-5, atol=1e-6)
    averaged_last = steps <= start or (steps - 1 - start) % 3 == 0
    assert torch.equal(told[0][0], told[1][0]) == averaged_last


@pytest.mark.parametrize("pause", [1, 4])
def test_post_local_sgd_goes_on_from_its_state_as_if_nothing_had_been(world, pause):
    told = zip(world(2, _post_local, 2, 6, pause), world(2, _post_local, 2, 6), strict=True)
    for found, expected in told:
        assert all(map(torch.equal, found, expected))


def _of_a_few(group: Group) -> torch.Tensor:
    part = group.split(group.rank // 2)
    model = Model()
    wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    wrapped.register_comm_hook(None, PostLocalSGDHook(0, part))
    wrapped(_batch(group.rank, 0)).backward()
    return model.first.grad.clone()


def test_post_local_sgd_may_go_on_with_the_gradients_of_a_few(world):
    told = world(4, _of_a_few)
    assert torch.equal(told[0], told[1])
    assert torch.equal(told[2], told[3])
    assert not torch.equal(told[0], told[2])


def _step_of_state(group: Group) -> tuple[int, int, list[float]]:
    param = nn.Parameter(torch.ones(2))
    averager = PeriodicModelAverager(5, 0, group)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([param], lr=0.1), averager)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        param.sum().backward()
        optimizer.step()
        scheduler.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    step = averager.step
    del state["step"]
    with pytest.warns(UserWarning, match="lacks the key 'step', so averaging starts again"):
        optimizer.load_state_dict(state)
    return step, averager.step, [group["lr"] for group in optimizer.param_groups]


def test_the_step_of_the_averager_is_in_the_state_of_its_optimizer(world):
    assert world(1, _step_of_state) == [(3, 0, [0.0125])]


def _scaled(group: Group, make: Any) -> list[list[float]]:
    param = nn.Parameter(torch.zeros(2))
    optimizer = make(torch.optim.SGD([param], lr=0.5, fused=True), group)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for factor in (2.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((param * (factor if group.rank else 2.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(param.tolist())
    return found


def _scaled_post_local(inner: torch.optim.Optimizer, group: Group) -> Any:
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(2, 1, group))


def _scaled_diloco(inner: torch.optim.Optimizer, group: Group) -> Any:
    return DiLoCo(inner, period=2, lr=1.0, momentum=0.0, process_group=group)


@pytest.mark.parametrize("make", [_scaled_post_local, _scaled_diloco])
def test_a_scaler_reaches_the_fused_optimizer_inside_and_all_count_the_steps_that_it_leaves_out(
    world, make
):
    # the second step of rank 1 overflows: the mean of -2 and -1
    assert world(2, _scaled, make) == [[[-1.0, -1.0], [-1.5, -1.5]]] * 2


def _copied(group: Group, copy_of: Any) -> str:
    averager = PeriodicModelAverager(2, 0, group)
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    return said_by(lambda: copy_of(PostLocalSGDOptimizer(inner, averager)), ConfigError)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickle.dumps])
def test_an_optimizer_of_many_ranks_is_not_copied_in_silence(world, copy_of):
    assert "make another PostLocalSGDOptimizer" in world(1, _copied, copy_of)[0]


# DiLoCo.


def _grown(group: Group, how: str) -> str:
    params = [nn.Parameter(torch.ones(n), requires_grad=n != 3) for n in (2, 3)]
    optimizer = DiLoCo(torch.optim.SGD(params, lr=0.1), process_group=group)
    optimizer.step()
    params[0].requires_grad_(False)
    optimizer.step()  # nothing is lost by that
    if how == "unfrozen":
        params[1].requires_grad_(True)
    else:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return said_by(optimizer.step, ConfigError)


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_diloco_refuses_parameters_that_it_would_never_average(world, how):
    assert "of shapes (3,) were unfrozen or added" in world(1, _grown, how)[0]


def _diloco(group: Group, pause: int, steps: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """Wrapped anew after `pause` steps."""
    model = Model()
    if group.rank:
        with torch.no_grad():
            model.first.add_(1.0)  # rank 0's are copied to all

    def make() -> DiLoCo:
        inner = torch.optim.AdamW(model.parameters(), lr=0.05)
        return DiLoCo(inner, period=3, process_group=group, **options)

    optimizer = make()
    for step in range(steps):
        if step == pause:
            values, state = _values(model), copy.deepcopy(optimizer.state_dict())
            optimizer = make()
            optimizer.load_state_dict(state)
            with torch.no_grad():
                for param, value in zip(model.parameters(), values, strict=True):
                    param.copy_(value)
        optimizer.zero_grad()
        model(_batch(group.rank, step)).backward()
        optimizer.step()
    return _values(model)


def _diloco_in_one_process(
    size: int, steps: int, lr: float, momentum: float, nesterov: bool
) -> Any:
    models = [Model() for _ in range(size)]
    inner = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
    outer_model = Model()
    outer = torch.optim.SGD(outer_model.parameters(), lr=lr, momentum=momentum, nesterov=nesterov)
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(_batch(rank, step)).backward()
            inner[rank].step()
        if step % 3 == 2:
            columns = zip(*(model.parameters() for model in models), strict=True)
            for start, column in zip(outer_model.parameters(), columns, strict=True):
                if start.requires_grad:
                    start.grad = sum(start.detach() - p.detach() for p in column) / size
            outer.step()
            for model in models:
                model.load_state_dict(outer_model.state_dict())
    return [_values(model) for model in models]


@pytest.mark.parametrize(
    ("lr", "momentum", "nesterov"),
    [(0.7, 0.9, True), (0.7, 0.9, False), (1.0, 0.0, False)],
    ids=["nesterov", "heavy ball", "local"],
)
@pytest.mark.parametrize("steps", [6, 8])
def test_diloco_is_its_algorithm_in_one_process(world, lr, momentum, nesterov, steps):
    told = world(3, _diloco, -1, steps, {"lr": lr, "momentum": momentum, "nesterov": nesterov})
    expected = _diloco_in_one_process(3, steps, lr, momentum, nesterov)
    torch.testing.assert_close(told, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(told[0][0], told[1][0]) == (steps == 6)


@pytest.mark.parametrize("pause", [3, 4])
def test_diloco_goes_on_from_its_state_as_if_nothing_had_been(world, pause):
    for found, expected in zip(
        world(2, _diloco, pause, 7, {}), world(2, _diloco, -1, 7, {}), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.procs
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_diloco_sends_ways_in_few_bytes_and_keeps_what_they_miss(hosts, wire):
    exact = hosts(3, _diloco, -1, 12, {"lr": 0.7})
    for pause in (-1, 7):
        rough = hosts(3, _diloco, pause, 12, {"lr": 0.7, "wire": wire})
        assert all(torch.equal(found[0], rough[0][0]) for found in rough)
        assert not torch.equal(rough[0][0], exact[0][0])
        torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.02)


def _owing(group: Group) -> list[list[float]]:
    param = nn.Parameter(torch.zeros(2))
    found = []

    def make() -> DiLoCo:
        inner = torch.optim.SGD([param], lr=0.0)
        return DiLoCo(inner, period=1, lr=1.0, momentum=0.0, process_group=group)

    state = make().state_dict()
    state["diloco"]["residual"] = [torch.tensor([1.0, 2.0 * group.rank])]
    optimizer = make()
    optimizer.load_state_dict(state)
    assert torch.equal(
        optimizer.state_dict()["diloco"]["residual"][0], state["diloco"]["residual"][0]
    )
    param.grad = torch.zeros(2)
    for _ in range(2):
        optimizer.step()
        found.append(param.tolist())
    return found


def test_diloco_sends_what_its_state_owes_once(world):
    assert world(2, _owing) == [[[-1.0, -1.0], [-1.0, -1.0]]] * 2


def _state_of_inner(group: Group) -> str:
    optimizer = DiLoCo(torch.optim.SGD(Model().parameters()), process_group=group)
    return said_by(lambda: optimizer.load_state_dict(optimizer.optim.state_dict()), ConfigError)


def test_diloco_refuses_the_state_of_something_else(world):
    assert "belongs to an inner optimizer only" in world(1, _state_of_inner)[0]

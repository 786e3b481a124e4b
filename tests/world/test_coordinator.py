"""A cluster of a parameter server strategy, its tasks on threads of this process."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid import rpc
from braid.checkpoint import open_last
from braid.errors import CommTimeout, ConfigError
from braid.ps import BSP, Consistency, Options
from braid.strategies import get_strategy
from braid.strategies.coordinator import ClosureCancelledError, ClusterCoordinator
from braid.strategies.parameter_server import (
    FixedShardsPartitioner,
    ParameterServerStrategy,
    SyncReplicas,
)

PORTS = itertools.count(1)
SEEDED = threading.Lock()  # torch has one generator for all threads
LOCAL = threading.local()  # the strategy, model and optimizer of a task's thread
RELEASE = threading.Event()
WAITS = threading.Event()  # a closure waits for RELEASE


class Task:
    """A resolver that names one task of a cluster of this process."""

    def __init__(self, jobs: dict[str, list[str]], task_type: str, task_id: int) -> None:
        self._jobs, self.task_type, self.task_id = jobs, task_type, task_id

    def cluster_spec(self) -> dict[str, list[str]]:
        return self._jobs


def net() -> nn.Module:
    with SEEDED, torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def sgd(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def make(
    task: Task,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    build: Callable[[], tuple[nn.Module, Any]] | None = None,
    **settings: Any,
) -> ParameterServerStrategy:
    strategy = ParameterServerStrategy(task, **settings)
    with strategy.scope():
        if build is not None:
            LOCAL.model, LOCAL.optimizer = build()
        else:
            LOCAL.model = net()
            LOCAL.optimizer = optimizer(LOCAL.model.parameters())
    LOCAL.strategy = strategy
    return strategy


class Cluster:
    """Tasks on threads."""

    def __init__(self, servers: int, workers: int, *, chief: bool = True, **settings: Any) -> None:
        host = f"localhost:{{}}{os.getpid() % 1000}"
        base = next(PORTS) * 100
        count = itertools.count(base)
        self.jobs = {
            **({"chief": [host.format(next(count))]} if chief else {}),
            "ps": [host.format(next(count)) for _ in range(servers)],
            "worker": [host.format(next(count)) for _ in range(workers)],
        }
        self.settings = settings
        self.errors: list[BaseException] = []
        self.threads = [self.start("ps", k, self.serve) for k in range(servers)]

    def start(self, kind: str, index: int, run: Callable[[Task], object]) -> threading.Thread:
        def target() -> None:
            try:
                run(Task(self.jobs, kind, index))
            except BaseException as exc:  # noqa: BLE001 - shown by the test
                self.errors.append(exc)

        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        return thread

    def serve(self, task: Task) -> None:
        strategy = make(task, **self.settings)
        try:
            strategy.serve()
        finally:
            strategy.node.postoffice.close(0.0)

    def end(self) -> None:
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        assert not self.errors, self.errors


@pytest.fixture
def coordinated() -> Iterator[Callable[..., ClusterCoordinator]]:
    """A function that starts a cluster and returns its coordinator."""
    opened: list[tuple[Cluster, ClusterCoordinator]] = []

    def begin(servers: int = 1, workers: int = 2, **settings: Any) -> ClusterCoordinator:
        cluster = Cluster(servers, workers, **settings)
        cluster.threads += [cluster.start("worker", k, cluster.serve) for k in range(workers)]
        coordinator = ClusterCoordinator(make(Task(cluster.jobs, "chief", 0), **settings))
        opened.append((cluster, coordinator))
        return coordinator

    yield begin
    for cluster, coordinator in opened:
        coordinator.close()
        cluster.end()


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(number))
    return x, x.sum(1, keepdim=True)


def train(x: torch.Tensor, y: torch.Tensor) -> float:
    LOCAL.optimizer.zero_grad()
    loss = functional.mse_loss(LOCAL.model(x), y)
    loss.backward()
    LOCAL.optimizer.step()
    return loss.item()


def alone(
    steps: int, workers: int = 1, make_optimizer: Callable[..., Any] = sgd
) -> list[torch.Tensor]:
    """Return the parameters after steps, each with the mean of the workers' gradients."""
    model = net()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        grads = []
        for worker in range(workers):
            model.zero_grad()
            x, y = batch(step * workers + worker)
            functional.mse_loss(model(x), y).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        for param, *parts in zip(model.parameters(), *grads, strict=True):
            param.grad = sum(parts[1:], parts[0]) * (1 / workers)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@rpc.register
def train_on(number: int) -> float:
    return train(*batch(number))


@rpc.register
def added(a: Any, b: Any = 0) -> Any:
    return a + b


@rpc.register
def fails(text: str) -> None:
    raise ValueError(text)


@rpc.register
def waits_for_release() -> None:
    WAITS.set()
    RELEASE.wait(30)


@rpc.register
def sleeps(seconds: float) -> str:
    time.sleep(seconds)
    return threading.current_thread().name


@rpc.register
def numbers() -> range:
    return range(100)


@rpc.register
def next_of(iterator: Iterator[int], other: int) -> int:
    return next(iterator) + other


@rpc.register
def a_lock() -> object:
    return threading.Lock()


@pytest.mark.parametrize("optimizer", [sgd, lambda p: torch.optim.AdamW(p, lr=0.01)])
def test_one_worker_trains_as_one_process(coordinated, optimizer):
    coordinator = coordinated(
        servers=2, workers=1, optimizer=optimizer, variable_partitioner=FixedShardsPartitioner(3)
    )
    losses = [coordinator.schedule(train_on, (step,)) for step in range(6)]
    coordinator.join()
    assert coordinator.fetch(losses)[-1] < coordinator.fetch(losses[0])
    coordinator.pull()
    for param, expected in zip(LOCAL.model.parameters(), alone(6, 1, optimizer), strict=True):
        assert torch.equal(param, expected)


def test_a_synchronous_strategy_trains_as_one_process_with_the_batches_of_all(coordinated):
    coordinator = coordinated(servers=2, workers=2, consistency=BSP)
    for number in range(8):
        coordinator.schedule(train_on, (number,))
    coordinator.join()
    coordinator.pull()
    for param, expected in zip(LOCAL.model.parameters(), alone(4, 2), strict=True):
        assert torch.allclose(param, expected, atol=1e-6)
    coordinator.schedule(train_on, (0,))
    with pytest.raises(
        ConfigError, match=r"the last 1 closures that call step.* do not complete a step of 2"
    ):
        coordinator.join()
    coordinator.schedule(train_on, (1,))
    coordinator.join()


def test_results_data_sets_and_results_as_arguments(coordinated):
    coordinator = coordinated()
    first = coordinator.schedule(added, (torch.ones(2),), {"b": 1})
    second = coordinator.schedule(added, (first, 1))
    assert coordinator.fetch({"x": [second]})["x"][0].tolist() == [3, 3]
    iterator = coordinator.create_per_worker_dataset(numbers)
    values = [coordinator.schedule(next_of, (iterator, 1000)) for _ in range(20)]
    coordinator.join()
    seen = sorted(coordinator.fetch(values))
    assert len(seen) == 20
    assert seen[0] == 1000
    assert max(seen.count(value) for value in seen) <= 2, "each worker has its own"
    assert coordinator.done()


def test_short_closures_and_their_results_share_messages(coordinated):
    coordinator = coordinated(workers=1)
    values = [coordinator.schedule(added, (torch.tensor(number), 1)) for number in range(600)]
    coordinator.join()
    assert coordinator.fetch(values) == list(range(1, 601))
    van = coordinator.strategy.node.postoffice.van
    assert van.statistics("worker:0").received < 300
    assert van.statistics("worker:0").sent < 300


def test_a_result_does_not_wait_for_a_long_closure_behind_it(coordinated):
    coordinator = coordinated(workers=1)
    RELEASE.clear()
    for _ in range(200):
        coordinator.schedule(added, (1, 1))
    value = coordinator.schedule(added, (1, 2))
    coordinator.schedule(waits_for_release)
    assert value.fetch(timeout_s=20) == 3
    RELEASE.set()
    coordinator.join()


def test_an_argument_may_change_after_schedule(coordinated):
    coordinator = coordinated(workers=1)
    coordinator.schedule(sleeps, (0.05,))
    x = torch.ones(3)
    value = coordinator.schedule(added, (x,))
    x.zero_()
    assert value.fetch().tolist() == [1, 1, 1]


def test_an_error_shows_once_and_the_queue_works_again(coordinated):
    coordinator = coordinated(workers=1)
    bad = coordinator.schedule(fails, ("no such word",))
    late = [coordinator.schedule(sleeps, (0.0,)) for _ in range(3)]
    with pytest.raises(ValueError, match=r"(?s)On worker:0:.*no such word"):
        coordinator.join()
    with pytest.raises(ValueError, match="no such word"):
        bad.fetch()
    for value in late:
        with pytest.raises(ClosureCancelledError, match="another closure failed"):
            value.fetch()
    coordinator.join()
    assert coordinator.schedule(added, (1, 1)).fetch() == 2


def test_what_cannot_travel_is_refused(coordinated):
    coordinator = coordinated(workers=1)
    with pytest.raises(ConfigError, match="cannot be called by name: define it with `def`"):
        coordinator.schedule(lambda: None)
    with pytest.raises(ConfigError, match=r"closure added.*lock, which cannot be sent"):
        coordinator.schedule(added, (threading.Lock(),))
    coordinator.schedule(a_lock)
    with pytest.raises(ConfigError, match=r"the result of a_lock is a _thread.lock"):
        coordinator.join()
    coordinator.create_per_worker_resource(a_lock)
    coordinator.join()
    with pytest.raises(ConfigError, match="already has a coordinator"):
        ClusterCoordinator(coordinator.strategy)


def test_a_data_set_that_fails_is_an_error(coordinated):
    coordinator = coordinated(workers=1)
    broken = coordinator.create_per_worker_resource(fails, ("no file",))
    coordinator.schedule(next_of, (broken, 1))
    with pytest.raises(ValueError, match="no file"):
        coordinator.join()
    coordinator.schedule(next_of, (broken, 1))
    with pytest.raises(ConfigError, match="worker:0 lacks a data set or resource of this closure"):
        coordinator.join()


@pytest.mark.parametrize("optimizer", [sgd, lambda p: torch.optim.AdamW(p, lr=0.01)])
def test_a_snapshot_goes_on_with_other_servers_and_shards(coordinated, tmp_path, optimizer):
    first = coordinated(
        servers=2, workers=1, optimizer=optimizer, variable_partitioner=FixedShardsPartitioner(3)
    )
    for step in range(3):
        first.schedule(train_on, (step,))
    first.save(tmp_path, 3, state={"why": "test"})
    second = coordinated(
        servers=1, workers=1, optimizer=optimizer, options=Options(restore=tmp_path)
    )
    for step in range(3, 6):
        second.schedule(train_on, (step,))
    second.join()
    second.pull()
    for param, expected in zip(LOCAL.model.parameters(), alone(6, 1, optimizer), strict=True):
        assert torch.equal(param, expected)
    checkpoint = open_last(tmp_path)
    assert checkpoint.read("model/0.weight").shape == (4, 5)


class Words(nn.Module):
    """Rows of an embedding, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.words(ids)))


def words_step(number: int, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    ids = torch.randint(30, (7,), generator=torch.Generator().manual_seed(number))
    for optimizer in optimizers:
        optimizer.zero_grad()
    functional.mse_loss(model(ids)[:, 0], ids / 30).backward()
    for optimizer in optimizers:
        optimizer.step()


def make_words() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    with SEEDED, torch.random.fork_rng():
        torch.manual_seed(0)
        model = Words()
    rows = torch.optim.Adagrad(model.words.parameters(), lr=0.1)
    return model, [rows, torch.optim.AdamW(model.head.parameters(), lr=0.01)]


@rpc.register
def train_words(number: int) -> int:
    words_step(number, LOCAL.model, *LOCAL.optimizer)
    return LOCAL.model.words.weight.grad.coalesce().indices().numel()


def test_a_sparse_embedding_leaves_its_rows_on_servers(coordinated, tmp_path):
    first = coordinated(servers=2, workers=1, build=make_words)
    for number in range(3):
        first.schedule(train_words, (number,))
    first.save(tmp_path, 3)
    second = coordinated(servers=1, workers=1, build=make_words, options=Options(restore=tmp_path))
    for number in range(3, 6):
        second.schedule(train_words, (number,))
    second.join()
    second.pull()
    model, optimizers = make_words()
    for number in range(6):
        words_step(number, model, *optimizers)
    for param, expected in zip(LOCAL.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(param, expected, atol=1e-6)
    saved = open_last(tmp_path).read("model/words.weight")
    assert saved.shape == (40, 4)
    assert torch.equal(saved[35], model.words.weight[35]), "never used"


def make_counters() -> tuple[nn.Module, Any]:
    strategy = get_strategy()
    assert isinstance(strategy, ParameterServerStrategy)
    LOCAL.seen = strategy.variable("seen", torch.zeros(13, 2))
    LOCAL.total = strategy.variable("total", torch.tensor(0, dtype=torch.int64))
    model = net()
    return model, sgd(model.parameters())


@rpc.register
def count_rows(ids: list[int]) -> torch.Tensor:
    LOCAL.total.assign_add(len(ids))
    LOCAL.seen.scatter_add(torch.tensor(ids), 1.0)
    LOCAL.seen.scatter_max(torch.tensor([12]), torch.tensor([[7.0, -1.0]]))
    return LOCAL.seen.sparse_read(torch.tensor([[0, 12], [5, 5]]))


@rpc.register
def read_all() -> list[torch.Tensor]:
    return [LOCAL.seen.read(), LOCAL.total.read()]


@rpc.register
def adds_half() -> None:
    LOCAL.total.assign_add(0.5)


@rpc.register
def no_such_row(ids: list[int]) -> None:
    LOCAL.seen.scatter_sub(torch.tensor(ids), 1.0)


def test_variables_are_read_and_changed_by_rows(coordinated, tmp_path):
    first = coordinated(
        servers=2, build=make_counters, variable_partitioner=FixedShardsPartitioner(5)
    )
    rows = first.schedule(count_rows, ([0, 5, 5, 9],)).fetch()
    assert rows[..., 0].tolist() == [[1, 7], [2, 2]]
    first.schedule(count_rows, ([0],))
    first.save(tmp_path, 1)
    with pytest.raises(ConfigError, match="'seen' has 13 rows, so the id 13 does not exist"):
        first.schedule(no_such_row, ([3, 13],)).fetch()
    with pytest.raises(ConfigError, match="the id 13 does not exist"):
        first.join()
    with pytest.raises(ConfigError, match=r"'total' is torch\.int64, got values of torch\.float32"):
        first.schedule(adds_half).fetch()
    with pytest.raises(ConfigError, match="got values"):
        first.join()
    second = coordinated(servers=1, build=make_counters, options=Options(restore=tmp_path))
    seen, total = second.schedule(read_all).fetch()
    assert total.item() == 5
    assert seen[:, 1].tolist() == [2, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0]


def with_batch_norm() -> tuple[nn.Module, Any]:
    with SEEDED, torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, sgd(model.parameters())


def test_statistics_of_batch_norm_are_saved_and_pulled(coordinated, tmp_path):
    coordinator = coordinated(workers=1, build=with_batch_norm)
    for number in range(3):
        coordinator.schedule(train_on, (number,))
    coordinator.save(tmp_path, 3)
    coordinator.pull()
    model, optimizer = with_batch_norm()
    for number in range(3):
        x, y = batch(number)
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert torch.equal(LOCAL.model[1].running_mean, model[1].running_mean)
    assert torch.equal(open_last(tmp_path).read("model/1.running_var"), model[1].running_var)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(LOCAL.model)))
    assert torch.equal(copied[0].weight, LOCAL.model[0].weight)


@rpc.register
def trains_another_model() -> None:
    model = net()
    model(torch.ones(1, 5)).sum().backward()


TEACHER = net().requires_grad_(False)


@rpc.register
def learns_from_a_teacher() -> float:
    x = torch.ones(1, 5)
    return functional.mse_loss(LOCAL.model(x), TEACHER(x)).item()


def test_a_closure_may_use_a_frozen_model(coordinated):
    assert coordinated(workers=1).schedule(learns_from_a_teacher).fetch() == 0.0


@rpc.register
def loads_weights() -> None:
    LOCAL.model.load_state_dict(LOCAL.model.state_dict())


@rpc.register
def loads_states() -> None:
    LOCAL.optimizer.load_state_dict(LOCAL.optimizer.state_dict())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (trains_another_model, "was not made in this strategy's scope"),
        (loads_weights, r"load_state_dict\(\) after the first step changes only this process"),
        (loads_states, r"load_state_dict\(\) after the first step changes only this process"),
    ],
)
def test_what_servers_would_not_see_is_refused(coordinated, function, message):
    coordinator = coordinated(workers=1)
    coordinator.schedule(train_on, (0,))
    coordinator.schedule(function)
    with pytest.raises(ConfigError, match=message):
        coordinator.join()


@rpc.register
def two_steps(number: int) -> float:
    """Step, read the parameters without a forward of the model, and step again."""
    x, y = batch(number)
    for _ in range(2):
        LOCAL.optimizer.zero_grad()
        hidden = torch.tanh(functional.linear(x, LOCAL.model[0].weight, LOCAL.model[0].bias))
        functional.mse_loss(LOCAL.model[2](hidden), y).backward()
        LOCAL.optimizer.step()
    return LOCAL.model[0].weight.sum().item()


@rpc.register
def clip_and_schedule() -> None:
    def clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nn.utils.clip_grad_value_(LOCAL.model.parameters(), 0.01)

    LOCAL.optimizer.register_step_pre_hook(clip)
    LOCAL.scheduler = torch.optim.lr_scheduler.ExponentialLR(LOCAL.optimizer, 0.5)


@rpc.register
def train_and_schedule(number: int) -> None:
    train(*batch(number))
    LOCAL.scheduler.step()


def test_steps_in_one_closure_hooks_and_schedulers_are_those_of_torch(coordinated):
    coordinator = coordinated(workers=1)
    total = coordinator.schedule(two_steps, (0,)).fetch()
    coordinator.schedule(clip_and_schedule)
    for number in range(2):
        coordinator.schedule(train_and_schedule, (number,))
    coordinator.join()
    coordinator.pull()
    pulled = [param.detach() for param in LOCAL.model.parameters()]
    LOCAL.model = net()  # and now in one process
    LOCAL.optimizer = sgd(LOCAL.model.parameters())
    assert two_steps(0) == total
    clip_and_schedule()
    for number in range(2):
        train_and_schedule(number)
    for param, expected in zip(pulled, LOCAL.model.parameters(), strict=True):
        assert torch.equal(param, expected)


@rpc.register
def fails_after_its_step(number: int) -> None:
    train_on(number)
    raise ValueError(number)


def test_synchronous_closures_may_fail_or_not_step(coordinated):
    coordinator = coordinated(servers=1, workers=2, consistency=BSP)
    coordinator.schedule(train_on, (0,))
    coordinator.schedule(fails_after_its_step, (1,))
    with pytest.raises(ValueError, match="1"):
        coordinator.join()
    coordinator.join()
    for number in range(2, 6):
        coordinator.schedule(added, (1, 1))
        coordinator.schedule(train_on, (number,))
    coordinator.join(timeout_s=20)
    coordinator.pull()
    for param, expected in zip(LOCAL.model.parameters(), alone(3, 2), strict=True):
        assert torch.allclose(param, expected, atol=1e-6)
    coordinator.schedule(fails, ("before its step",))
    coordinator.schedule(train_on, (6,))
    with pytest.raises(ValueError, match="before"):
        coordinator.join()
    coordinator.schedule(train_on, (7,))
    coordinator.join(timeout_s=20)


def test_a_coordinator_has_no_quorum():
    jobs = {job: [f"localhost:{number}"] for number, job in enumerate(["chief", "ps", "worker"], 1)}
    strategy = make(Task(jobs, "chief", 0), consistency=SyncReplicas(1))
    with pytest.raises(
        ConfigError, match=r"steps of 1 workers \(SyncReplicas\) cannot have a coord"
    ):
        ClusterCoordinator(strategy)
    strategy.close()


def test_done_never_waits_and_a_closed_coordinator_takes_nothing(coordinated):
    coordinator = coordinated(workers=2)
    RELEASE.clear()
    WAITS.clear()
    coordinator.schedule(waits_for_release)
    assert WAITS.wait(60), "an error cancels closures that have not begun"
    coordinator.schedule(fails, ("now",))
    until = time.monotonic() + 60
    while coordinator._queue.failed is None:
        assert time.monotonic() < until
        assert not coordinator.done()
    assert not coordinator.done(), "the other closure runs"
    RELEASE.set()
    with pytest.raises(ValueError, match="now"):
        coordinator.join()
    with pytest.raises(ConfigError, match="needs a function and a tuple of arguments, got 3"):
        coordinator.schedule(3)
    coordinator.close()
    with pytest.raises(ConfigError, match="the coordinator is closed"):
        coordinator.schedule(added, (1, 1))


def test_variables_lie_on_servers_in_turn(coordinated):
    coordinator = coordinated(servers=2, workers=1, variable_partitioner=FixedShardsPartitioner(3))
    coordinator.pull()
    servers = coordinator.strategy.variables.servers_of
    assert servers("0.weight") == [0, 1, 0]
    assert servers("0.bias") == [1, 0, 1]
    assert servers("2.weight") == [0], "one row"
    assert servers("2.bias") == [1]


def test_a_closure_that_never_returns_is_named(coordinated):
    coordinator = coordinated(workers=1)
    coordinator.schedule(sleeps, (0.6,))
    with pytest.raises(CommTimeout, match="all closures: worker:0 runs sleeps"):
        coordinator.join(timeout_s=0.2)
    coordinator.join()


DIED: list[int] = []  # numbers of closures that ended their worker


@rpc.register
def dies_after_its_push(number: int) -> None:
    train(*batch(number))
    LOCAL.strategy.variables.wait()
    if number not in DIED:
        DIED.append(number)
        LOCAL.strategy.node.postoffice.van.close(0.0)  # as if it were killed
        raise SystemExit


@pytest.mark.parametrize("optimizer", [sgd, lambda p: torch.optim.AdamW(p, lr=0.01)])
def test_a_closure_that_ran_on_a_lost_worker_is_added_once(optimizer):
    DIED.clear()
    cluster = Cluster(2, 3, optimizer=optimizer)
    workers = [cluster.start("worker", k, cluster.serve) for k in range(3)]
    coordinator = ClusterCoordinator(make(Task(cluster.jobs, "chief", 0), optimizer))
    for number in range(6):
        function = dies_after_its_push if number in {2, 4} else train_on
        coordinator.schedule(function, (number,)).fetch(timeout_s=20)
    coordinator.pull()
    for param, expected in zip(LOCAL.model.parameters(), alone(6, 1, optimizer), strict=True):
        assert torch.equal(param, expected)
    coordinator.close()
    for thread in workers:
        thread.join(30)
    assert [type(error) for error in cluster.errors] == [SystemExit] * 2
    cluster.errors.clear()
    cluster.end()
    assert sorted(DIED) == [2, 4]


def looped(
    task: Task, results: dict[int, Any], steps: int, pause_s: float, **settings: Any
) -> None:
    """Run the loop of a worker without a coordinator."""
    strategy = make(task, **settings)
    for step in range(steps):
        strategy.run(train, batch(2 * step + task.task_id))
        time.sleep(pause_s * task.task_id)
    strategy.pull()
    results[task.task_id] = [p.detach().clone() for p in LOCAL.model.parameters()]
    strategy.close()


@pytest.mark.parametrize("consistency", [None, BSP])
def test_workers_without_a_coordinator_run_their_loops(consistency):
    settings = {"consistency": consistency}
    cluster = Cluster(2, 2, chief=False, **settings)
    results: dict[int, Any] = {}
    cluster.threads += [
        cluster.start("worker", k, lambda task: looped(task, results, 4, 0.0, **settings))
        for k in range(2)
    ]
    cluster.end()
    if consistency is not None:
        for worker in range(2):
            for param, expected in zip(results[worker], alone(4, 2), strict=True):
                assert torch.allclose(param, expected, atol=1e-6)


def test_a_worker_that_is_started_again_goes_on_at_its_step():
    cluster = Cluster(1, 1, chief=False)
    model, results = net(), list[int]()

    def stopped(task: Task) -> None:
        strategy = make(task)
        for step in range(3):
            strategy.run(train, batch(step))
        strategy.pull()
        strategy.node.postoffice.van.close(0.0)  # as if it were killed

    def again(task: Task) -> None:
        strategy = make(task)
        results.append(strategy.resume())
        for step in range(results[0], 6):
            strategy.run(train, batch(step))
        strategy.pull()
        model.load_state_dict(LOCAL.model.state_dict())
        strategy.close()

    cluster.start("worker", 0, stopped).join(30)
    cluster.threads.append(cluster.start("worker", 0, again))
    cluster.end()
    assert results == [3]
    for param, expected in zip(model.parameters(), alone(6), strict=True):
        assert torch.equal(param, expected)


def test_a_backup_worker_that_is_late_goes_on_at_the_current_step():
    settings = {"consistency": SyncReplicas(1)}
    cluster = Cluster(1, 2, chief=False, **settings)
    results: dict[int, Any] = {}
    begun = time.monotonic()
    cluster.threads += [
        cluster.start("worker", 0, lambda task: looped(task, results, 30, 0.0, **settings)),
        cluster.start("worker", 1, lambda task: looped(task, results, 3, 0.1, **settings)),
    ]
    cluster.end()
    assert time.monotonic() - begun < 20
    assert len(results) == 2


def make_unseeded() -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 2)
    return model, sgd(model.parameters())


@pytest.mark.parametrize("connects", ["late", "early"])
def test_a_worker_ends_at_once_with_the_error_of_servers_without_a_seed(connects):
    cluster = Cluster(2, 1, build=make_unseeded)
    is_made, has_failed = threading.Event(), threading.Event()

    def works(task: Task) -> None:
        if connects == "late":
            is_made.set()
            has_failed.wait(30)
        strategy = make(task, build=make_unseeded)
        is_made.set()
        has_failed.wait(30)
        try:
            strategy.serve()
        finally:
            strategy.node.postoffice.close(0.0)

    worker = cluster.start("worker", 0, works)
    chief = make(Task(cluster.jobs, "chief", 0), build=make_unseeded)
    assert is_made.wait(30)
    coordinator = ClusterCoordinator(chief)
    for thread in cluster.threads:
        thread.join(30)
    if connects == "early":
        coordinator.close()
    begun = time.monotonic()
    has_failed.set()
    worker.join(30)
    assert not worker.is_alive()
    assert time.monotonic() - begun < 8, "not the deadline to reach the scheduler"
    coordinator.close()
    assert len(cluster.errors) == 3
    for error in cluster.errors:
        assert "set the same seed on all nodes" in str(error)


def test_a_cluster_without_servers_is_refused():
    with pytest.raises(ConfigError, match="the cluster has no ps task"):
        ParameterServerStrategy(Task({"worker": ["localhost:1"]}, "worker", 0))


def test_consistencies_of_tensorflow():
    assert SyncReplicas(3) == Consistency(quorum=3, late="drop")

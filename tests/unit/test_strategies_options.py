"""Options of strategies by TensorFlow's names, resolvers, and rules of nesting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from braid.comm import Group
from braid.errors import ConfigError
from braid.runtime.rendezvous.environment import JobEnvironment
from braid.strategies import (
    CentralStorageStrategy,
    CommunicationOptions,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    KubernetesClusterResolver,
    LaunchedClusterResolver,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    NcclAllReduce,
    OneDeviceStrategy,
    PerReplica,
    RayClusterResolver,
    ReductionToOneDevice,
    SlurmClusterResolver,
    Strategy,
    get_replica_context,
)
from braid.strategies.nccl_average import sum_by_nccl
from braid.strategies.parameter_server import ParameterServerStrategy
from braid.strategies.replicas import ThreadReplicas


@pytest.fixture
def alone() -> Iterator[Group]:
    """Return a group of this thread alone."""
    replicas = ThreadReplicas([torch.device("cpu")])
    yield replicas.run(lambda _, group: group)[0]
    replicas.close()


def model_of(strategy: Strategy) -> tuple[nn.Module, Callable[..., None]]:
    """Return a model made in the strategy's scope, and a step of it."""
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return model, step


def trained(ops: CrossDeviceOps | None) -> tuple[list[torch.Tensor], int]:
    """Return the parameters after two steps, and the number of buckets."""
    strategy = MirroredStrategy(["cpu", "cpu"], cross_device_ops=ops)
    model, step = model_of(strategy)
    args = (PerReplica([torch.ones(1, 2), -torch.ones(1, 2)]),)
    strategy.run(step, args=args)
    strategy.run(step, args=args)
    count = len(strategy._copies.objects[0].optimizers[0]._reducer.buckets)
    params = [param.detach().clone() for param in model.parameters()]
    strategy.close()
    return params, count


@pytest.mark.parametrize(
    ("ops", "num_buckets"),
    [
        (ReductionToOneDevice(), 1),
        (HierarchicalCopyAllReduce(), 1),
        (HierarchicalCopyAllReduce(num_packs=0), 4),
    ],
)
def test_names_of_reductions_change_buckets_and_no_bit(ops, num_buckets):
    expected, _ = trained(None)
    found, count = trained(ops)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert count == num_buckets


def trained_by_nccl(monkeypatch, all_reduce: Callable[..., None]) -> list[torch.Tensor]:
    """Return the parameters after two steps on the CPU, with a stand-in for NCCL."""
    monkeypatch.setattr(NcclAllReduce, "check", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    monkeypatch.setattr(torch.cuda.nccl, "is_available", lambda copies: not copies[0].is_sparse)
    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", all_reduce)
    strategy = MirroredStrategy(["cpu", "cpu"], cross_device_ops=NcclAllReduce())
    model, step = model_of(strategy)
    for _ in range(2):
        strategy.run(step, args=(PerReplica([torch.ones(1, 2), -torch.ones(1, 2)]),))
    params = [param.detach().clone() for param in model.parameters()]
    strategy.close()
    return params


def test_nccl_sums_the_gradients_of_all_replicas_on_their_streams(monkeypatch):
    calls: list[Sequence[str]] = []

    def all_reduce(copies: Sequence[torch.Tensor], *, streams: Sequence[str]) -> None:
        calls.append(streams)
        total = sum(copies[1:], copies[0].clone())
        for copy in copies:
            copy.copy_(total)

    found, (expected, _) = trained_by_nccl(monkeypatch, all_reduce), trained(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert calls == [["cpu", "cpu"]] * 2 * len(expected)


def test_nccl_refuses_gradients_that_it_cannot_sum(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "is_available", lambda _: False)
    grads = ({"w": torch.ones(1)}, "stream"), ({"w": None}, "stream")
    with pytest.raises(ConfigError, match=r"gradient of w in each .* \(they are on cpu, none\)"):
        sum_by_nccl(grads)
    with pytest.raises(ConfigError, match=r"they are on cpu, cpu\)"):
        sum_by_nccl([grads[0], grads[0]])


def test_reductions_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="NcclAllReduce needs a GPU for each replica, got cpu, c"):
        MirroredStrategy(["cpu", "cpu"], cross_device_ops=NcclAllReduce())
    with pytest.raises(ConfigError, match="num_packs must be at least 0, got -1"):
        HierarchicalCopyAllReduce(num_packs=-1)


def test_options_of_communication_are_checked(alone):
    with pytest.raises(ConfigError, match="bytes_per_pack must be at least 0"):
        CommunicationOptions(bytes_per_pack=-1)
    with pytest.raises(ConfigError, match="implementation must be one of AUTO, RING, NCCL"):
        CommunicationOptions(implementation="MPI")
    with pytest.raises(
        ConfigError, match="NCCL does not match cpu, where braid's own engine averages"
    ):
        MultiWorkerMirroredStrategy(
            device="cpu",
            group=alone,
            communication_options=CommunicationOptions(implementation="nccl"),
        )
    options = CommunicationOptions(bytes_per_pack=1 << 20, timeout_seconds=5, implementation="RING")
    MultiWorkerMirroredStrategy(device="cpu", group=alone, communication_options=options)
    assert options.bucket_cap_mb(1 << 30) == 1.0
    assert alone._deadline_s == 5.0


SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
PODS = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.service"}


def test_resolvers_name_the_tasks_of_engines():
    slurm = SlurmClusterResolver(environ=SLURM)
    assert slurm.cluster_spec() == {"worker": ["n1:8888", "n1:8889", "n2:8888"]}
    assert (slurm.task_type, slurm.task_id, slurm.master()) == ("worker", 2, "n1:8888")
    pods = KubernetesClusterResolver(environ=PODS)
    assert pods.cluster_spec() == {"worker": ["job-0.service:8470", "job-1.service:8470"]}
    assert (pods.task_id, pods.master("worker", 1)) == (1, "job-1.service:8470")
    for kind in (LaunchedClusterResolver, RayClusterResolver):
        launched = kind(JobEnvironment(rank=1, world_size=2, master_addr="h", master_port=1))
        assert launched.cluster_spec() == {"worker": ["rank0", "rank1"]}
        assert launched.task_id == 1
        successor = JobEnvironment(rank=5, world_size=2, replaces=1)
        assert kind(successor).task_id == 1
    assert launched.num_accelerators() == {"GPU": torch.cuda.device_count()}
    assert launched.environment == ""
    with pytest.raises(ConfigError, match="0 tasks of ps, so task 0 does not exist"):
        launched.master("ps")


def test_resolvers_refuse_other_engines():
    with pytest.raises(ConfigError, match="no engine has started this process, not srun"):
        SlurmClusterResolver(environ={})
    with pytest.raises(ConfigError, match="srun has started this process, not kubernetes"):
        KubernetesClusterResolver(environ=SLURM)
    with pytest.raises(ConfigError, match="MASTER_ADDR must be the name of pod 0"):
        KubernetesClusterResolver(environ=PODS | {"MASTER_ADDR": "10.0.0.1"})


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        (lambda strategy: strategy.run(print), r"strategy\.run was called inside strategy\.run"),
        (
            lambda strategy: strategy.scope().__enter__(),
            r"strategy\.scope was entered in strategy\.run",
        ),
        (
            lambda _: OneDeviceStrategy(),
            "OneDeviceStrategy was entered inside the scope of Mirrored",
        ),
        (
            lambda _: get_replica_context().merge_call(lambda strategy: strategy.run(print)),
            r"strategy\.run was called inside strategy\.run",
        ),
        (
            lambda _: [
                context.merge_call(lambda _strategy, c: c.values[0].merge_call(print), (context,))
                for context in [get_replica_context()]
            ],
            "merge_call was called inside merge_call",
        ),
    ],
)
def test_what_a_replica_cannot_enclose_is_refused(mirrored, inside, problem):
    with pytest.raises(ConfigError, match=problem):
        mirrored.run(lambda: inside(mirrored))


def test_a_second_strategy_of_the_same_server_ranks_is_refused(monkeypatch):
    node = SimpleNamespace(close=lambda: None)
    module = "braid.strategies.parameter_server.strategy.join_cluster"
    monkeypatch.setattr(module, lambda _, __: (node, None))
    first = ParameterServerStrategy()
    with pytest.raises(ConfigError, match=r"made at test_\w+\.py:\d+ and test_\w+\.py"):
        ParameterServerStrategy()
    first.close()
    ParameterServerStrategy().close()


def test_two_strategies_train_in_turns_and_not_each_others_models(mirrored):
    other = MirroredStrategy(["cpu", "cpu"])
    strategies = (mirrored, other, OneDeviceStrategy())
    made = [model_of(strategy) for strategy in strategies]
    for _ in range(2):
        for strategy, (_, step) in zip(strategies, made, strict=True):
            strategy.run(step, args=(torch.ones(1, 2),))
    weights = [model[0].weight.detach() for model, _ in made]
    assert torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[0], weights[2])
    with pytest.raises(ConfigError, match="not made in this strategy's scope"):
        other.run(lambda: made[0][0](torch.ones(1, 2)))
    other.close()


def replicas_after_steps(
    strategy: Strategy, make: Callable[..., torch.optim.Optimizer]
) -> list[list[torch.Tensor]]:
    """Return each replica's parameters after steps, and the size of its optimizer's state."""
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = make(model.parameters())

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()  # a second step, whose forward uses the values of the first
        model(x).pow(2).mean().backward()
        optimizer.step()
        states = sum(len(optimizer.state[param]) for param in optimizer.state)
        return [*(param.detach().clone() for param in model.parameters()), torch.tensor(states)]

    draws = torch.Generator().manual_seed(1)
    for x in strategy.experimental_distribute_dataset(
        [torch.randn(5, 2, generator=draws) for _ in range(3)]
    ):
        values = strategy.run(step, (x,))
    return [[part.values[index] for part in values] for index in range(3)]


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_central_storage_trains_as_mirrored_models_with_one_optimizers_state(name):
    def make(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(params, lr=0.05)

    central, mirror = CentralStorageStrategy(["cpu"] * 3), MirroredStrategy(["cpu"] * 3)
    replicas, expected = replicas_after_steps(central, make), replicas_after_steps(mirror, make)
    for replica in replicas:
        for param, other in zip(replica[:-1], expected[0][:-1], strict=True):
            assert torch.equal(param, other)
    assert [int(replica[-1]) for replica in replicas[1:]] == [0, 0]
    assert int(replicas[0][-1]) == int(expected[0][-1])
    central.close()
    mirror.close()


def test_central_storage_refuses_what_has_no_one_step():
    with pytest.raises(ConfigError, match="the parameter device meta is not one of the compute"):
        CentralStorageStrategy(["cpu", "cpu"], "meta")
    strategy = CentralStorageStrategy(["cpu", "cpu"])
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(model.parameters())

    def step() -> None:
        optimizer.step(lambda: model(torch.ones(1, 2)).sum())

    with pytest.raises(
        ConfigError, match=r"LBFGS.step\(closure\) is not supported in a CentralStorageStrategy"
    ):
        strategy.run(step)
    strategy.close()

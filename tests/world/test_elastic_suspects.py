"""On a mesh, a rank that computes wrongly or slowly is found among its replicas, and leaves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import elastic_cluster
from braid.elasticity import begin, elastic_mesh, gradient_sums, suspects
from braid.elasticity.mesh import MeshReplica
from braid.errors import ConfigError, MismatchError
from braid.programs.layout import Mesh
from elastic_cluster import HERE, Cluster, points_of_death, train_on_mesh

ALL = pytest.mark.all
WRONG = "has computed other gradients than its peers in step"


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    cluster = Cluster(1, {})
    cluster.run(partial(train_on_mesh, mesh="dp=1"))
    return cluster.results[0]


@pytest.fixture(scope="module")
def undisturbed_tp() -> dict[str, torch.Tensor]:
    cluster = Cluster(2, {})
    cluster.run(partial(train_on_mesh, mesh="tp=2"))
    return cluster.results[0]


def _flipping(rank: int, most: int = 1000, **options):
    """Return a training whose rank has a wrong gradient in step 3, at most so often."""
    count = itertools.count()

    def main(members):
        def flip(run) -> None:
            if members.rank == rank and run.num_steps == 2 and next(count) < most:
                grad = next(r.param.grad for r in run._replica.records if r.param.grad is not None)
                grad.view(-1)[0] += 1.0

        return train_on_mesh(members, after_backward=flip, verify=2, **options)

    return main


def _require_equal(cluster: Cluster, reference: dict[str, torch.Tensor], size: int) -> None:
    assert len(cluster.results) == size
    for rank, state in cluster.results.items():
        for name, tensor in state.items():
            assert torch.equal(tensor, reference[name]), (rank, name)


MESHES = [("pp=2,dp=3", 0), ("dp=3", 3), ("tp=2,dp=3", 0), ("pp=2,dp=3", 1)]
CASES = [(mesh, shard, rank) for mesh, shard in MESHES for rank in range(Mesh.parse(mesh).size)]


@pytest.mark.parametrize(
    ("mesh", "shard", "rank"),
    [pytest.param(*case, marks=ALL if n % 4 else ()) for n, case in enumerate(CASES)],
)
def test_a_rank_with_wrong_gradients_leaves_and_costs_no_bit(
    undisturbed, undisturbed_tp, mesh, shard, rank
):
    size = Mesh.parse(mesh).size
    cluster = Cluster(size, {}, min_ranks=size)
    cluster.run(_flipping(rank, mesh=mesh, shard=shard))
    assert cluster.left == [(rank, f"{WRONG} 3")]
    _require_equal(cluster, undisturbed_tp if "tp" in mesh else undisturbed, size)


def _counting(**options):
    """Return a training whose update counts its calls, which a new rank has not seen."""

    def main(members):
        calls = [0]

        def change(run) -> None:
            calls[0] += 1
            run.optimizer.param_groups[0]["weight_decay"] = 0.1 * calls[0]

        return train_on_mesh(members, in_update=change, **options)

    return main


@pytest.mark.parametrize(
    ("mesh", "shard"),
    [
        *(("dp=3", 0), ("dp=3", 1), ("pp=2,dp=2; dp=3", 0)),
        *(pytest.param(*case, marks=ALL) for case in [("dp=3", 3), ("pp=2,dp=2; dp=3", 1)]),
    ],
)
def test_a_new_rank_with_another_update_leaves_and_costs_no_bit(mesh, shard):
    alone = Cluster(1, {})
    alone.run(_counting(mesh="dp=1"))
    size = 4 if "pp" in mesh else 3
    cluster = Cluster(size, {(1, "forward"): 4}, min_ranks=2, restarts=1)
    cluster.run(_counting(mesh=mesh, shard=shard))
    assert [rank for rank, _ in cluster.deaths] == [1]
    assert [rank for rank, _ in cluster.left] == [size]
    assert "its first update gave other values (settings of the optimizer" in cluster.left[0][1]
    _require_equal(cluster, alone.results[0], size - 1)


def test_without_another_process_the_others_go_on_as_another_mesh(undisturbed):
    cluster = Cluster(6, {}, restarts=0)
    cluster.run(_flipping(4, mesh="pp=2,dp=3; dp=5", shards=5))
    assert cluster.left == [(4, f"{WRONG} 3")]
    assert len(cluster.results) == 5


def test_a_rank_without_which_the_run_would_end_computes_again_and_is_then_named(undisturbed):
    cluster = Cluster(3, {}, restarts=0, min_ranks=3)
    cluster.run(_flipping(1, 2, mesh="dp=3", shard=1))
    assert (cluster.left, len(cluster.begun)) == ([], 1)
    _require_equal(cluster, undisturbed, 3)
    with pytest.raises(MismatchError, match="gradients of rank 1 differ between replicas"):
        Cluster(3, {}, restarts=0, min_ranks=3).run(_flipping(1, mesh="dp=3", shard=1))


@pytest.mark.parametrize("rank", [0, 3, pytest.param(1, marks=ALL), pytest.param(2, marks=ALL)])
@pytest.mark.parametrize(("mesh", "peer"), [("pp=2,dp=2", 1), ("dp=2,tp=2", 2)])
def test_of_two_replicas_both_are_in_doubt(undisturbed, undisturbed_tp, mesh, peer, rank):
    cluster = Cluster(4, {})
    cluster.run(_flipping(rank, 1, mesh=mesh))
    assert (cluster.left, len(cluster.begun)) == ([], 1)
    _require_equal(cluster, undisturbed_tp if "tp" in mesh else undisturbed, 4)
    with pytest.raises(MismatchError) as caught:
        Cluster(4, {}).run(_flipping(rank, mesh=mesh))
    first, second = sorted((rank, rank ^ peer))
    words = f"gradients of ranks {first} and {second} differ between replicas for the same micro-"
    assert words in str(caught.value)


def _defective(kind: str, rank: int) -> Callable[[], tuple]:
    """Return `build` with layers that compute wrongly on one rank."""

    def is_here() -> bool:
        return HERE.members.rank == rank

    def before(_, inputs) -> None:
        (x,) = inputs
        if kind == "gradient of the input" and x.requires_grad and x.is_leaf:  # of a later stage
            x.register_hook(lambda grad: grad * 2 if is_here() else grad)

    def after(_, __, output: torch.Tensor) -> torch.Tensor:
        if kind == "gradient of the output" and output.requires_grad:
            output.register_hook(lambda grad: grad * 2 if is_here() else grad)
        return output + 1.0 if kind == "output" and is_here() else output

    def built() -> tuple:
        model, *others = build()
        for block in model.blocks:
            block.register_forward_pre_hook(before)
            block.register_forward_hook(after)
        return model, *others

    build = elastic_cluster.build
    return built


KINDS = [
    *itertools.product(("output", "gradient of the output"), (2, 3)),
    ("gradient of the input", 3),  # its gradients are right, and stage 0 has wrong ones
]


@pytest.mark.parametrize(("kind", "rank"), KINDS)
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=ALL)])
def test_a_wrong_value_is_traced_to_the_rank_that_has_computed_it(
    monkeypatch, undisturbed, kind, rank, schedule
):
    """Rank 2 has stage 0, and rank 3 has stage 1 of the second replica."""
    monkeypatch.setattr(elastic_cluster, "build", _defective(kind, rank))
    cluster = Cluster(6, {}, min_ranks=6)
    run = partial(train_on_mesh, mesh="dp=3,pp=2", verify=2, schedule=schedule)
    cluster.run(run)
    assert cluster.left == [(rank, f"{WRONG} 1")]
    _require_equal(cluster, undisturbed, 6)


def test_tensor_parallel_ranks_share_wrong_values_and_all_are_in_doubt(monkeypatch):
    monkeypatch.setattr(elastic_cluster, "build", _defective("output", 2))
    with pytest.raises(MismatchError, match="gradients of ranks 2 and 3 differ between replicas"):
        Cluster(6, {}).run(partial(train_on_mesh, mesh="dp=3,tp=2", verify=2))


@pytest.mark.parametrize(
    ("mesh", "device", "option", "words"),
    [
        ("pp=2", "cpu", {"verify": 9}, "verify=9 and replace_slow=0.0 compare replicas, but the"),
        ("dp=2", "meta", {"replace_slow": 2.0}, "which is not known on a mesh of GPUs"),
    ],
)
def test_ranks_that_cannot_be_compared_are_refused(monkeypatch, mesh, device, option, words):
    members = SimpleNamespace(is_newcomer=False, takes_faults=False, group=SimpleNamespace(size=2))
    monkeypatch.setattr(begin, "JobMembers", lambda: members)

    def built() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 1, device=device)
        return model, torch.optim.SGD(model.parameters())

    with pytest.raises(ConfigError) as caught:
        elastic_mesh(built, mesh, **option)
    assert words in str(caught.value)


def _slow_clock(monkeypatch, ranks: tuple[int, ...]) -> list[str]:
    """Make micro-batches take nine times as long on some ranks; return the warnings to come."""
    now, warnings = threading.local(), []

    def monotonic_ns() -> int:
        here = HERE.members
        of_stage = 1000 * (1 + 3 * (here.group.rank % 2))  # the stages have different work
        now.ns = getattr(now, "ns", 0) + of_stage * (9 if here.rank in ranks else 1)
        return now.ns

    monkeypatch.setattr(MeshReplica, "spent_ns", 0)
    monkeypatch.setattr(suspects, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    for log in (suspects.LOG, gradient_sums.LOG):
        monkeypatch.setattr(log, "warning", lambda text, *values: warnings.append(text % values))
    return warnings


SLOW = "has taken 9.0 times as long as its peers for its steps"


@pytest.mark.parametrize(("restarts", "min_ranks"), [(1, 4), (0, 3), (0, 4)])
def test_a_slow_rank_leaves_only_if_the_run_goes_on_without_it(monkeypatch, restarts, min_ranks):
    warnings = _slow_clock(monkeypatch, (2,))
    cluster = Cluster(4, {}, restarts=restarts, min_ranks=min_ranks)
    run = partial(
        train_on_mesh, mesh="dp=2,pp=2", replace_slow=2.0, batch_size=7, shards=2, epochs=6
    )
    cluster.run(run)
    leaves = restarts > 0 or min_ranks < 4
    assert cluster.left == [(2, SLOW)] * leaves
    assert len(cluster.results) == 3 + (min_ranks == 4)
    advice = "allow another process with --restarts, since the run needs this rank"
    named = [f"this rank {SLOW}: look at its host, or {advice}"]
    assert [text for text in warnings if "this rank" in text] == named * (not leaves)


def test_a_slow_rank_of_a_mesh_is_named_without_replace_slow(monkeypatch):
    warnings = _slow_clock(monkeypatch, (3,))
    cluster = Cluster(4, {})
    cluster.run(partial(train_on_mesh, mesh="dp=2,pp=2", batch_size=7, shards=2, epochs=6))
    named = f"this rank {SLOW}: look at its host, or replace it with replace_slow=2.0"
    assert (cluster.left, len(cluster.results), warnings) == ([], 4, [named])


def test_a_mesh_that_has_one_replica_left_is_named(monkeypatch):
    warnings = _slow_clock(monkeypatch, ())
    cluster = Cluster(4, {(3, "forward"): 2, (2, "forward"): 2}, restarts=0)
    with points_of_death(monkeypatch):
        cluster.run(partial(train_on_mesh, mesh="dp=2,pp=2", verify=2))
    assert len(cluster.results) == 2
    assert [text for text in warnings if "there is one replica, so verify= and" in text]

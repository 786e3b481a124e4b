"""A training on a mesh whose ranks die and come ends with the bits of an undisturbed one."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
import torch
from torch import nn

import elastic_cluster
from braid.elasticity import saving
from braid.elasticity.begin import elastic_mesh
from braid.elasticity.members import leavers_of
from braid.elasticity.mesh import MeshReplica, _NoInitialValues
from braid.elasticity.mesh_choice import mesh_for
from braid.elasticity.saving import TrainingCheckpoints
from braid.elasticity.state_transfer import TrainingState
from braid.elasticity.training import ElasticTraining
from braid.errors import CheckpointError, ConfigError, MismatchError
from braid.programs.layout import Mesh
from elastic_cluster import (
    HERE,
    POINTS,
    Cluster,
    ThreadMembers,
    build,
    points_of_death,
    random_faults,
    train_on_mesh,
)
from elastic_differences import DIFFERENCES, differing
from elastic_points import MESH_POINTS

MESHES = [
    ("pp=2,dp=2", 0),
    ("dp=3", 1),
    ("pp=3", 0),
    ("pp=2,dp=2", 3),
    ("dp=3", 2),
    ("pp=2,dp=2", 1),
    ("dp=3", 3),
]
ALL_POINTS = (*(p for p in POINTS if p != "state"), "loss", *MESH_POINTS)


class _Tied(nn.Module):
    """Layers that share a weight: no rank has a shard of it, and stages have copies."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
        second.weight = first.weight
        layers = (nn.Linear(4, 6), first, nn.Tanh(), second, nn.Linear(6, 1))
        self.blocks = nn.ModuleList(layers)


def _build_tied():
    with elastic_cluster.SEEDING:
        torch.manual_seed(0)
        model = _Tied()
    options = {"momentum": 0.9, "nesterov": True, "foreach": True}  # which changes gradients
    optimizer = torch.optim.SGD(model.parameters(), 0.01, **options)
    return model, optimizer, {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    cluster = Cluster(1, {})
    cluster.run(partial(train_on_mesh, mesh="dp=1", evaluate_every=1))
    return cluster.results[0]


@pytest.fixture(scope="module")
def undisturbed_tied() -> dict[str, torch.Tensor]:
    cluster = Cluster(1, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic_cluster, "build", _build_tied)
        cluster.run(partial(train_on_mesh, mesh="dp=1", evaluate_every=1))
    return cluster.results[0]


def _differing(cluster: Cluster, reference: dict[str, torch.Tensor]) -> list[tuple[int, str]]:
    return [
        (rank, name)
        for rank, state in cluster.results.items()
        for name, tensor in state.items()
        if not torch.equal(tensor, reference[name])
    ]


@pytest.mark.parametrize(
    "seed",
    [
        *range(4),
        *(pytest.param(n, marks=pytest.mark.all) for n in range(4, 24)),
        *(pytest.param(n, marks=pytest.mark.proof) for n in range(24, 700)),
    ],
)
def test_deaths_on_any_mesh_leave_the_bits_of_one_process(
    monkeypatch, tmp_path, undisturbed, undisturbed_tied, seed
):
    is_tied = seed % 4 == 3
    if is_tied:
        monkeypatch.setattr(elastic_cluster, "build", _build_tied)
    mesh, shard = MESHES[seed % len(MESHES)]
    size = Mesh.parse(mesh).size
    faults = random_faults(seed, size, ALL_POINTS)
    cluster = Cluster(size, faults, restarts=8 * (seed % 3 > 0), spares=seed // 3 % 2)
    needs_saves = seed % 5 or not faults.keys().isdisjoint({(1, "save"), (1, "saved")})
    saved = TrainingCheckpoints(str(tmp_path), 1 + seed % 3) if needs_saves else None
    run = partial(train_on_mesh, mesh=mesh, shard=shard, checkpoints=saved, evaluate_every=1)
    run = partial(run, verify=seed % 3)  # which blames no rank
    is_lost = False
    with points_of_death(monkeypatch):
        try:
            cluster.run(run)
        except CheckpointError as error:
            is_lost = "is lost, because all ranks that had it have ended" in str(error)
    is_elsewhere = (1, "loss") in cluster.faults  # rank 1 may not have the last stage
    assert cluster.deaths or cluster.left or is_elsewhere
    assert not [reason for _, reason in cluster.left if "gradients" in reason], cluster.refused
    # a part has one copy, so its state survives one loss at a time; members that are asked to end
    # together take turns, but one of them and a death are two losses
    lost = {*(rank for rank, _ in cluster.deaths), *(rank for rank, _ in cluster.left)}
    assert cluster.results or cluster.end or lost >= set(range(size)) or (is_lost and len(lost) > 1)
    assert not _differing(cluster, undisturbed_tied if is_tied else undisturbed), cluster.deaths


def test_members_that_are_asked_to_end_together_take_turns(monkeypatch, undisturbed):
    """Rank 1 has the copy of rank 0's part."""
    cluster = Cluster(3, {(0, "leave forward"): 5, (1, "leave forward"): 3}, restarts=0)
    with points_of_death(monkeypatch):
        cluster.run(partial(train_on_mesh, mesh="dp=3", shard=1))
    assert [rank for rank, _ in cluster.left] == [0, 1]
    assert [*cluster.results] == [2]
    assert not _differing(cluster, undisturbed)


def test_members_leave_together_if_their_peers_have_all_parts():
    ring = [["a", "d"], ["b", "a"], ["c", "b"], ["d", "c"]]
    asked = [[True, False, True, False], [True, True, False, False], [True] * 4, [False] * 4]
    facts = [list(zip(flags, ring, strict=True)) for flags in asked]
    assert [leavers_of(one) for one in facts] == [{0, 2}, {0}, {0, 2}, set()]
    assert leavers_of([(True, []), (False, [])]) == {0}  # no copies: a new epoch saves nothing


@pytest.mark.parametrize(
    ("mesh", "shard", "point"),
    [
        ("pp=2,dp=2", 0, "agree"),
        ("pp=2,dp=2", 1, "agreed"),
        ("dp=4", 3, "update"),
        ("pp=4", 0, "sum"),
        ("pp=4", 0, "agreed"),
        ("dp=4; pp=3", 0, "agreed"),
    ],
)
def test_those_that_are_left_go_on_as_another_mesh(monkeypatch, undisturbed, mesh, shard, point):
    cluster = Cluster(4, {(2, point): 2}, restarts=0)
    with points_of_death(monkeypatch):
        cluster.run(partial(train_on_mesh, mesh=mesh, shard=shard))
    assert [begun.members for begun in cluster.begun] == [(0, 1, 2, 3), (0, 1, 3)]
    assert len(cluster.results) == 3
    assert not _differing(cluster, undisturbed)


@pytest.mark.parametrize(("shard", "point"), [(0, "update"), (1, "agreed"), (1, "update")])
def test_the_loss_of_a_host_with_all_replicas_of_a_stage_loses_no_step(
    monkeypatch, undisturbed, shard, point
):
    """Copies are on the other host then, and their gradients are sent."""
    monkeypatch.setattr("braid.elasticity.mesh.crosses_hosts", lambda group: group.size == 4)
    monkeypatch.setattr("braid.elasticity.mesh.is_on_one_host", lambda group: group.size < 4)
    monkeypatch.setattr(
        "braid.elasticity.shadow.ring_of", lambda group: [[0, 1], [0, 2, 1, 3]][group.size > 2]
    )
    cluster = Cluster(4, {(0, point): 2, (1, point): 2}, restarts=0)
    with points_of_death(monkeypatch):
        cluster.run(partial(train_on_mesh, mesh="pp=2,dp=2; dp=2", shard=shard))
    assert len(cluster.deaths) == 2
    assert len(cluster.results) == 2
    assert not _differing(cluster, undisturbed)


@pytest.mark.parametrize("shard", [1, 3])
def test_a_copy_has_gradients_that_the_optimizer_of_its_rank_changes(
    monkeypatch, undisturbed_tied, shard
):
    monkeypatch.setattr(elastic_cluster, "build", _build_tied)
    cluster = Cluster(3, {(1, "update"): 2, (2, "forward"): 6}, restarts=0)
    with points_of_death(monkeypatch):
        cluster.run(partial(train_on_mesh, mesh="dp=3", shard=shard, evaluate_every=1))
    assert len(cluster.deaths) == 2
    assert not _differing(cluster, undisturbed_tied)


@pytest.mark.parametrize("shard", [1, 2])
def test_ranks_have_the_weights_that_others_have_updated_after_each_step(shard):
    seen: dict[int, list[torch.Tensor]] = {}

    def main(members: ThreadMembers) -> dict[str, torch.Tensor]:
        def note(run: ElasticTraining) -> None:
            if run.num_steps:  # of the step before
                params = run.model.model.parameters()
                seen.setdefault(run.num_steps, []).append(nn.utils.parameters_to_vector(params))

        return train_on_mesh(members, "dp=2", shard, in_update=note)

    Cluster(2, {}).run(main)
    assert len(seen) > 4
    for first, second in seen.values():
        assert torch.equal(first, second)


@pytest.mark.parametrize("shard", [0, 1, 3])
@pytest.mark.parametrize("faults", [{(2, "forward"): 2}, {(0, "update"): 3, (3, "agree"): 5}])
def test_weights_that_stages_share_come_to_all_of_them(
    monkeypatch, undisturbed_tied, shard, faults
):
    monkeypatch.setattr(elastic_cluster, "build", _build_tied)
    cluster = Cluster(4, faults, spares=1)
    with points_of_death(monkeypatch):
        cluster.run(partial(train_on_mesh, mesh="pp=2,dp=2", shard=shard, evaluate_every=1))
    assert len(cluster.deaths) == len(faults)
    assert not _differing(cluster, undisturbed_tied)


def test_divided_layers_keep_their_bits_with_their_number_of_ranks(monkeypatch):
    run = partial(train_on_mesh, mesh="pp=2,tp=2")
    reference = Cluster(4, {})
    reference.run(run)
    cluster = Cluster(4, {(1, "update"): 2, (2, "forward"): 6}, min_ranks=4)
    with points_of_death(monkeypatch):
        cluster.run(run)
    assert len(cluster.deaths) == 2
    assert len(cluster.results) >= 2
    assert not _differing(cluster, reference.results[0])


def test_a_part_that_nobody_has_is_named(monkeypatch):
    cluster = Cluster(3, {(1, "agree"): 2})
    with points_of_death(monkeypatch), pytest.raises(CheckpointError) as caught:
        cluster.run(partial(train_on_mesh, mesh="pp=3", copies=False))
    assert str(caught.value) == (
        "the state of pp=1 is lost, because all ranks that had it have ended, and ranks keep no "
        "copies; there is no checkpoint to go back to: pass checkpoints=, or keep copies"
    )


def test_a_part_that_nobody_has_comes_from_the_checkpoint(
    monkeypatch, undisturbed, tmp_path, capfd
):
    saved = TrainingCheckpoints(str(tmp_path), 2)
    cluster = Cluster(3, {(1, "agree"): 4})
    with points_of_death(monkeypatch):
        cluster.run(partial(train_on_mesh, mesh="pp=3", copies=False, checkpoints=saved))
    assert cluster.begun[1].num_steps[:2] == (3, 3)  # a newcomer may be ready by then
    assert len(cluster.results) >= 2
    assert not _differing(cluster, undisturbed)
    assert (
        "the state of pp=1 is lost, because all ranks that had it have ended, and ranks keep no "
        "copies: the training goes back from step 3 to 2, its last checkpoint"
    ) in capfd.readouterr().err


def test_a_rank_that_leaves_without_a_copy_of_its_part_first_saves(
    monkeypatch, undisturbed, tmp_path, capfd
):
    saved = TrainingCheckpoints(str(tmp_path), 100)
    cluster = Cluster(3, {(1, "leave forward"): 4})
    with points_of_death(monkeypatch):
        cluster.run(partial(train_on_mesh, mesh="pp=3", copies=False, checkpoints=saved))
    assert len(cluster.left) == 1
    assert not _differing(cluster, undisturbed)
    assert "goes back" not in capfd.readouterr().err


@pytest.mark.parametrize("shard", [0, 1, 3])
def test_a_run_whose_members_all_leave_goes_on_on_another_mesh(
    monkeypatch, undisturbed, tmp_path, shard
):
    run = partial(train_on_mesh, shard=shard, checkpoints=TrainingCheckpoints(str(tmp_path), 100))
    cluster = Cluster(2, {(0, "leave forward"): 9, (1, "leave forward"): 9}, restarts=0)
    with points_of_death(monkeypatch):
        cluster.run(partial(run, mesh="dp=2"))
    assert len(cluster.left) == 2
    cluster = Cluster(4, {})
    cluster.run(partial(run, mesh="pp=2,dp=2"))
    assert len(cluster.results) == 4
    assert not _differing(cluster, undisturbed)


def test_a_death_on_the_way_back_to_a_checkpoint_mixes_nothing(monkeypatch, undisturbed, tmp_path):
    saved = TrainingCheckpoints(str(tmp_path), 2)
    cluster = Cluster(4, {(1, "agree"): 4, (2, "agree"): 4, (3, "divided"): 2})
    with points_of_death(monkeypatch):
        cluster.run(partial(train_on_mesh, mesh="pp=4", checkpoints=saved))
    assert len(cluster.deaths) == 3
    assert cluster.results
    assert not _differing(cluster, undisturbed)


def test_a_copy_follows_a_rate_that_is_scaled(monkeypatch):
    """Ranks that have a part compare it after each loss: a copy at another rate would differ."""
    run = partial(train_on_mesh, mesh="dp=4", shard=1, batch_per_rank="sqrt")
    cluster = Cluster(4, {(3, "forward"): 2, (1, "forward"): 5}, restarts=0)
    with points_of_death(monkeypatch):
        cluster.run(run)
    first, second = cluster.results.values()
    assert len(cluster.deaths) == 2
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_weights_are_made_equal_at_the_beginning(monkeypatch):
    numbers = count(1)

    def unseeded():
        model, optimizer, others = build()
        with torch.no_grad():
            next(model.parameters()).add_(next(numbers))
        return model, optimizer, others

    monkeypatch.setattr(elastic_cluster, "build", unseeded)
    cluster = Cluster(2, {})
    cluster.run(partial(train_on_mesh, mesh="dp=2"))
    assert not _differing(cluster, cluster.results[0])


def test_an_order_of_samples_that_changes_inside_of_a_pass_is_refused(monkeypatch, tmp_path):
    run = partial(train_on_mesh, mesh="dp=2", checkpoints=TrainingCheckpoints(str(tmp_path), 100))
    cluster = Cluster(2, {(0, "leave forward"): 5, (1, "leave forward"): 5}, restarts=0)
    with points_of_death(monkeypatch):
        cluster.run(run)
    with pytest.raises(ConfigError, match="samples of a step 24 \\(here 8\\)"):
        Cluster(2, {}).run(partial(run, batch_size=2))


@pytest.mark.parametrize("kind", ["fewer", "frozen", "buffer", "optimizer"])
def test_a_newcomer_that_builds_other_objects_is_named_and_the_others_go_on(
    monkeypatch, undisturbed, kind
):
    def build_other():
        state = TrainingState(*build())
        return differing(state, kind) if HERE.members.rank == 3 else state

    monkeypatch.setattr(elastic_cluster, "build", build_other)
    cluster = Cluster(3, {(1, "forward"): 2}, min_ranks=3, restarts=2)
    cluster.run(partial(train_on_mesh, mesh="pp=3"))
    assert cluster.left == [(3, "cannot take part")]
    assert DIFFERENCES[kind] in cluster.refused[0]
    assert set(cluster.results) == {0, 2, 4}
    assert not _differing(cluster, undisturbed)


class _Average:
    """Average of weights of which each rank knows a part."""

    def __init__(self, model):
        self.model, self.mean = model, {}

    def state_dict(self):
        return {name: param.detach() for name, param in self.model.named_parameters()}

    def load_state_dict(self, state):
        self.mean = state


def test_an_object_with_other_state_on_each_rank_is_refused(monkeypatch):
    def averaged():
        model, optimizer, others = build()
        return model, optimizer, others | {"average": _Average(model)}

    monkeypatch.setattr(elastic_cluster, "build", averaged)
    with pytest.raises(MismatchError, match="average has other values on rank 1 than on rank 0"):
        Cluster(2, {}).run(partial(train_on_mesh, mesh="pp=2"))


def test_a_checkpoint_that_fails_is_a_warning(monkeypatch, undisturbed, tmp_path):
    warnings: list[str] = []
    monkeypatch.setattr(saving.LOG, "warning", lambda text, *_: warnings.append(text))
    (tmp_path / "file").write_text("")
    saved = TrainingCheckpoints(str(tmp_path / "file"), 4)
    cluster = Cluster(2, {})
    cluster.run(partial(train_on_mesh, mesh="pp=2", checkpoints=saved))
    assert not _differing(cluster, undisturbed)
    assert warnings == ["a checkpoint could not be saved: %s"] * 2


def _clamp(run):
    with torch.no_grad():
        for param in run.model.named_pieces().values():
            param.clamp_(-1.0, 1.0)


def _decay(run):
    with torch.no_grad():
        for param in run.model.named_pieces().values():
            param.mul_(0.9)


def _reset(run):
    for state in run.optimizer.state.values():
        state["exp_avg"].zero_()


def _shift(run):
    for name, buffer in run.model.model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(1.0)


def _scale(run):
    for param in run.model.named_pieces().values():
        if param.grad is not None:  # this rank has elements of it
            param.grad.mul_(0.5)


def _replace(run):
    for param in run.model.named_pieces().values():
        if param.grad is not None:
            param.grad = param.grad * 0.5
            param.grad = param.grad * 0.5  # it may get the memory of the first gradient


CHANGES = [
    ("after_step", _clamp, "was changed outside of the optimizer's step"),
    ("in_update", _scale, "changed in the function update=, after another rank had received"),
    ("in_update", _replace, "changed in the function update=, after another rank"),
    ("in_update", _decay, "was changed outside of the optimizer's step"),
    ("after_step", _reset, "its state in the optimizer, was changed outside"),
    ("after_step", _shift, "running_mean changed in the function update="),
]


@pytest.mark.parametrize(
    ("shard", "option", "change", "words"),
    [(shard, *change) for shard in (0, 1) for change in CHANGES],
)
def test_what_a_copy_would_not_follow_is_refused(shard, option, change, words):
    cluster = Cluster(2, {})
    mesh = "dp=2" if shard else "pp=2"
    with pytest.raises(ConfigError, match=words):
        cluster.run(partial(train_on_mesh, mesh=mesh, shard=shard, **{option: change}))


def test_layers_that_are_frozen_by_eval_stay_so_on_the_next_mesh(monkeypatch):
    modes = []

    def freeze(run: ElasticTraining) -> None:
        if run.num_changes:
            modes.append((run.model.model.blocks[0].training, run.model.model.training))
        run.model.model.blocks[0].eval()

    cluster = Cluster(2, {(1, "forward"): 3}, restarts=0)
    with points_of_death(monkeypatch):
        cluster.run(partial(train_on_mesh, mesh="dp=2", shard=1, after_step=freeze))
    assert set(modes) == {(False, True)}


def test_an_optimizer_of_another_model_and_extra_states_are_refused():
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        return nn.Linear(2, 1), torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)

    none = {"layers": None, "clip": None, "copies": True, "options": {}}
    with pytest.raises(ConfigError, match="has 2 parameters that are not the model's"):
        MeshReplica(built, lambda _: Mesh.parse("dp=1"), **none)

    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    def counting() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(Counting(2, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ConfigError, match="0 has an extra state, which new ranks do not receive"):
        MeshReplica(counting, lambda _: Mesh.parse("dp=1"), **none)


def test_initial_values_are_left_out_where_others_follow():
    with _NoInitialValues():
        before = torch.random.get_rng_state()
        model = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8)
        torch.nn.init.normal_(model.linear1.weight)
        model.linear2.weight.data.fill_(3.0)
        assert torch.equal(before, torch.random.get_rng_state())
        assert torch.randn(2).shape == (2,)
    assert model.linear2.weight.eq(3.0).all()


def test_the_model_is_built_before_others_wait_for_it():
    built = []

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        built.append(nn.Linear(2, 1))
        return built[-1], torch.optim.SGD(built[-1].parameters(), lr=0.1)

    none = {"layers": None, "clip": None, "copies": True, "options": {}}
    replica = MeshReplica(build, lambda _: Mesh.parse("dp=1"), **none)
    assert len(built) == 1
    assert replica._first is not None
    assert replica._first.model is built[0]


def test_a_mesh_that_does_not_fit_becomes_replicas():
    meshes = [str(mesh_for(Mesh.parse("pp=2,dp=2,tp=2"), n)) for n in (8, 4, 7, 1)]
    assert meshes == ["pp=2,dp=2,tp=2", "pp=2,dp=1,tp=2", "dp=7", "dp=1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"mesh": "pp=2,cp=2"},
            "an elastic mesh has only the axes pp, dp, tp, got cp in pp=2,cp=2",
        ),
        ({"mesh": "pp=2", "clip": 0.0}, "clip must be above 0, got 0.0"),
        ({"mesh": "dp=2", "shard": 4}, "shard must be 0, 1, 2 or 3, got 4"),
        ({"mesh": "dp=2", "verify": 9, "copies": False}, "could be lost with copies=False"),
        ({"mesh": "dp=2", "checkpoints": "runs"}, "checkpoint_every=0 belong together"),
        ({"mesh": "pp"}, "a mesh is written as pp=2,dp=4"),
        ({"mesh": "dp=4; pp=2,dp=2"}, "have the same number of ranks"),
        ({"mesh": "dp=3; cp=2"}, "an elastic mesh has only the axes pp, dp, tp, got cp in cp=2"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ConfigError) as caught:
        elastic_mesh(build, **arguments)
    assert words in str(caught.value)

"""A model trained on any mesh is the model that one process trains."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from training import linear, said_by

import braid
from braid.comm import Group
from braid.errors import CommError, ConfigError
from braid.parallel import resume
from braid.parallel.expert_parallel import MixtureOfExperts
from braid.parallel.hybrid import HybridParallel
from braid.programs.layout import Mesh
from braid.train.config import MODELS
from braid.train.gpt import GPT, mean_loss

ROWS, LENGTH, STEPS = 8, 8, 3
UNEVEN = {1: [8], 2: [3, 5], 4: [2, 1, 2, 3]}  # rows, by the number of replicas
SIZE = MODELS["tiny"]


def tokens(number: int) -> torch.Tensor:
    return torch.randint(256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))


def model() -> GPT:
    return GPT(SIZE, LENGTH).double()


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def _alone() -> tuple[list[float], list[float], list[torch.Tensor]]:
    """Losses, norms and parameters of one process."""
    own = model()
    optimizer = adam(own)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(own(tokens(step)), tokens(step + 10))
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(own.parameters(), 0.5).item())
        optimizer.step()
    return losses, norms, [param.detach() for param in own.parameters()]


def _trained(group: Group, mesh: str, schedule: str, shard: int) -> Any:
    own = model()
    optimizer = adam(own)
    hybrid = HybridParallel(
        own, mesh, group, layers=own.layers(), num_microbatches=2, schedule=schedule, shard=shard
    )
    hybrid.attach(optimizer)
    assert (hybrid.sharding is not None) == bool(shard)
    replicas = hybrid.groups["dp"]
    mine = torch.arange(ROWS).chunk(replicas.size)[replicas.rank]
    losses, norms = [], []
    for step in range(STEPS):
        hybrid.zero_grad()
        loss = hybrid.step(tokens(step)[mine], tokens(step + 10)[mine], loss=mean_loss)
        losses.append(loss.item())
        norms.append(hybrid.clip_grad_norm_(0.5).item())
        optimizer.step()
        if shard:
            order = hybrid._sharded.sharding._residency.order
            assert len(order) <= 2 * len(own.blocks), "units are followed anew in each step"
    evaluated = hybrid.evaluate(tokens(0)[mine], tokens(10)[mine], loss=mean_loss).item()
    snapshot, numbers = hybrid.checkpoint(optimizer)
    assert numbers["optimizer"]["type"] == "AdamW"
    pieces = [(p.name, p.global_shape, p.tensor.numel()) for p in snapshot.pieces()]
    hybrid.make_whole()
    return losses, norms, [param.detach() for param in own.parameters()], evaluated, pieces


@pytest.mark.parametrize(
    ("mesh", "schedule", "shard"),
    [
        ("pp=1", "1f1b", 0),
        ("tp=2", "1f1b", 0),
        ("cp=2", "gpipe", 0),
        ("pp=2,tp=2", "zb_h1", 0),
        ("tp=2,pp=2", "zbv", 0),
        ("cp=2,tp=2", "1f1b", 0),
        ("pp=2,cp=2", "1f1b", 0),
        ("dp=2,tp=2", "1f1b", 0),
        ("dp=2,pp=1", "gpipe", 0),
        ("pp=2,dp=2,tp=2", "1f1b", 0),
        ("pp=2,dp=2", "1f1b", 1),
        ("pp=2,dp=2", "gpipe", 2),
        ("pp=2,dp=2", "1f1b", 3),
        ("dp=2,tp=2", "1f1b", 3),
        ("cp=2", "1f1b", 3),
        ("pp=2,dp=2,tp=2", "1f1b", 3),
    ],
)
def test_each_axis_alone_and_all_together_train_like_one_process(world, mesh, schedule, shard):
    losses, norms, params = _alone()
    ranks = world(Mesh.parse(mesh).size, _trained, mesh, schedule, shard)
    written: Counter[str] = Counter()
    wanted: dict[str, int] = {}
    for own_losses, own_norms, own_params, evaluated, pieces in ranks:
        assert own_losses == pytest.approx(losses, rel=1e-12)
        assert own_norms == pytest.approx(norms, rel=1e-10)
        assert evaluated < losses[0]
        for own, param in zip(own_params, params, strict=True):
            assert (own - param).abs().max() < 1e-9
        for name, shape, count in pieces:
            written[name] += count
            wanted[name] = torch.Size(shape).numel()
    assert dict(written) == wanted, "each element of a checkpoint is written once"
    assert sum(name.startswith("model/") for name in wanted) == len(params)


class Expert(nn.Module):
    """A residual layer of experts."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.mixture = MixtureOfExperts(4, 8, 4, group=group, top_k=2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixture(x)


def experts(group: Group) -> nn.Sequential:
    """A model with two layers of experts, all on each rank."""
    alone = group.split(group.rank)
    assert alone is not None
    first = nn.utils.skip_init(nn.Linear, 4, 4).double()
    with torch.no_grad():
        first.weight.copy_(torch.arange(16.0).view(4, 4) / 16)
        first.bias.fill_(0.1)
    return nn.Sequential(first, Expert(alone), Expert(alone))


def _mixture(group: Group, mesh: str, directory: str, shard: int = 0) -> Any:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    own = experts(group)
    optimizer = adam(own)
    hybrid = HybridParallel(own, mesh, group, num_microbatches=2, shard=shard)
    hybrid.attach(optimizer)
    samples = hybrid.samples
    mine = x.split(UNEVEN[samples.size])[samples.rank]
    losses, norms = [], []
    for _ in range(STEPS):
        hybrid.zero_grad()
        losses.append(hybrid.step(mine, mine.flip(1), loss=nn.functional.mse_loss).item())
        norms.append(hybrid.clip_grad_norm_(0.1).item())
        optimizer.step()
    braid.save(directory, model=hybrid, optimizer=optimizer, step=2, group=group)
    before = [param.detach().clone() for param in own.parameters()]
    again = HybridParallel(other := experts(group), mesh, group, num_microbatches=2)
    assert braid.load(directory, model=again, optimizer=adam(other), group=group) == 3
    trained = set() if shard else set(again.pipeline.parameters())
    same = all(
        torch.equal(param.detach(), old)
        for param, old in zip(other.parameters(), before, strict=True)
        if param in trained
    )
    hybrid.make_whole()
    return losses, norms, [param.detach() for param in own.parameters()], same


@pytest.mark.parametrize(
    ("mesh", "shard"),
    [("ep=2", 0), ("dp=2,ep=2", 0), ("pp=2,ep=2", 0), ("ep=4", 0), ("ep=2", 2), ("dp=2,ep=2", 1)],
)
def test_experts_have_an_axis_of_their_own(world, tmp_path, mesh, shard):
    expected = world(1, _mixture, "pp=1", str(tmp_path / "alone"))[0]
    for losses, norms, params, same in world(
        Mesh.parse(mesh).size, _mixture, mesh, str(tmp_path / "mesh"), shard
    ):
        assert losses == pytest.approx(expected[0], rel=1e-12)
        assert norms == pytest.approx(expected[1], rel=1e-10)
        assert same
        for own, param in zip(params, expected[2], strict=True):
            assert (own - param).abs().max() < 1e-9


class Counting(torch.optim.SGD):
    """Plain descent that counts steps as Python numbers."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
                    self.state[param]["count"] = self.state[param].get("count", 0) + 1


def _normed(group: Group, directory: str) -> list[Any]:
    def make() -> nn.Sequential:
        up, down = (nn.utils.skip_init(nn.Linear, *sizes) for sizes in ((3, 4), (4, 3)))
        for param in (*up.parameters(), *down.parameters()):
            param.data.copy_(torch.arange(float(param.numel())).view(param.shape).cos())
        return nn.Sequential(up, nn.Tanh(), nn.BatchNorm1d(4), down)

    def steps(hybrid: Any, optimizer: Any) -> list[float]:
        losses = []
        for number in range(3):
            x = torch.arange(12.0).view(4, 3).sin() + number
            hybrid.zero_grad()
            losses.append(hybrid.step(x, x, loss=nn.functional.mse_loss).item())
            optimizer.step()
        return losses

    own = make()
    hybrid = HybridParallel(own, f"pp={group.size}", group)
    optimizer = Counting(own.parameters(), lr=0.1)
    steps(hybrid, optimizer)
    braid.save(directory, model=hybrid, optimizer=optimizer, step=2, group=group)
    other = make()
    again = HybridParallel(other, "pp=1", alone := group.split(group.rank))
    next_one = Counting(other.parameters(), lr=0.1)
    braid.load(directory, model=again, optimizer=next_one, group=alone)
    counts = [next_one.state[param]["count"] for param in other.parameters()]
    goes_on = [steps(hybrid, optimizer), steps(again, next_one)]
    hybrid.make_whole()
    same = [torch.equal(a, b) for a, b in zip(own.buffers(), other.buffers(), strict=True)]
    few = Counting(hybrid.parameters(), lr=0.1)
    refused = said_by(lambda: hybrid.checkpoint(few), ConfigError)
    return [counts, goes_on, same, refused]


def test_buffers_and_numbers_of_all_stages_are_saved(world, tmp_path):
    for counts, (losses, others), same, refused in world(2, _normed, str(tmp_path)):
        assert counts == [3] * 6
        assert losses == pytest.approx(others, rel=1e-6)
        assert same == [True] * 3
        assert "make it from model.parameters() on each rank" in refused


class Perceptron(nn.Module):
    """Two layers; the second one fails before it has summed anything, if it is to."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.up = nn.utils.skip_init(nn.Linear, 4, 4)
        self.down = nn.utils.skip_init(nn.Linear, 4, 4)
        for param in self.parameters():
            param.data.fill_(0.1)
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        if self.fails:
            msg = "no such key"
            raise KeyError(msg)
        return self.down(x)


def _fails(group: Group) -> str:
    own = nn.Sequential(Perceptron(fails=False), Perceptron(fails=group.rank == 3))
    plan = {r"up$": "column", r"down$": "row"}
    hybrid = HybridParallel(own, "pp=2,tp=2", group, plan=plan)
    x = torch.ones(2, 4)
    return said_by(lambda: hybrid.step(x, x, loss=nn.functional.mse_loss), (CommError, KeyError))


def test_a_failure_is_known_along_all_axes(world):
    *others, own = world(4, _fails)
    assert own.startswith("CommError") or "no such key" in own
    for text in others:
        assert "rank 3" in text
        assert "no such key" in text


def _saved(group: Group, mesh: str, directory: str, first: int, last: int) -> Any:
    own = model()
    optimizer = adam(own)
    hybrid = HybridParallel(own, mesh, group, layers=own.layers(), num_microbatches=2)
    assert braid.load(directory, model=hybrid, optimizer=optimizer, group=group) == first
    replicas = hybrid.groups["dp"]
    mine = torch.arange(ROWS).chunk(replicas.size)[replicas.rank]
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        losses.append(hybrid.step(tokens(step)[mine], tokens(step + 10)[mine], loss=mean_loss))
        hybrid.clip_grad_norm_(0.5)
        optimizer.step()
    braid.save(directory, model=hybrid, optimizer=optimizer, step=last - 1, group=group)
    return [loss.item() for loss in losses]


def _loaded(group: Group, directory: str) -> list[torch.Tensor]:
    whole = model()
    braid.load(directory, model=whole, group=group)
    return [param.detach() for param in whole.parameters()]


def test_a_run_goes_on_on_any_other_mesh(world, tmp_path):
    expected, _, params = _alone()
    losses = []
    for step, mesh in enumerate(("dp=2,tp=2", "pp=2,tp=2", "cp=2")):
        size = Mesh.parse(mesh).size
        losses += world(size, _saved, mesh, str(tmp_path), step, step + 1)[0]
    assert losses == pytest.approx(expected, rel=1e-12)
    for own, param in zip(world(1, _loaded, str(tmp_path))[0], params, strict=True):
        assert (own - param).abs().max() < 1e-9


def _mistakes(group: Group) -> list[str]:
    own = model()

    def refused(mesh: str, **options: Any) -> str:
        copied = copy.deepcopy(own)
        options = {"layers": copied.layers(), **options}
        return said_by(lambda: HybridParallel(copied, mesh, group, **options), ConfigError)

    def forgotten() -> None:
        sharded = HybridParallel(row, "dp=2", group, shard=1)
        optimizer = torch.optim.SGD(row.parameters(), lr=0.1)
        sharded.step(torch.ones(2, 3), torch.ones(2, 3), loss=nn.functional.mse_loss)
        optimizer.step()

    row = nn.Sequential(nn.utils.skip_init(nn.Linear, 3, 3))
    nn.init.ones_(row[0].weight)
    nn.init.ones_(row[0].bias)
    hybrid = HybridParallel(copy.deepcopy(own), "tp=2", group, layers=own.layers())
    captured = braid.capture(row, torch.ones(3, 3))
    tied = nn.Sequential(*[nn.utils.skip_init(nn.Linear, 3, 3) for _ in range(3)])
    tied[2].weight, tied[2].bias = tied[1].weight, tied[1].bias
    return [
        said_by(lambda: HybridParallel(tied, "pp=2", group, shard=1, balance=[1, 2]), ConfigError),
        refused("tp=4,zz=2", layers=None),
        refused("pp=2", balance=[1, 1, 1]),
        refused("pp=2", schedule="zbv", shard=2),
        said_by(lambda: hybrid.clip_grad_norm_(-1.0), ConfigError),
        said_by(lambda: hybrid(torch.ones(2, 3)), ConfigError),
        said_by(lambda: HybridParallel(row, "dp=2", group, shard=3), ConfigError),
        said_by(forgotten, ConfigError),
        said_by(lambda: HybridParallel(row, "ep=2", group, layers=captured), ConfigError),
    ]


def test_mistakes_are_named(world):
    for said in world(2, _mistakes):
        one_stage, everything, balance, split, norm, called, gathered, forgotten, experts = said
        assert "a model on a mesh cannot be called: use step(batch, target, loss=...)" in called
        assert "a captured model does not support sharded experts: leave the axis ep" in experts
        assert (
            "of the stages of ranks 1 can be sharded: all are shared between layers: use"
            in one_stage
        )
        assert "outside of ModuleLists: use shard=2" in gathered
        assert "or attach(optimizer) of HybridParallel, before the first step" in forgotten
        assert "input and weight gradients: use 1f1b" in split
        assert "has zz: its axes may be pp (stages of a pipeline), dp (replicas)" in everything
        assert "has 8 ranks, but the group has 2" in everything
        assert "GPT is not an nn.Sequential" in everything
        assert "balance must be 2 numbers" in balance
        assert "max_norm must not be negative" in norm


class Scaled(nn.Module):
    """A layer with a parameter that has no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


def _resumed(group: Group, shard: int, directory: str) -> list[bool]:
    """Whether a training goes on from a checkpoint with the same bits, for some optimizers."""

    def step(hybrid: HybridParallel, optimizer: torch.optim.Optimizer, number: int) -> None:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        hybrid.zero_grad()
        hybrid.step(x, x, loss=nn.functional.mse_loss)
        optimizer.step()

    same = []
    for make in (torch.optim.Adagrad, torch.optim.AdamW):
        trained = []
        for loads in (False, True):
            blocks = nn.ModuleList(Scaled() for _ in range(3))
            own = nn.ModuleDict({"blocks": blocks})
            optimizer = make(own.parameters(), lr=0.1)
            if loads:  # before anything is divided
                resume.load(directory, model=own, optimizer=optimizer, group=group)
            hybrid = HybridParallel(
                own, "dp=2", group, layers=list(blocks), num_microbatches=1, shard=shard
            )
            hybrid.attach(optimizer)
            for number in () if loads else range(2):
                step(hybrid, optimizer, number)
            if not loads:
                resume.save(directory, model=hybrid, optimizer=optimizer, step=1, group=group)
            step(hybrid, optimizer, 2)
            hybrid.make_whole()
            trained.append([param.detach().clone() for param in own.parameters()])
        same.append(all(map(torch.equal, *trained)))
    return same


@pytest.mark.procs
@pytest.mark.parametrize("shard", [1, 3])
def test_parameters_without_dims_go_on_from_a_checkpoint(procs, tmp_path, shard):
    assert procs(2, _resumed, shard, str(tmp_path)) == [[True, True]] * 2

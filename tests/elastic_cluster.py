"""An elastic training on threads: a launcher's membership, and deaths at chosen points."""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from braid.comm import Group
from braid.elasticity.evaluation import Evaluation
from braid.elasticity.learning_rate import RateRule
from braid.elasticity.mesh import MeshReplica
from braid.elasticity.mesh_choice import mesh_chooser
from braid.elasticity.replica import Replica, WholeModel
from braid.elasticity.saving import TrainingCheckpoints
from braid.elasticity.state_transfer import TrainingState
from braid.elasticity.training import ElasticTraining
from braid.launch.process.job import ElasticLimits
from braid.launch.supervise.membership_state import (
    Begin,
    GiveUp,
    MembershipState,
    Order,
    Pause,
    Replace,
)
from braid.runtime.clock import MonotonicClock
from braid.runtime.events import Recorder
from braid.runtime.store import HashStore
from braid.runtime.transport import Fabric, RankContext
from elastic_points import add_points

POINTS = (
    *("forward", "sum", "summed", "update", "save", "saved", "evaluate", "evaluated"),
    *("state", "join", "leave forward", "leave sum"),
)
TIMEOUT_S = 60.0
SEEDING = threading.Lock()  # threads share torch's generator


class Killed(BaseException):
    """Ends the thread of a rank."""


class Cluster:
    """Ranks on threads.

    Args:
        num_ranks: Number of members at first.
        faults: (rank, point) -> number of the visit at which the rank dies there.
        limits: Limits of the membership.
    """

    def __init__(
        self, num_ranks: int, faults: Mapping[tuple[int, str], int], **limits: int
    ) -> None:
        values = {"min_ranks": 1, "max_ranks": num_ranks, "restarts": 8} | limits
        self.state = MembershipState(ElasticLimits(**values), num_ranks)
        self.faults = faults
        self.results: dict[int, dict[str, torch.Tensor]] = {}
        self.errors: list[BaseException] = []
        self.deaths: list[tuple[int, str]] = []
        self.left: list[tuple[int, str]] = []
        self.refused: list[str] = []  # errors of ranks that could not join
        self.changed = threading.Condition()
        self.begun: list[Begin] = []
        self.pauses = self.can_lose = False
        self.end = ""  # reason for which the run has ended early
        self.num_started = 0
        self.spares = range(num_ranks, num_ranks + limits.get("spares", 0))
        self._fabrics: list[Fabric] = []
        self._stores: list[HashStore] = []
        self._threads: list[threading.Thread] = []

    def run(self, main: Callable[[ThreadMembers], dict[str, torch.Tensor]]) -> None:
        """Run `main` on all ranks, and on those that take their places."""
        self._main = main
        with self.changed:
            for _ in range(self.spares.stop):
                self._start()
        for thread in self._threads:  # the list grows
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), f"{thread.name} is stuck"
        for fabric in self._fabrics:
            fabric.close()
        if self.errors:
            raise self.errors[0]

    def execute(self, orders: list[Order]) -> None:
        """Execute what the membership has decided; the caller holds the lock."""
        for order in orders:
            if isinstance(order, Begin):
                self._fabrics.append(Fabric(len(order.members), MonotonicClock()))
                self._stores.append(HashStore())
                self.begun.append(order)
                self.can_lose = self.state.can_lose(order.members[0])
                self.pauses = False
            elif isinstance(order, Pause):
                self.pauses = True
            elif isinstance(order, Replace):
                self._start()
            elif isinstance(order, GiveUp):
                self.end = order.reason
        self.changed.notify_all()

    def group_of(self, rank: int, epoch: int) -> Group:
        """Return the group of an epoch on one of its members."""
        begun = self.begun[epoch]
        place = begun.members.index(rank)
        transport = self._fabrics[epoch].transports[place]
        transport.health.numbers = begun.members
        context = RankContext(
            place,
            len(begun.members),
            MonotonicClock(),
            Recorder(),
            transport.health,
            self._stores[epoch],
        )
        return Group.world(context, transport)

    def lose(self, rank: int, *, on_purpose: bool) -> None:
        """Tell the members of the present epoch that a rank has ended."""
        if self.begun and rank in self.begun[-1].members:
            place = self.begun[-1].members.index(rank)
            self._fabrics[-1].lose(
                place, "has already left" if on_purpose else "died", on_purpose=on_purpose
            )

    def _start(self) -> None:
        rank = self.num_started
        self.num_started += 1
        self.execute(self.state.started(rank))
        thread = threading.Thread(target=self._target, args=(rank,), name=f"rank-{rank}")
        thread.daemon = True
        self._threads.append(thread)
        thread.start()

    def _target(self, rank: int) -> None:
        try:
            self.results[rank] = self._main(ThreadMembers(self, rank))
        except Killed as death:
            with self.changed:
                self.deaths.append((rank, str(death)))
                self.execute(self.state.lost(rank))
                self.lose(rank, on_purpose=False)
        except Dismissed:
            with self.changed:
                self.lose(rank, on_purpose=True)
        except BaseException as exc:  # noqa: BLE001 - raised by `run`
            traceback.clear_frames(exc.__traceback__)  # they hold graphs, whose hooks hold errors
            with self.changed:
                self.errors.append(exc)
                self.execute(self.state.finished(rank))
                self.lose(rank, on_purpose=False)
        else:
            with self.changed:
                self.execute(self.state.finished(rank))
                self.lose(rank, on_purpose=True)


class Dismissed(BaseException):
    """Ends a thread that the run no longer needs."""


class ThreadMembers:
    """The members, as one rank sees them."""

    may_change = True
    has_lost_launcher = is_last_epoch = False

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self._epoch = -1
        self.leaves = False
        self.number = 1
        self._can_lose = False
        self._visits: dict[str, int] = {}
        self._group: Group | None = None
        HERE.members = self
        if not cluster.begun and rank not in cluster.spares:
            self.next_epoch(-1)

    @property
    def group(self) -> Group:
        assert self._group is not None
        return self._group

    @property
    def is_newcomer(self) -> bool:
        return self._epoch < 0

    @property
    def pauses(self) -> bool:
        return self.cluster.pauses

    @property
    def can_lose(self) -> bool:
        return self._can_lose

    def next_epoch(self, num_steps: int, directory: str = "") -> list[int]:  # noqa: ARG002
        cluster = self.cluster
        if self._group is not None:
            cluster._fabrics[self._epoch].lose(self.group.rank, "has already left", on_purpose=True)
            self._group.close()
        with cluster.changed:
            cluster.execute(cluster.state.ready(self.rank, self._epoch, num_steps))
            ended = cluster.changed.wait_for(
                lambda: (
                    cluster.state.is_over
                    or bool(cluster.end)
                    or self.rank in self._members()
                    or self.rank not in cluster.state.alive
                ),
                TIMEOUT_S,
            )
            assert ended, f"rank {self.rank} waits for an epoch after {self._epoch}"
            if self.rank not in self._members():
                raise Dismissed
            self._epoch = len(cluster.begun) - 1
            self._can_lose = cluster.can_lose
        self._group = cluster.group_of(self.rank, self._epoch)
        self.visit("join")
        return list(cluster.begun[self._epoch].num_steps)

    def finished_step(self, num_steps: int, weights: Any) -> None: ...

    checkpoint_step = -1

    def can_resume(self, num_steps: int, *, is_saved: bool) -> None: ...

    def leave(self, num_steps: int, reason: str) -> NoReturn:  # noqa: ARG002 - the others know
        cluster = self.cluster
        with cluster.changed:
            cluster.left.append((self.rank, reason))
            cluster.refused += map(str, filter(None, sys.exc_info()[1:2]))
            cluster.execute(cluster.state.lost(self.rank))
        raise Dismissed

    def offer_to_leave(self, num_steps: int, reason: str) -> None:  # noqa: ARG002
        cluster = self.cluster
        with cluster.changed:
            if cluster.state.can_lose(self.rank):
                cluster.left.append((self.rank, reason))
                cluster.execute(cluster.state.lost(self.rank))

    def visit(self, point: str) -> None:
        """Die if it is time."""
        number = self._visits[point] = self._visits.get(point, 0) + 1
        can_go = self.cluster.state.can_lose(self.rank)
        if self.cluster.faults.get((self.rank, point)) == number and can_go:
            raise Killed(point)
        if self.cluster.faults.get((self.rank, f"leave {point}")) == number and can_go:
            self.leaves = True

    def _members(self) -> tuple[int, ...]:
        begun = self.cluster.begun
        return begun[-1].members if len(begun) - 1 > self._epoch else ()


HERE = threading.local()


@contextmanager
def points_of_death(monkeypatch: Any) -> Iterator[None]:
    """End ranks at the points of `elastic_points`."""

    def visit(point: str) -> None:
        HERE.members.visit(point)

    with monkeypatch.context() as patch:
        add_points(patch.setattr, visit)
        yield


class Counted(nn.Module):
    """A layer whose result depends on a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * (1 + 0.01 * self.count)


def train(
    members: ThreadMembers,
    shards: int | None = 3,
    epochs: int = 2,
    after_backward: Callable[[ElasticTraining, nn.Module], object] = lambda *_: None,
    evaluate_every: int = 0,
    *,
    in_update: Callable[[ElasticTraining], object] = lambda _: None,
    change: Callable[[TrainingState], TrainingState] = lambda state: state,
    order: Mapping[str, Any] = {"shuffle": True},
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Train a small model, and return its state."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), Counted(), nn.Linear(5, 1))
    with torch.no_grad():
        for position, param in enumerate(model.parameters()):
            param.copy_(torch.linspace(-1.0, 1.0, param.numel()).view_as(param) + position + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 5], 0.9)
    x = torch.linspace(-2.0, 2.0, 128).sin().view(32, 4)  # micro-batches of 3, or 3 and 2
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, **({"batch_size": 3} | order))

    def update() -> None:
        members.visit("update")
        in_update(run)
        optimizer.step()
        scheduler.step()

    state = TrainingState(model, optimizer, {"scheduler": scheduler})
    whole: Replica = WholeModel(change(state))

    def evaluate() -> None:
        members.visit("evaluate")
        with torch.no_grad():
            sums = members.group.all_reduce(model(x).sum().double())
        members.visit("evaluated")
        means[run.num_steps] = (sums / members.group.size).float()

    means: dict[int, torch.Tensor] = {}
    options |= {"evaluation": Evaluation(evaluate if evaluate_every else None, evaluate_every)}
    run = ElasticTraining(members, whole, num_shards=shards, seed=3, update=update, **options)
    with run:
        for _ in run.epochs(epochs):
            for inputs, target in run.batches(loader):
                with run.step():
                    members.visit("forward")
                    loss = functional.mse_loss(model(inputs), target)
                    run.add_loss(loss)
                    loss.backward()
                    after_backward(run, model)
    assert shards is None or run.num_steps == epochs * -(-32 // (3 * shards))
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = {f"evaluation {step}": value for step, value in means.items()}
    return values | seen | {"loss": torch.tensor(run.loss)}


class Blocks(nn.Module):
    """Layers of several kinds in a row."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.blocks = nn.ModuleList([first, nn.ReLU(), Mlp(), nn.Dropout(0.2), nn.Linear(6, 1)])


class Mlp(nn.Module):
    """Layers that can be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(x).relu())
        return result


def build() -> tuple[Any, ...]:
    """Return a model, its optimizer, and a scheduler."""
    with SEEDING:
        torch.manual_seed(0)
        model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 5], 0.9)
    return model, optimizer, {"scheduler": scheduler}


def train_on_mesh(
    members: ThreadMembers,
    mesh: str,
    shard: int = 0,
    *,
    in_update: Callable[[ElasticTraining], object] = lambda _: None,
    after_step: Callable[[ElasticTraining], object] = lambda _: None,
    checkpoints: TrainingCheckpoints | None = None,
    batch_size: int = 6,
    batch_per_rank: RateRule | None = None,
    evaluate_every: int = 0,
    verify: int = 0,
    replace_slow: float = 0.0,
    shards: int = 4,
    epochs: int = 2,
    schedule: str = "1f1b",
    after_backward: Callable[[ElasticTraining], object] = lambda _: None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Train a small model on a mesh, and return its state."""
    plan = {r"\.up$": "column", r"\.down$": "row"} if "tp" in mesh else None
    values = {"clip": 0.5, "copies": True} | options
    part = MeshReplica(
        build,
        mesh_chooser(mesh),
        layers=lambda model: list(model.blocks),
        options={"shard": shard, "num_microbatches": 2, "plan": plan, "schedule": schedule},
        **values,
    )
    x = torch.linspace(-2.0, 2.0, 328).sin().view(82, 4)  # the last step has 6 and 4
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)

    def update() -> None:
        members.visit("update")
        in_update(run)
        run.optimizer.step()
        run.others["scheduler"].step()
        after_step(run)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        members.visit("loss")
        return functional.mse_loss(output, target)

    def evaluate() -> None:
        members.visit("evaluate")
        largest = torch.stack(
            [p.detach().max() for p in part.model.named_pieces().values() if p.numel()]
        )
        means[run.num_steps] = members.group.all_reduce(largest.max(), op="max")
        run.model.evaluate(x, x.sum(1, keepdim=True), loss=functional.mse_loss)
        members.visit("evaluated")

    means: dict[int, torch.Tensor] = {}
    run = ElasticTraining(
        members,
        part,
        num_shards=None if batch_per_rank else shards,
        seed=3,
        update=update,
        batch_per_rank=batch_per_rank,
        verify=verify,
        replace_slow=replace_slow,
        checkpoints=checkpoints,
        evaluation=Evaluation(evaluate if evaluate_every else None, evaluate_every),
    )
    with run:
        for _ in run.epochs(epochs):
            for inputs, target in run.batches(loader):
                with run.step():
                    members.visit("forward")
                    run.add_loss(run.model.step(inputs, target, loss=loss))
                    after_backward(run)
    assert batch_per_rank or run.num_steps == epochs * -(-82 // (batch_size * shards))
    names = run.model.named_pieces() if shard < 3 and plan is None else ()
    here = {name: run.model.model.get_parameter(name).detach().clone() for name in names}
    run.model.make_whole()
    for name, value in here.items():
        assert torch.equal(run.model.model.get_parameter(name), value), f"{name} is out of date"
    state = {name: tensor.clone() for name, tensor in part.state.model.state_dict().items()}
    seen = {f"evaluation {step}": value for step, value in means.items()}
    return state | seen | {"loss": torch.tensor(run.loss)}


def random_faults(
    seed: int, num_ranks: int, points: tuple[str, ...] = POINTS
) -> dict[tuple[int, str], int]:
    """Return the death of rank 1 at one of the points, and of others at random ones."""
    rng = random.Random(seed)
    others = {
        (rng.randrange(num_ranks + 2), rng.choice(points)): rng.randint(1, 5)
        for _ in range(seed % 4)
    }
    point = points[seed % len(points)]
    soon = {"state", "join", "enter", "divided"}
    return others | {(1, point): 1 if point in soon else rng.randint(1, 3)}

"""An oracle of engines: random models trained by every engine, and by one process.

A case is drawn from a seed: blocks that are unusual in one way each, an engine, ranks, micro-batches,
dtype and optimizer. One process runs all shards in order, adds up their gradients and steps. An engine
must have the same losses, gradients (None where None), weights and states of the optimizer, or raise
the same class of error.

    python tests/engine_oracle.py 17 18      # runs cases again and prints what differs
    python tests/engine_oracle.py 0:5000     # a range of seeds
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import braid
import braid.compat.horovod.torch as hvd
from braid import ps
from braid.comm import Group
from braid.compat.horovod import session
from braid.compat.horovod.environment import HorovodEnvironment
from braid.errors import CommError
from braid.parallel import data_parallel, sharding
from braid.parallel.hybrid import HybridParallel

WIDTH, ROWS, STEPS, VOCABULARY = 4, 2, 3, 12
DEADLINE_S = 30.0
Named = dict[str, "torch.Tensor | None"]


# Blocks. Each takes and returns rows of WIDTH numbers; two that follow each other may hand on a pair.


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Twice(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, 3)


class Sometimes(Plain):
    """Uses its layer for some batches only: on some ranks and in some micro-batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.detach().sum() > 0 else x * 0.5


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((WIDTH // 2,), 0.8 + 0.3j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.factor).flatten(-2)


class Counter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x)


class Views(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.layer(x).chunk(2, dim=-1)
        return torch.cat([other, one.expand_as(one)], dim=-1).t().contiguous().t()


class InPlace(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        y.mul_(0.5).add_(x)
        return y.tanh_()


class Embedded(nn.Module):
    """Looks up rows by numbers; `shift` makes some of them too large."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.detach()[..., 0] * 7).long().remainder(VOCABULARY) + self.shift
        return x + self.table(ids)


class Methods(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Fork(Plain):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return super().forward(x), {"skip": x}


class Join(Plain):
    def forward(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> torch.Tensor:
        x, others = pair
        return super().forward(x) + others["skip"]


class _Blind(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class NoGradient(nn.Module):
    """Its parameter is used, but the function returns None for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Blind.apply(x, self.weight)


class Dropped(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x))


class Autocast(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x)
        return torch.tanh(y.to(x.dtype))


class Checkpointed(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer.bias.requires_grad_(False)


class FrozenLate(Plain):
    """Its weight is frozen before the second step."""


class Held(nn.Module):
    """Blocks in a ModuleList, which is what sharding at stage 3 gathers and frees by."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "twice": Twice,
    "mlp": Mlp,
    "unused": Unused,
    "sometimes": Sometimes,
    "scalar": Scalar,
    "complex": Complex,
    "counter": Counter,
    "views": Views,
    "in place": InPlace,
    "embedded": Embedded,
    "out of range": partial(Embedded, VOCABULARY),
    "methods": Methods,
    "no gradient": NoGradient,
    "dropped": Dropped,
    "autocast": Autocast,
    "checkpointed": Checkpointed,
    "frozen": Frozen,
    "frozen late": FrozenLate,
}
OTHERS = ("again", "tied", "pair")  # the block before once more; with its weight; Fork and Join
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=0.1, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, eps=0.1),
}


@dataclass(frozen=True)
class Case:
    """One model, and the engine that trains it.

    Attributes:
        seed: Seed of weights and batches.
        engine: Name in ENGINES.
        size: Number of ranks.
        replicas: Number of ranks that have samples of their own.
        micro: Number of micro-batches of each of them.
        blocks: Names of blocks.
        dtype: Dtype of parameters and batches.
        optimizer: Name in OPTIMIZERS.
        options: Choices of the engine.
    """

    seed: int
    engine: str
    size: int
    replicas: int
    micro: int
    blocks: tuple[str, ...]
    dtype: torch.dtype
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Sequential:
        """Return the model with its first weights, the same everywhere."""
        blocks: list[nn.Module] = []
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            for name in self.blocks:
                if name == "again":
                    blocks.append(blocks[-1])
                elif name == "tied":
                    own, other = Plain(), next((b for b in blocks if type(b) is Plain), None)
                    if other is not None:
                        own.layer.weight = other.layer.weight
                    blocks.append(own)
                elif name == "pair":
                    blocks.extend([Fork(), Join()])
                else:
                    blocks.append(BLOCKS[name]())
        return nn.Sequential(*blocks).to(self.dtype)

    def first_names(self) -> dict[str, str]:
        """Return the first name of each parameter by all of its names: layers may be shared."""
        firsts: dict[int, str] = {}
        names = self.model().named_parameters(remove_duplicate=False)
        return {name: firsts.setdefault(id(param), name) for name, param in list(names)}

    def make_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](params)

    def batch(self, step: int, shard: int, micro: int) -> torch.Tensor:
        number = ((self.seed * STEPS + step) * 8 + shard) * 8 + micro
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        return x.to(self.dtype)

    def before(self, step: int, model: nn.Module) -> None:
        """Freeze what is frozen late."""
        if step == 1:
            for block in model.modules():
                if isinstance(block, FrozenLate):
                    block.layer.weight.requires_grad_(False)

    def draw(self, step: int, shard: int, micro: int) -> None:
        """Set the default generator to what this forward draws."""
        torch.manual_seed(((self.seed * STEPS + step) * 8 + shard) * 8 + micro)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def loss_of_pair(output: torch.Tensor, _target: Any) -> torch.Tensor:
    return loss_of(output)


@dataclass
class Outcome:
    """What a training gave.

    Attributes:
        losses: By (step, shard, micro-batch); some ranks have some.
        grads: By step: gradients before the optimizer's step; empty where an engine has pieces.
        weights: After the last step.
        states: Of the optimizer, by parameter and name.
        error: Class and text of the exception, if it failed.
        trace: Where it was raised.
    """

    losses: dict[tuple[int, ...], float] = field(default_factory=dict)
    grads: list[Named] = field(default_factory=list)
    weights: Named = field(default_factory=dict)
    states: dict[str, Named] = field(default_factory=dict)
    error: tuple[str, ...] = ()
    text: str = ""
    trace: str = ""

    def end_step(self, params: dict[str, nn.Parameter]) -> None:
        self.grads.append(
            {n: None if p.grad is None else p.grad.detach().clone() for n, p in params.items()}
        )

    def end(self, params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
        self.weights = {n: p.detach().clone() for n, p in params.items()}
        for name, param in params.items() if optimizer is not None else ():
            state = optimizer.state.get(param, {})
            self.states[name] = {
                key: value.detach().clone()
                for key, value in state.items()
                if isinstance(value, torch.Tensor)
            }


def reference(case: Case) -> Outcome:
    """Train in one process."""
    found = Outcome()
    with torch.random.fork_rng(), failures_of(found):
        model = case.model()
        params = dict(model.named_parameters())
        optimizer = case.make_optimizer(model.parameters())
        for step in range(STEPS):
            case.before(step, model)
            for shard in range(case.replicas):
                for k in range(case.micro):
                    case.draw(step, shard, k)
                    loss = loss_of(model(case.batch(step, shard, k)))
                    found.losses[step, shard, k] = loss.item()
                    (loss / (case.micro * case.replicas)).backward()
            for param in params.values() if case.engine == "horovod" else ():
                if param.grad is None and param.requires_grad:
                    param.grad = torch.zeros_like(param)  # as Horovod does
            found.end_step(params)
            optimizer.step()
            optimizer.zero_grad()
        found.end(params, optimizer)
    return found


@contextlib.contextmanager
def failures_of(found: Outcome, group: Group | None = None) -> Iterator[None]:
    """Write an exception into the outcome, and tell the other ranks of it."""
    try:
        yield
    except Exception as exc:  # noqa: BLE001 - an engine's
        found.error = tuple(kind.__name__ for kind in type(exc).__mro__)
        found.text = str(exc)
        found.trace = traceback.format_exc()
        if group is not None and not isinstance(exc, CommError):
            group.abort(f"{type(exc).__name__}: {exc}")


# Engines: `train(case, group, found)` on every rank.


def _own_loop(
    case: Case,
    found: Outcome,
    model: nn.Module,
    call: Callable[[torch.Tensor], torch.Tensor],
    optimizer: Any,
    shard: int,
    *,
    without_sync: Callable[[], Any] = contextlib.nullcontext,
    grads: bool = True,
    names: Callable[[], dict[str, nn.Parameter]] | None = None,
    step_of: Callable[[], None] | None = None,
    zero: Callable[[], None] | None = None,
) -> None:
    """The loop that users write around most engines."""
    names = names or (lambda: dict(model.named_parameters()))
    for step in range(STEPS):
        case.before(step, model)
        for k in range(case.micro):
            case.draw(step, shard, k)
            with without_sync() if k < case.micro - 1 else contextlib.nullcontext():
                loss = loss_of(call(case.batch(step, shard, k)))
                found.losses[step, shard, k] = loss.item()
                (loss / case.micro).backward()
        if grads:
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
            found.end_step(names())
        if hasattr(optimizer, "skip_synchronize") and grads:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            (step_of or optimizer.step)()
        (zero or optimizer.zero_grad)()


def train_ddp(case: Case, group: Group, found: Outcome) -> None:
    model = case.model()
    wrapper = braid.DistributedDataParallel(model, process_group=group, **case.options)
    optimizer = case.make_optimizer(wrapper.parameters())
    _own_loop(case, found, model, wrapper, optimizer, group.rank, without_sync=wrapper.no_sync)
    found.end(dict(model.named_parameters()), optimizer)


def train_optimizer(case: Case, group: Group, found: Outcome) -> None:
    model = case.model()
    optimizer = data_parallel.AveragingOptimizer(
        case.make_optimizer(model.parameters()),
        model.named_parameters(),
        process_group=group,
        gradient_accumulation_steps=case.micro,
    )
    _own_loop(case, found, model, model, optimizer, group.rank)
    found.end(dict(model.named_parameters()), optimizer)


def train_sharded(case: Case, group: Group, found: Outcome) -> None:
    model = case.model()
    options = dict(case.options)
    optimizer = case.make_optimizer(model.parameters())
    units = [model[i] for i in options.pop("units")]
    engine = sharding.shard_optimizer(
        optimizer, model, process_group=group, units=units or None, **options
    )
    _own_loop(
        *(case, found, model, model, optimizer, group.rank),
        without_sync=engine.no_sync,
        grads=False,
        zero=engine.zero_grad,
    )
    with engine.gathered():
        found.end(dict(model.named_parameters()), None)


def train_fsdp(case: Case, group: Group, found: Outcome) -> None:
    model = case.model()
    units = [model[i] for i in case.options["units"]]
    wrapper = braid.FullyShardedDataParallel(model, group, units=units or None)
    optimizer = case.make_optimizer(wrapper.parameters())
    _own_loop(
        *(case, found, model, wrapper, optimizer, group.rank),
        without_sync=wrapper.no_sync,
        grads=False,
        zero=wrapper.zero_grad,
    )
    with wrapper.sharding.gathered():
        found.end(dict(model.named_parameters()), None)


def train_pipeline(case: Case, group: Group, found: Outcome) -> None:
    pipeline = braid.Pipeline(
        case.model(), num_microbatches=case.micro, group=group, **case.options
    )
    _steps_of(case, found, pipeline, pipeline.parameters(), pipeline.zero_grad)


def _steps_of(case: Case, found: Outcome, engine: Any, params: Any, zero: Any) -> None:
    """The loop around engines that run micro-batches themselves."""
    optimizer = case.make_optimizer(params)
    firsts = case.first_names()
    named = {firsts[name]: param for name, param in engine.named_parameters()}
    for step in range(STEPS):
        case.before(step, engine)
        rows = torch.cat([case.batch(step, 0, k) for k in range(case.micro)])
        loss = engine.step(rows, rows, loss=loss_of_pair)
        found.losses[step, 0, -1] = loss.item()
        found.end_step(named)
        optimizer.step()
        zero()
    found.end(named, optimizer)


def train_tp(case: Case, group: Group, found: Outcome) -> None:
    model = case.model()
    whole = dict(model.named_parameters())
    inputs = case.batch(0, 0, 0) if case.options["by_graph"] else None
    plan = None if case.options["by_graph"] else _plan_of(model)
    braid.parallelize(model, group, plan, inputs=inputs)
    optimizer = case.make_optimizer(model.parameters())
    _own_loop(case, found, model, model, optimizer, 0, grads=False)
    braid.parallel.tensor_parallel.undivide(model, group)
    found.end(dict(model.named_parameters()), None)
    assert whole.keys() == found.weights.keys()


PLAN = {r"\.up$": "column", r"\.down$": "row", r"\.table$": "vocab"}


def train_hybrid(case: Case, group: Group, found: Outcome) -> None:
    model = Held(case.model())
    optimizer = case.make_optimizer(model.parameters())
    hybrid = HybridParallel(
        model,
        case.options["mesh"],
        group,
        layers=list(model.blocks),
        num_microbatches=case.micro,
        plan=_plan_of(model),
        shard=case.options["shard"],
    )
    hybrid.attach(optimizer)
    shard = hybrid.groups["dp"].rank
    for step in range(STEPS):
        case.before(step, model)
        rows = torch.cat([case.batch(step, shard, k) for k in range(case.micro)])
        loss = hybrid.step(rows, rows, loss=loss_of_pair)
        found.losses[step, -1, -1] = loss.item()
        optimizer.step()
        hybrid.zero_grad()
    hybrid.make_whole()
    found.end(dict(model.blocks.named_parameters()), None)


def _plan_of(model: nn.Module) -> dict[str, str]:
    names = [name for name, _ in model.named_modules()]
    return {key: kind for key, kind in PLAN.items() if any(re.search(key, n) for n in names)}


def train_servers(case: Case, group: Group, found: Outcome) -> None:
    with ps.join(group, case.options["servers"]) as node:
        model = case.model()
        net = ps.ParameterServer(
            model, node, partial(case.make_optimizer), where=case.options["where"]
        )
        if not node.is_worker:
            node.serve()
            return
        for step in range(STEPS):
            case.before(step, model)
            for k in range(case.micro):
                case.draw(step, node.number, k)
                with net.accumulate() if k < case.micro - 1 else contextlib.nullcontext():
                    loss = loss_of(net(case.batch(step, node.number, k)))
                    found.losses[step, node.number, k] = loss.item()
                    (loss / case.micro).backward()
            net.step()
        net.wait()
        found.end(dict(model.named_parameters()), None)


def train_horovod(case: Case, group: Group, found: Outcome) -> None:
    session.start(group, HorovodEnvironment(cycle_time_ms=1.0))
    try:
        model = case.model()
        optimizer = hvd.DistributedOptimizer(
            case.make_optimizer(model.parameters()),
            model.named_parameters(),
            backward_passes_per_step=case.micro,
        )
        _own_loop(case, found, model, model, optimizer, group.rank)
        found.end(dict(model.named_parameters()), optimizer)
    finally:
        hvd.shutdown()


def train_replicas(case: Case, _group: Group, found: Outcome) -> None:
    """Replicas of one process; each gets the rows of one shard."""
    model = case.model()
    replicas = braid.DataParallel(model, ["cpu"] * case.replicas)
    optimizer = case.make_optimizer(model.parameters())
    for step in range(STEPS):
        case.before(step, model)
        for k in range(case.micro):
            shards = [case.batch(step, shard, k) for shard in range(case.replicas)]
            loss = loss_of(replicas(torch.cat(shards)))
            (loss / case.micro).backward()
        found.end_step(dict(model.named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
    found.end(dict(model.named_parameters()), optimizer)


Train = Callable[[Case, Group, Outcome], None]
ENGINES: dict[str, Train] = {
    "ddp": train_ddp,
    "optimizer": train_optimizer,
    "sharded": train_sharded,
    "fsdp": train_fsdp,
    "pipeline": train_pipeline,
    "tp": train_tp,
    "hybrid": train_hybrid,
    "servers": train_servers,
    "horovod": train_horovod,
    "replicas": train_replicas,
}
SCHEDULES = (
    "gpipe", "1f1b", "breadth_first", "interleaved", "zb_h1", "zb_h2", "zbv", "v_half", "v_min",
)  # fmt: skip
MESHES = {"pp=2": 1, "tp=2": 1, "dp=2": 2, "pp=2,dp=2": 2, "dp=2,tp=2": 2, "pp=2,tp=2": 1}
# engines in which the default generator is that of each rank's own loop
DRAWS = ("ddp", "optimizer", "sharded", "fsdp", "servers", "horovod")
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 0.12}  # of the largest number of a tensor
# (engine, block) -> what the documented refusal says
REFUSED = {
    (
        "tp",
        "no gradient",
    ): "the backward of the autograd.Function _Blind, called at .*, would be lost",
    ("tp", ""): "no layer can be sharded over",
    ("hybrid", ""): "no parameter of the stages of ranks .* can be sharded",
}


def _pipeline(rng: random.Random, blocks: list[str]) -> tuple[list[str], dict[str, Any]]:
    schedule = rng.choice(SCHEDULES)
    options: dict[str, Any] = {"schedule": schedule}
    if not schedule.startswith("z"):
        options["recompute"] = rng.choice(["never", "always", "except_last"])
    stages = 8 if schedule in {"interleaved", "zbv", "v_half", "v_min"} else 4
    return blocks + ["plain"] * max(0, stages - len(blocks)), options


def _data_parallel(rng: random.Random, engine: str, num_blocks: int) -> dict[str, Any]:
    if engine == "ddp":
        caps, as_view = [None, 1e-5, 1e-4], rng.random() < 0.5
        return {"bucket_cap_mb": rng.choice(caps), "gradient_as_bucket_view": as_view}
    if engine not in {"sharded", "fsdp"}:
        return {}
    units = {"units": sorted(rng.sample(range(num_blocks), rng.randint(0, 2)))}
    return units | ({"stage": rng.choice([1, 2, 3])} if engine == "sharded" else {})


def case_of(seed: int) -> Case:
    """Draw a case."""
    rng = random.Random(seed)
    engine = rng.choice(list(ENGINES))
    options: dict[str, Any] = {}
    size = replicas = rng.choice([1, 2, 2, 3])
    micro = rng.choice([1, 1, 2, 3, 8])
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    names = [*BLOCKS, *OTHERS]
    if engine not in DRAWS:
        names.remove("dropped")
    if dtype is torch.bfloat16 or engine == "replicas":
        names.remove("complex")
    if dtype is torch.bfloat16:  # a rounded number may choose another row or branch
        names = [name for name in names if name not in {"embedded", "sometimes"}]
    if rng.random() < 0.9:
        names.remove("out of range")
    blocks = ["plain", *rng.choices(names, k=rng.randint(2, 4))]
    if engine == "pipeline":
        size, replicas = min(size, 2), 1
        micro = 2 * size if micro % size else max(micro, size)
        blocks, options = _pipeline(rng, blocks)
    elif engine == "tp":
        size, replicas = min(size, 2), 1
        options = {"by_graph": rng.random() < 0.5}
        if options["by_graph"]:  # a graph has no branches
            blocks = [name for name in blocks if name != "sometimes"]
        blocks[1:1] = ["mlp", "plain"]
    elif engine == "hybrid":
        mesh = rng.choice(list(MESHES))
        size, replicas = math.prod(int(n) for n in re.findall(r"\d", mesh)), MESHES[mesh]
        options = {"mesh": mesh, "shard": rng.choice([0, 0, 1, 2, 3]) if replicas > 1 else 0}
        micro = max(micro, 2)
        blocks += ["mlp"] * max(1, 4 - len(blocks))
    elif engine == "servers":
        options = {"servers": rng.choice([1, 2]), "where": rng.choice(["servers", "workers"])}
        size = 1 + options["servers"] + replicas
    elif engine == "replicas":
        size = 1
    else:
        options = _data_parallel(rng, engine, len(blocks))
    optimizer = rng.choice(list(OPTIMIZERS))
    return Case(seed, engine, size, replicas, micro, tuple(blocks), dtype, optimizer, options)


def run_cases(group: Group, seeds: list[int]) -> dict[int, Outcome]:
    """Run the cases on the ranks of `group`, each on a group of its own."""
    outcomes = {}
    torch.set_num_threads(1)
    for seed in seeds:
        case, found = case_of(seed), Outcome()
        own = group.split(0)
        assert own is not None
        own._deadline_s = DEADLINE_S
        try:
            with warnings.catch_warnings(), failures_of(found, own):
                warnings.simplefilter("ignore")
                ENGINES[case.engine](case, own, found)
        finally:
            own.close()
        outcomes[seed] = found
    return outcomes


def problems(case: Case, expected: Outcome, ranks: list[Outcome]) -> list[str]:
    """Compare what the ranks found with the outcome of one process."""
    errors = [rank for rank in ranks if rank.error]
    causes = [rank for rank in errors if "CommError" not in rank.error]
    if expected.error:
        if not errors:
            return [f"one process raises {expected.error[0]}: {expected.text}; the engine nothing"]
        name = expected.error[0]  # of the exception, or named in the engine's own
        same = [r for r in causes if name in r.error or f"{name}: " in r.text]
        return (
            []
            if same or not _unless_refused(case, causes or errors)
            else [f"raises {[(r.error[0], r.text) for r in errors]}, not {expected.error[0]}"]
        )
    if errors:
        return _unless_refused(case, causes or errors)
    tolerance = TOLERANCE[torch.bfloat16 if "autocast" in case.blocks else case.dtype]
    found = [
        f"rank {number}: {said}"
        for number, rank in enumerate(ranks)
        for said in _differences(expected, rank, tolerance)
    ]
    weights = {name for rank in ranks for name in rank.weights}
    if weights != expected.weights.keys():
        found.append(f"weights {sorted(expected.weights.keys() ^ weights)} are missing or new")
    return found


def _differences(expected: Outcome, rank: Outcome, tolerance: float) -> Iterator[str]:
    for key, loss in rank.losses.items():
        wanted = [
            value
            for other, value in expected.losses.items()
            if all(k in {-1, own} for k, own in zip(key, other, strict=True))
        ]
        mean = sum(wanted) / len(wanted)
        if not math.isclose(loss, mean, rel_tol=tolerance, abs_tol=1e-6):
            yield f"loss {key} is {loss}, not {mean}"
    pairs = {
        f"gradient of {name} in step {step}": (grad, expected.grads[step][name])
        for step, grads in enumerate(rank.grads)
        for name, grad in grads.items()
    }
    pairs |= {f"weight {n}": (weight, expected.weights[n]) for n, weight in rank.weights.items()}
    for name, state in rank.states.items():
        own = expected.states[name]
        pairs |= {
            f"state {key} of {name}": (state.get(key), own.get(key)) for key in {*state, *own}
        }
    for what, (value, wanted_value) in pairs.items():
        said = _differs(value, wanted_value, tolerance)
        if said:
            yield f"{what}: {said}"


def _differs(found: torch.Tensor | None, wanted: torch.Tensor | None, tolerance: float) -> str:
    if found is None or wanted is None:
        return "" if found is wanted else f"{_short(found)}, not {_short(wanted)}"
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"{found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    if not found.numel():
        return ""
    wide = torch.complex128 if found.is_complex() else torch.float64
    off = (found.to(wide) - wanted.to(wide)).abs().max().item()
    scale = max(wanted.to(wide).abs().max().item(), 0.05)
    return "" if off <= tolerance * scale else f"off by {off:.3g} of {scale:.3g}"


def _short(x: torch.Tensor | None) -> str:
    return "None" if x is None else f"values up to {x.abs().max().item():.3g}"


def _unless_refused(case: Case, errors: list[Outcome]) -> list[str]:
    for (engine, block), text in REFUSED.items():
        known = engine == case.engine and (not block or block in case.blocks)
        if known and any(re.search(text, rank.text) for rank in errors):
            return []
    where = "\n".join(errors[0].trace.strip().splitlines()[-9:-1])
    return [f"raises {errors[0].error[0]}: {errors[0].text[:600]}\n{where}"]


def check(
    run: Callable[..., list[Any]], seeds: list[int], at_once: int = 40
) -> dict[int, list[str]]:
    """Return what differs, by seed.

    Args:
        run: `run(size, main, *args)` starts ranks.
        seeds: Seeds of cases.
        at_once: Number of cases of one job.
    """
    found = {}
    by_size: dict[int, list[int]] = {}
    for seed in seeds:
        by_size.setdefault(case_of(seed).size, []).append(seed)
    for size, own in sorted(by_size.items()):
        for first in range(0, len(own), at_once):
            part = own[first : first + at_once]
            ranks = run(size, run_cases, part)
            for seed in part:
                case = case_of(seed)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    said = problems(case, reference(case), [rank[seed] for rank in ranks])
                if said:
                    found[seed] = [str(case), *said]
    return found


def main() -> None:
    from support.pool import ProcessPool

    torch.set_num_threads(1)
    seeds: list[int] = []
    for word in sys.argv[1:]:
        first, _, last = word.partition(":")
        seeds += range(int(first), int(last)) if last else [int(first)]
    bad = 0
    with ProcessPool() as pool:
        for first in range(0, len(seeds), 200):
            part = seeds[first : first + 200]
            try:
                found = check(partial(pool.run, timeout_s=1200), part, 1 if len(seeds) < 20 else 40)
            except Exception:
                print(f"--- seeds {part[0]} to {part[-1]}", file=sys.stderr)
                raise
            for said in found.values():
                print("\n  ".join(said[:6]), flush=True)
            bad += len(found)
            print(f"{first + len(part)} of {len(seeds)} cases", file=sys.stderr, flush=True)
    print(f"{bad} of {len(seeds)} cases differ")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

"""What programs do around a step, under every engine: the same numbers as in one process, or an error.

A habit is something that a loop does between backward and step, or after a step: clip by one of torch's
functions, scale gradients, change weights, evaluate, load an earlier state. An engine must give what one
process gives (to 1e-9 in float64), or raise a `ConfigError` or warn; nothing may differ without a word.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import braid
import braid.compat.horovod.torch as hvd
from braid import ps
from braid.comm import Group
from braid.compat.horovod import session
from braid.compat.horovod.environment import HorovodEnvironment
from braid.errors import CommError, ConfigError
from braid.parallel import data_parallel, sharding, tensor_parallel
from braid.parallel.gradients import AgreedGradScaler
from braid.parallel.hybrid import HybridParallel

WIDTH, ROWS, STEPS = 4, 4, 4
DEADLINE_S = 20.0
RANKS: list[Group] = []  # of the engine that runs in this process


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block() for _ in range(4)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int, shard: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + shard)
    return 3 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(output: torch.Tensor, _target: Any = None) -> torch.Tensor:
    return output.square().mean()


@dataclass
class Loop:
    """The parts of a training that habits use.

    Attributes:
        model: What the program calls `state_dict` of.
        params: The parameters as the program sees them.
        optimizer: The optimizer; None if it runs elsewhere.
        backward: Computes the gradients of a step, with a factor for the loss.
        step, zero: Steps; drops gradients.
        evaluate: Returns the loss of a batch.
        clip: The engine's own clipping; torch's if gradients are whole.
        scaler: Makes the engine's own gradient scaler.
        synchronize: Waits for gradients in flight, for programs of Horovod.
        seen: Numbers that the program has read.
    """

    model: nn.Module
    params: Callable[[], list[nn.Parameter]]
    optimizer: Any
    backward: Callable[[int, Callable[[torch.Tensor], torch.Tensor]], None]
    step: Callable[[], None]
    zero: Callable[[], None]
    evaluate: Callable[[torch.Tensor], float]
    clip: Callable[[float], object] | None = None
    scaler: Callable[[], torch.amp.GradScaler] | None = None
    synchronize: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    seen: list[float] = field(default_factory=list)


Habit = Callable[[Loop], None]


def _plain(loop: Loop, after_backward: Any = None, after_step: Any = None) -> None:
    for step in range(STEPS):
        loop.backward(step, lambda loss: loss)
        if after_backward is not None:
            after_backward(loop, step)
        loop.step()
        loop.zero()
        if after_step is not None:
            after_step(loop, step)


def between(act: Callable[[Loop, int], object]) -> Habit:
    return partial(_plain, after_backward=act)


def after(act: Callable[[Loop, int], object]) -> Habit:
    return partial(_plain, after_step=act)


def _clip_by_engine(loop: Loop) -> None:
    for step in range(STEPS):
        loop.backward(step, lambda loss: loss)
        context = contextlib.nullcontext() if loop.synchronize is None else loop.synchronize()
        with context:
            if loop.clip is None:
                nn.utils.clip_grad_norm_(loop.params(), 0.1)
            else:
                loop.clip(0.1)
            loop.step()
        loop.zero()


def _torch_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0)


def _scaled(
    loop: Loop, make: Callable[[Loop], torch.amp.GradScaler], *, early: bool = False
) -> None:
    """The scale overflows in step 1 on the rank that has the first element of the first bias only."""
    scaler = make(loop)
    for step in range(STEPS):
        overflows = step == 1 and scaler.is_enabled()
        loop.backward(step, scaler.scale)
        waits = loop.synchronize is not None and not early
        with loop.synchronize() if waits else contextlib.nullcontext():
            for group in loop.optimizer.param_groups if overflows else ():
                for param in group["params"]:
                    if getattr(param, "is_marked", False) and param.grad is not None:
                        param.grad.view(-1)[:1] = torch.inf
            scaler.step(loop.optimizer)
        scaler.update()
        loop.zero()
    loop.seen.append(scaler.get_scale())


def _add_noise(loop: Loop, _step: int) -> None:
    grads = [param.grad for param in loop.params()]
    assert any(grad is not None for grad in grads), "a program sees at least one gradient"
    for grad in grads:
        if grad is not None:
            grad.add_(0.01)


@torch.no_grad()
def _clamp(loop: Loop, _step: int) -> None:
    for param in loop.params():
        param.clamp_(-0.2, 0.2)


def _clamp_data(loop: Loop, _step: int) -> None:
    for param in loop.params():
        param.data = param.data.clamp(-0.2, 0.2)


def _restore(loop: Loop) -> None:
    best: dict[str, Any] = {}

    def act(loop: Loop, step: int) -> None:
        if step == 0:
            best.update(copy.deepcopy(dict(loop.model.state_dict())))
        if step == 2:
            loop.model.load_state_dict(best)

    _plain(loop, after_step=act)


def _reload_optimizer(loop: Loop, step: int) -> None:
    if step == 1:
        loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))


def _schedule(loop: Loop) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.5)
    _plain(loop, after_step=lambda *_: scheduler.step())


def _freeze(loop: Loop, step: int) -> None:
    if step == 0:
        for name, param in loop.model.named_parameters():
            if name.removeprefix("module.").removeprefix("blocks.").startswith("1."):
                param.requires_grad_(requires_grad=False)


def _zero_by(zero: Callable[[Loop], object], loop: Loop) -> None:
    loop.zero = partial(zero, loop)
    _plain(loop)


def _drop(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        param.grad = None


def _in_groups(loop: Loop) -> list[nn.Parameter]:
    return [param for group in loop.optimizer.param_groups for param in group["params"]]


def _renew(params: Callable[[Loop], Iterable[nn.Parameter]], loop: Loop, step: int) -> None:
    """Go on with a new optimizer, as programs do after they have found a learning rate."""
    if step == 1:
        optimizer = loop.optimizer = _optimizer(params(loop))
        loop.step, loop.zero = optimizer.step, optimizer.zero_grad


def _add_group(loop: Loop) -> None:
    """Train the last layer from step 2 on."""
    late = [p for n, p in loop.model.named_parameters() if n.endswith("3.down.weight")]
    for group in loop.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if not getattr(p, "is_late", False)]
    zero = loop.zero

    def drop() -> None:
        zero()
        _drop(late)

    def act(loop: Loop, step: int) -> None:
        if step == 1 and late:
            loop.optimizer.add_param_group({"params": late})

    loop.zero = drop
    _plain(loop, after_step=act)


def _penalize(loop: Loop) -> None:
    for step in range(STEPS):
        penalty = partial(_with_penalty, list(loop.model.parameters()))
        loop.backward(step, penalty)
        loop.step()
        loop.zero()


def _with_penalty(params: list[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
    return loss + 0.01 * sum(param.square().sum() for param in params)


def _accumulate(loop: Loop) -> None:
    for step in range(STEPS):
        for half in (step, step + 10):
            loop.backward(half, lambda loss: loss / 2)
        loop.step()
        loop.zero()


def _unfreeze(loop: Loop, step: int) -> None:
    """Train a layer in the first step and from the fourth on."""
    for name, param in loop.model.named_parameters():
        if step in (0, 2) and name.removeprefix("blocks.").startswith("1."):
            param.requires_grad_(step == 2)


def _replace_grads(loop: Loop, _step: int) -> None:
    for param in loop.params():
        if param.grad is not None:
            param.grad = param.grad * 0.5


def _set_grads(loop: Loop) -> None:
    """Step by gradients that the program has made itself."""
    for step in range(STEPS):
        loop.backward(step, lambda loss: loss)
        loop.zero()
        for param in loop.model.parameters():
            param.grad = torch.full_like(param, 0.1)
        loop.step()
        loop.zero()


def _hook_gradients(loop: Loop) -> None:
    for param in loop.model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    _plain(loop)


def _step_in_backward(loop: Loop) -> None:
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in loop.model.parameters()}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    with contextlib.ExitStack() as stack:  # hooks that refer to parameters would never be freed
        for param in optimizers:
            stack.callback(param.register_post_accumulate_grad_hook(step).remove)
        for number in range(STEPS):
            loop.backward(number, lambda loss: loss)


def _average_weights(loop: Loop) -> None:
    averages = copy.deepcopy(loop.model)

    @torch.no_grad()
    def update(loop: Loop, _step: int) -> None:
        for average, param in zip(averages.parameters(), loop.model.parameters(), strict=True):
            average.lerp_(param, 0.5)

    _plain(loop, after_step=update)
    with torch.no_grad():
        loop.seen.append(loss_of(averages(batch(90, 0))).item())


def _call_the_model(loop: Loop, step: int) -> None:
    with torch.no_grad():
        loop.seen.append(loss_of(loop.model(batch(90 + step, 0))).item())


def _clip_by_total_norm(loop: Loop, _step: int) -> None:
    norm = nn.utils.get_total_norm([p.grad for p in loop.params() if p.grad is not None])
    nn.utils.clip_grads_with_norm_(loop.params(), 0.1, norm)


def _optimize_by(make: Callable[[Any], torch.optim.Optimizer], loop: Loop, step: int) -> None:
    """Go on with an optimizer that needs more than elements."""
    if step == 1:
        optimizer = loop.optimizer = make(list(loop.params()))
        loop.zero = optimizer.zero_grad
        loss = torch.zeros((), dtype=torch.float64)
        loop.step = partial(optimizer.step, lambda: loss)


def _lbfgs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.05, max_iter=1)


def _adafactor(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.05)


def _load_file(loop: Loop, *, of_rank_0: bool) -> None:
    """Write the states by torch in step 0, on each rank or on rank 0, and load them after step 2."""
    saved: list[bytes] = []

    def act(loop: Loop, step: int) -> None:
        if step == 0:
            file = io.BytesIO()
            torch.save([loop.model.state_dict(), loop.optimizer.state_dict()], file)
            is_shared = of_rank_0 and RANKS
            saved.append(
                RANKS[0].objects.broadcast(file.getvalue()) if is_shared else file.getvalue()
            )
        if step == 2:
            error = ""
            try:
                model, optimizer = torch.load(io.BytesIO(saved[0]), weights_only=True)
                loop.model.load_state_dict(model)
                loop.optimizer.load_state_dict(optimizer)
            except (ConfigError, RuntimeError, ValueError) as exc:
                error = str(exc)
            errors = RANKS[0].objects.all_gather(error) if RANKS else [error]
            if text := next(filter(None, errors), ""):  # the ranks that could load it would wait
                raise ConfigError(text)

    _plain(loop, after_step=act)


def _load_whole_optimizer(loop: Loop, step: int) -> None:
    """Load the state of an optimizer of the whole model."""
    if step == 1:
        model = Net()
        optimizer = _optimizer(model.parameters())
        loss_of(model(batch(0, 0))).backward()
        optimizer.step()
        loop.optimizer.load_state_dict(optimizer.state_dict())


def _assign(loop: Loop, step: int) -> None:
    if step == 1:
        state = {name: x.detach().clone() for name, x in loop.model.state_dict().items()}
        loop.model.load_state_dict(state, assign=True)


HABITS: dict[str, Habit] = {
    "plain": _plain,
    "drops by the model": partial(_zero_by, lambda loop: loop.model.zero_grad()),
    "drops by the optimizer": partial(_zero_by, lambda loop: loop.optimizer.zero_grad()),
    "drops by parameter": partial(_zero_by, lambda loop: _drop(loop.params())),
    "drops by group": partial(_zero_by, lambda loop: _drop(_in_groups(loop))),
    "makes a new optimizer": after(partial(_renew, lambda loop: loop.params())),
    "makes a new optimizer of the groups": after(partial(_renew, _in_groups)),
    "adds a group": _add_group,
    "assigns a state": after(_assign),
    "torch clips by norm": between(lambda loop, _: nn.utils.clip_grad_norm_(loop.params(), 0.1)),
    "torch clips by value": between(lambda loop, _: nn.utils.clip_grad_value_(loop.params(), 0.05)),
    "the engine clips": _clip_by_engine,
    "torch scales": partial(_scaled, make=lambda _: _torch_scaler()),
    "torch scales early": partial(_scaled, make=lambda _: _torch_scaler(), early=True),
    "a disabled scaler": partial(
        _scaled, make=lambda _: torch.amp.GradScaler("cpu", enabled=False), early=True
    ),
    "the engine scales": partial(_scaled, make=lambda loop: (loop.scaler or _torch_scaler)()),
    "adds noise": between(_add_noise),
    "clamps weights": after(_clamp),
    "replaces data": after(_clamp_data),
    "evaluates": after(lambda loop, step: loop.seen.append(loop.evaluate(batch(90 + step, 0)))),
    "restores weights": _restore,
    "reloads the optimizer": after(_reload_optimizer),
    "schedules the rate": _schedule,
    "freezes a layer": after(_freeze),
    "freezes and unfreezes a layer": after(_unfreeze),
    "penalizes weights": _penalize,
    "accumulates": _accumulate,
    "replaces gradients": between(_replace_grads),
    "sets gradients": _set_grads,
    "hooks gradients": _hook_gradients,
    "steps in backward": _step_in_backward,
    "averages weights": _average_weights,
    "calls the model": after(_call_the_model),
    "clips by the total norm": between(_clip_by_total_norm),
    "optimizes by L-BFGS": after(partial(_optimize_by, _lbfgs)),
    "optimizes by Adafactor": after(partial(_optimize_by, _adafactor)),
    "loads the file of rank 0": partial(_load_file, of_rank_0=True),
    "loads a file of each rank": partial(_load_file, of_rank_0=False),
    "loads a whole optimizer": after(_load_whole_optimizer),
}


def _optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def _loop(
    model: nn.Module,
    call: Callable[..., Any],
    optimizer: Any,
    shards: Iterable[int],
    **options: Any,
) -> Loop:
    """The loop of a program that calls backward itself, on a mean over `shards`."""
    shards = list(shards)

    def backward(step: int, scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for shard in shards:
            (scale(loss_of(call(batch(step, shard)))) / len(shards)).backward()

    def evaluate(x: torch.Tensor) -> float:
        model.eval()
        with torch.no_grad():
            loss = loss_of(call(x)).item()
        model.train()
        return loss

    options = {"step": partial(_step, optimizer), "zero": partial(_zero, optimizer)} | options
    return Loop(
        *(model, lambda: list(model.parameters()), optimizer, backward),
        evaluate=evaluate,
        **options,
    )


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step; schedulers replace the method, so it is looked up now."""
    optimizer.step()


def _zero(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def _mark(named: Iterable[tuple[str, Any]]) -> None:
    """Mark the parameter whose gradient overflows, and the one that is trained late."""
    for name, param in named:
        param.is_marked = name.endswith("0.up.bias")
        param.is_late = name.endswith("3.down.weight")


def reference(habit: str, num_shards: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in one process; return the weights and the numbers that were seen."""
    model = Net()
    _mark(model.named_parameters())
    loop = _loop(model, model, _optimizer(model.parameters()), range(num_shards))
    HABITS[habit](loop)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, loop.seen


Outcome = tuple[dict[str, torch.Tensor], list[float]]


def _weights(model: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + name: p.detach().clone() for name, p in model.named_parameters()}


def run_ddp(act: Habit, group: Group) -> Outcome:
    model = Net()
    _mark(model.named_parameters())
    wrapper = braid.DistributedDataParallel(model, process_group=group)
    loop = _loop(model, wrapper, _optimizer(model.parameters()), [group.rank])
    act(loop)
    return _weights(model), loop.seen


def run_averaging(act: Habit, group: Group) -> Outcome:
    model = Net()
    _mark(model.named_parameters())
    optimizer = data_parallel.AveragingOptimizer(
        _optimizer(model.parameters()), model.named_parameters(), process_group=group
    )
    loop = _loop(model, model, optimizer, [group.rank])
    act(loop)
    return _weights(model), loop.seen


def run_sharded(act: Habit, group: Group, *, stage: int) -> Outcome:
    model = Net()
    optimizer = _optimizer(model.parameters())
    engine = sharding.shard_optimizer(optimizer, model, process_group=group, stage=stage)
    _mark((record.name, owned) for record, owned in engine.owned())
    loop = _loop(
        *(model, model, optimizer, [group.rank]),
        clip=engine.clip_grad_norm_,
        zero=engine.zero_grad,
        scaler=lambda: sharding.ShardedGradScaler(engine, init_scale=8.0),
    )
    act(loop)
    with engine.gathered():
        return _weights(model), loop.seen


def run_fsdp(act: Habit, group: Group) -> Outcome:
    model = Net()
    wrapper = braid.FullyShardedDataParallel(model, group, units=list(model.blocks))
    optimizer = _optimizer(wrapper.parameters())
    _mark((record.name, owned) for record, owned in wrapper.sharding.owned())
    loop = _loop(
        *(model, wrapper, optimizer, [group.rank]),
        clip=wrapper.clip_grad_norm_,
        scaler=lambda: sharding.ShardedGradScaler(wrapper.sharding, init_scale=8.0),
    )
    act(loop)
    with wrapper.gathered():
        return _weights(model), loop.seen


def _by_engine(engine: Any, model: Any, optimizer: Any, groups: list[Group], shard: int) -> Loop:
    """The loop around an engine that computes the gradients of a step itself."""

    def backward(step: int, scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = batch(step, shard)
        engine.step(x, x, loss=lambda y, _: scale(loss_of(y)))

    return Loop(
        model,
        lambda: list(engine.parameters()),
        optimizer,
        backward,
        partial(_step, optimizer),
        engine.zero_grad,
        lambda x: engine.evaluate(x, x, loss=loss_of).item(),
        clip=engine.clip_grad_norm_,
        scaler=lambda: AgreedGradScaler(groups, init_scale=8.0),
    )


def run_pipeline(act: Habit, group: Group) -> Outcome:
    model = Net()
    _mark(model.named_parameters())
    pipeline = braid.Pipeline(nn.Sequential(*model.blocks), num_microbatches=2, group=group)
    optimizer = _optimizer(pipeline.parameters())
    loop = _by_engine(pipeline, pipeline, optimizer, [group], 0)
    act(loop)
    return _weights(pipeline, "blocks."), loop.seen


PLAN = {r"up$": "column", r"down$": "row"}


def run_tensor_parallel(act: Habit, group: Group) -> Outcome:
    model = Net()
    braid.parallelize(model, group, PLAN)
    _mark(model.named_parameters())
    loop = _loop(
        *(model, model, _optimizer(model.parameters()), [0]),
        clip=lambda norm: tensor_parallel.clip_grad_norm_(model, norm, group),
        scaler=lambda: AgreedGradScaler([group], init_scale=8.0),
    )
    act(loop)
    tensor_parallel.undivide(model, group)
    return _weights(model), loop.seen


def run_hybrid(act: Habit, group: Group, *, mesh: str, shard: int = 0) -> Outcome:
    model = Net()
    optimizer = _optimizer(model.parameters())
    plan = PLAN if "tp" in mesh else None
    hybrid = HybridParallel(
        *(model, mesh, group),
        layers=list(model.blocks),
        num_microbatches=2,
        plan=plan,
        shard=shard,
    )
    hybrid.attach(optimizer)
    _mark([*model.named_parameters(), *hybrid.named_pieces().items()])
    loop = _by_engine(
        *(hybrid, model, optimizer, list(hybrid.groups.values())), hybrid.groups["dp"].rank
    )
    act(loop)
    hybrid.make_whole()
    return _weights(model), loop.seen


def run_horovod(act: Habit, group: Group) -> Outcome:
    session.start(group, HorovodEnvironment(cycle_time_ms=1.0))
    try:
        model = Net()
        _mark(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(
            _optimizer(model.parameters()), model.named_parameters()
        )

        @contextlib.contextmanager
        def synchronized() -> Any:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                yield

        loop = _loop(model, model, optimizer, [group.rank], synchronize=synchronized)
        act(loop)
        return _weights(model), loop.seen
    finally:
        hvd.shutdown()


def run_replicas(act: Habit, _group: Group) -> Outcome:
    model = Net()
    _mark(model.named_parameters())
    loop = _loop(
        *(model, braid.DataParallel(model, ["cpu"] * 2), _optimizer(model.parameters()), [0])
    )
    act(loop)
    return _weights(model), loop.seen


def run_servers(act: Habit, group: Group) -> Outcome:
    """One server, one worker, and the scheduler."""
    with ps.join(group, 1) as node:
        model = Net()
        net = ps.ParameterServer(model, node, _optimizer)
        if not node.is_worker:
            node.serve()
            return {}, []
        loop = _loop(model, net, None, [0], step=net.step, zero=model.zero_grad)
        act(loop)
        net.wait()
        return _weights(model), loop.seen


@dataclass(frozen=True)
class Engine:
    """An engine, with its ranks, and the number of shards that one process adds up."""

    run: Callable[[Habit, Group], Outcome]
    num_shards: int = 1
    size: int = 2


ENGINES = {
    "ddp": Engine(run_ddp, 2),
    "averaging": Engine(run_averaging, 2),
    "stage 1": Engine(partial(run_sharded, stage=1), 2),
    "stage 2": Engine(partial(run_sharded, stage=2), 2),
    "stage 3": Engine(partial(run_sharded, stage=3), 2),
    "stage 1 alone": Engine(partial(run_sharded, stage=1), 1, 1),
    "stage 3 alone": Engine(partial(run_sharded, stage=3), 1, 1),
    "fsdp": Engine(run_fsdp, 2),
    "pipeline": Engine(run_pipeline),
    "pipeline alone": Engine(run_pipeline, size=1),
    "tensor parallel": Engine(run_tensor_parallel),
    "mesh dp=2": Engine(partial(run_hybrid, mesh="dp=2"), 2),
    "mesh dp=2, stage 1": Engine(partial(run_hybrid, mesh="dp=2", shard=1), 2),
    "mesh dp=2, stage 3": Engine(partial(run_hybrid, mesh="dp=2", shard=3), 2),
    "mesh pp=2": Engine(partial(run_hybrid, mesh="pp=2")),
    "mesh tp=2": Engine(partial(run_hybrid, mesh="tp=2")),
    "horovod": Engine(run_horovod, 2),
    "horovod alone": Engine(run_horovod, 1, 1),
    "servers": Engine(run_servers, size=3),
    "replicas": Engine(run_replicas, size=1),
}
OF_SERVERS = (
    *("plain", "torch clips by norm", "torch clips by value", "clips by the total norm"),
    *("clamps weights", "replaces data", "restores weights", "freezes and unfreezes a layer"),
    *("penalizes weights", "accumulates", "hooks gradients", "steps in backward"),
    *("averages weights", "calls the model", "adds noise", "replaces gradients"),
    *("sets gradients", "drops by parameter", "evaluates"),
)
DIVIDED = r"stage \d$|fsdp|pipeline$|tensor|pp=2|tp=2"
PIECES, SHARDED = r"stage [12]( alone)?$", r"stage \d( alone)?$|fsdp"
HOROVOD = "horovod( alone)?$"
# (habits, engines, text of an error or a warning); the first that fits holds, and everything else must give the same numbers
SAID = [
    (
        "(torch )?clips by .*|adds noise|(replaces|sets) gradients|accumulates|steps in backward",
        "servers",
        r"`with model.accumulate\(\):`",
    ),
    ("clamps weights|replaces data|restores weights", "servers", "has been changed on this worker"),
    (
        "torch clips by (norm|value)|clips by the total norm|torch scales early|optimizes by L-BFGS",
        "horovod$",
        r"call optimizer.synchronize\(\) before",
    ),
    (
        "torch scales early|sets gradients",
        HOROVOD,
        "zero_grad.. was called between backward and step",
    ),
    (
        "makes a new optimizer.*|accumulates|steps in backward|optimizes by .*",
        HOROVOD,
        "got a gradient in more than 1 backward passes",
    ),
    ("adds a group", f"averaging|{HOROVOD}", "added to a wrapped optimizer would not"),
    ("assigns a state", "ddp", "have been replaced or added since"),
    ("assigns a state", "tp=2|tensor", "would replace the shards of parameters"),
    ("assigns a state|replaces data", SHARDED, "moved, converted or replaced after"),
    (
        "(assigns|restores) .*|averages weights|calls the model",
        "pp=2",
        "uses old values of the layers",
    ),
    ("averages weights|calls the model", "pipeline( alone)?$", "a Pipeline cannot be called"),
    ("averages weights", f"{SHARDED}|tensor|tp=2", "sharded model cannot be copied"),
    ("restores weights", "stage 3$|fsdp", "has only this rank's flat pieces"),
    ("torch clips by norm", f"{DIVIDED}|stage 1 alone", "call .*clip_grad_norm_.* instead"),
    ("torch clips by value", PIECES, "pass the optimizer's parameters to clip_grad_value_"),
    (
        "clips by the total norm",
        f"{DIVIDED}|stage 1 alone",
        "call .*clip_grad_norm_.* instead, which returns",
    ),
    ("torch scales( early)?", DIVIDED, "use braid.parallel.*GradScaler.* instead"),
    ("adds noise|replaces gradients", PIECES, "is stored in pieces, one on each rank"),
    ("sets gradients", PIECES, "has a gradient that this step would not use"),
    ("steps in backward", "ddp|averaging", "were set to None inside of backward"),
    ("steps in backward", SHARDED, "post-accumulate hooks of .* would run without a gradient"),
    (
        "steps in backward",
        "pipeline( alone)?$|mesh [a-z]*=2$",
        "a hook has changed a parameter|modified by an inplace operation",
    ),
    ("optimizes by L-BFGS", f"{DIVIDED}|stage [13] alone", "LBFGS (takes|cannot)"),
    (
        "makes a new optimizer.*|optimizes by Adafactor",
        PIECES,
        "gradients are stored in its shards",
    ),
    ("optimizes by Adafactor", "stage 3( alone)?$|fsdp", "uses shapes or norms of whole"),
    ("optimizes by Adafactor", "tensor|tp=2", "uses the shapes or norms of whole parameters"),
    ("penalizes weights", "pipeline$|pp=2", "like a penalty on weights"),
    (
        "loads the file of rank 0",
        r"stage \d$|fsdp|tensor|tp=2",
        r"has the part '(tensor )?shard 0 of 2' of a model, but this rank",
    ),
    ("loads the file of rank 0", "pp=2", "has old values of blocks.2.up, since pipeline rank 0"),
    ("loads the file of rank 0", "pipeline$", "Missing key"),
    ("loads a whole optimizer", r"stage \d$|fsdp|tensor|tp=2", "a parameter with a part of shape"),
    ("loads a whole optimizer", r"stage \d alone", "size of tensor a"),
    ("loads a whole optimizer", "pipeline$", "doesn't match the size of optimizer's group"),
]


def said_for(habit: str, engine: str) -> str | None:
    """Return what an engine must say about a habit; None if it must give the same numbers."""
    fits = (
        text
        for habits, engines, text in SAID
        if re.search(engines, engine) and re.fullmatch(habits, habit)
    )
    return next(fits, None)


def habits_of(engine: str) -> tuple[str, ...]:
    return OF_SERVERS if engine == "servers" else tuple(HABITS)


def run_all(group: Group, engine: str) -> dict[str, tuple[Outcome | None, str]]:
    """Train with each habit; return weights, seen numbers, and the text of errors and warnings."""
    found = {}
    torch.set_num_threads(1)
    for habit in habits_of(engine):
        own = group.split(0)
        assert own is not None
        own.set_deadline(DEADLINE_S)
        RANKS[:] = [own]
        outcome: Outcome | None = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                outcome = ENGINES[engine].run(HABITS[habit], own)
            except (ConfigError, AssertionError, RuntimeError, ValueError) as exc:
                own.abort(f"{type(exc).__name__}: {exc}")
                error = str(exc)
            except CommError as exc:  # of a rank that was refused
                error = str(exc)
            else:
                error = ""
        RANKS.clear()
        own.close()
        group.barrier()
        texts = [error, *(str(w.message) for w in caught if w.category is UserWarning)]
        found[habit] = outcome, "\n".join(texts)
    return found


def problems(engine: str, ranks: list[dict[str, tuple[Outcome | None, str]]]) -> list[str]:
    """Return what differs from one process without a word, or is refused without a reason."""
    found = []
    for habit in habits_of(engine):
        weights, seen = reference(habit, ENGINES[engine].num_shards)
        wanted = said_for(habit, engine)
        texts = [rank[habit][1] for rank in ranks]
        outcomes = [rank[habit][0] for rank in ranks]
        if wanted is not None:
            # a rank may be stopped by the refusal of another, and a rank without the layer has no error
            silent = [text for text in texts if text and not re.search(f"{wanted}|abandoned", text)]
            if silent or not any(re.search(wanted, text) for text in texts):
                found.append(f"{habit}: {texts} does not say {wanted!r}")
            continue
        if None in outcomes:
            found.append(f"{habit}: raises {texts}")
            continue
        for number, outcome in enumerate(outcomes):
            assert outcome is not None
            mine, mine_seen = outcome
            wrong = [n for n, w in mine.items() if not torch.allclose(w, weights[n], atol=1e-9)]
            if wrong:
                found.append(f"{habit}: rank {number} has other values of {wrong}")
            if mine_seen and not torch.allclose(torch.tensor(mine_seen), torch.tensor(seen)):
                found.append(f"{habit}: rank {number} saw {mine_seen}, not {seen}")
    return found

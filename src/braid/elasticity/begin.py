"""`braid.elastic` and `braid.elastic_mesh`: check arguments, and begin a training with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from braid.elasticity.bit_flips import flip_bits_on_signal
from braid.elasticity.evaluation import Evaluation
from braid.elasticity.learning_rate import RateRule, require_rule
from braid.elasticity.members import JobMembers
from braid.elasticity.mesh import Build, MeshReplica
from braid.elasticity.mesh_choice import mesh_chooser
from braid.elasticity.replica import WholeModel
from braid.elasticity.saving import TrainingCheckpoints
from braid.elasticity.state_transfer import Stateful, TrainingState, refuse_extra_states
from braid.elasticity.training import ElasticTraining
from braid.errors import ConfigError, below, raise_all
from braid.parallel.expert_parallel import is_of_experts
from braid.parallel.hybrid import HybridParallel
from braid.parallel.pipeline import Pipeline
from braid.parallel.pipeline.asynchronous import AsynchronousPipeline
from braid.parallel.sharding import FSDPModule, has_pieces, sharding_of
from braid.parallel.tensor_parallel import slicing_of

__all__ = ["elastic", "elastic_mesh"]


def _division_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return how ranks have parts of a model or of its optimizer's state; empty if they do not."""
    wrapper: Any = model  # of any type
    if isinstance(wrapper, Pipeline | AsynchronousPipeline):
        return "pipeline stages"
    if isinstance(wrapper, HybridParallel):
        return "a mesh"
    is_sharded = isinstance(wrapper, FSDPModule) or sharding_of(model) is not None
    if is_sharded or has_pieces(optimizer):
        return "ZeRO or FSDP"
    if any(slicing_of(param) is not None for param in model.parameters()):
        return "tensor parallelism"
    if any(is_of_experts(param) for param in model.parameters()):
        return "experts"
    is_plain = all(type(p) is nn.Parameter for p in model.parameters())
    return "" if is_plain else "parameters of another type than nn.Parameter, such as DTensor"


def _check_options(shards: int | None, verify: int, replace_slow: float) -> list[str]:
    """Return the errors in options of both functions."""
    problems = below(0, verify=verify)
    problems += below(1, shards=shards) if shards is not None else []
    if replace_slow and not replace_slow > 1:
        problems.append(
            f"replace_slow must be above 1, or 0 for only a warning, got {replace_slow}"
        )
    return problems


def elastic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    shards: int | None = None,
    seed: int = 0,
    update: Callable[[], object] | None = None,
    batch_per_rank: RateRule | None = None,
    verify: int = 0,
    replace_slow: float = 0.0,
    checkpoints: str = "",
    checkpoint_every: int = 0,
    evaluate: Callable[[], object] | None = None,
    evaluate_every: int = 0,
    **others: Stateful,
) -> ElasticTraining:
    """Return a training that continues when ranks are lost or join; see `elasticity.training`.

    Args:
        model: The model, not wrapped. Ranks begin with the weights of rank 0.
        optimizer: Optimizer of its parameters.
        shards: Number of micro-batches of a step; the number of ranks at first when None. A
            training that begins with a checkpoint keeps its number. More ranks do not make a step
            faster.
        seed: Seed of the order of samples, and of random numbers.
        update: Called instead of `optimizer.step()`, with `.grad` as the mean over all
            micro-batches; such as a function that clips gradients and then steps.
        batch_per_rank: Rule of the learning rate if each rank keeps its number of samples: "linear"
            for SGD, "sqrt" for Adam, or "constant". A step then has one micro-batch for each rank,
            and the bits depend on which ranks were lost when.
        verify: Number of steps between two checks, in which each rank also computes the next rank's
            micro-batch, and gradients are compared bit by bit; 0 for never. A rank that computes
            wrongly leaves before its result is used, and is replaced. Needs equal hosts. The first
            step and update of a new rank are always checked, gradients up to rounding errors.
        replace_slow: A rank that is slower than its peers by this factor, such as 2.0, for 30
            steps leaves and is replaced; 0 for only a warning at a factor of 2.
        checkpoints: Directory of checkpoints, which all ranks see. The training begins with the
            last checkpoint. If all members are lost at the same time, new processes begin with the
            last one of the run. Buffers outside of `state_dict()` are not saved.
        checkpoint_every: Number of steps between two checkpoints. A failure, such as a full
            disk, is only a warning. If all members are asked to end, or the launcher is lost, the
            members first save one.
        evaluate: Function that all members call between two steps, and in which they may
            communicate, such as to average a loss. If a rank is lost inside, they call it again.
        evaluate_every: Number of steps between two calls.
        others: Further objects with a state of the training, by any names, such as a
            learning rate scheduler. `update` calls them, not the loop.

    Raises:
        ConfigError: The model is wrapped, or an object has no state.
        StaleError: `braid.init()` has not been called.

    Cost of a step: as in data parallel training, with one all-reduce of the gradients for each
    round of micro-batches. Cost of a loss: a meeting of the members, and a broadcast of the state
    if a member lacks it.
    """
    raise_all(_check_options(shards, verify, replace_slow))
    require_rule(batch_per_rank, shards)
    refuse_extra_states(model)
    if division := _division_of(model, optimizer):
        msg = (
            f"{type(model).__name__} is divided among ranks ({division}), and braid.elastic takes "
            "a whole model on each rank: use braid.elastic_mesh, or train with braid.save and "
            "--resume auto"
        )
        raise ConfigError(msg)
    if hasattr(model, "no_sync"):
        msg = f"{type(model).__name__} averages gradients itself: pass the model inside of it"
        raise ConfigError(msg)
    for name, other in others.items():
        if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
            msg = (
                f"{name} has no state_dict() and load_state_dict(), so its state would be lost: "
                "add both methods"
            )
            raise ConfigError(msg)
    members = JobMembers()
    return ElasticTraining(
        members,
        WholeModel(TrainingState(model, optimizer, others)),
        num_shards=shards,
        seed=seed,
        update=update,
        batch_per_rank=batch_per_rank,
        verify=verify,
        replace_slow=replace_slow,
        checkpoints=TrainingCheckpoints(checkpoints, checkpoint_every),
        evaluation=Evaluation(evaluate, evaluate_every),
        flip_bits=flip_bits_on_signal() if members.takes_faults else None,
    )


def elastic_mesh(
    build: Build,
    mesh: str | Callable[[int], str],
    *,
    layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
    shards: int | None = None,
    seed: int = 0,
    clip: float | None = None,
    update: Callable[[], object] | None = None,
    batch_per_rank: RateRule | None = None,
    copies: bool = True,
    verify: int = 0,
    replace_slow: float = 0.0,
    checkpoints: str = "",
    checkpoint_every: int = 0,
    evaluate: Callable[[], object] | None = None,
    evaluate_every: int = 0,
    **options: Any,
) -> ElasticTraining:
    """Return a training on a mesh that continues when ranks are lost or join; see `mesh`.

    Args:
        build: Returns the whole model and its optimizer, the same on all ranks; optionally also a
            dict of further objects with a state. Called again when members have changed;
            `training.model`, `optimizer` and `others` are then replaced. A rank has the weights of
            its stage only, and of its shard with `shard=3`: at the end,
            `training.model.make_whole()` gives all ranks all weights.
        mesh: Numbers of ranks along pp, dp and tp, such as `pp=2,dp=2`. With another number of
            ranks only dp changes; if that is impossible, all ranks become replicas. May list meshes
            for several numbers of ranks: `pp=2,dp=2; dp=3`. Or a function that returns the mesh for
            a number of ranks, such as `plan.find.fastest_meshes`.
        layers: Returns the model's layers in order; None for an `nn.Sequential`.
        shards: Number of micro-batches of a step; the number of ranks at first when None. Replicas
            take them in turn, and each is a batch of the pipeline.
        seed: Seed of the order of samples, and of random numbers.
        clip: Maximum norm of all gradients, to which they are clipped; None for no limit.
        update: Called instead of `training.optimizer.step()`; must not communicate, nor change
            gradients or buffers of parts that are copied.
        batch_per_rank: See `elastic`; the number of samples of each replica is kept.
        copies: Whether neighbours keep copies of parts that only one rank, or one of several hosts,
            has. If such a part is lost without a copy, the training goes back to the last
            checkpoint, or ends.
        verify: See `elastic`; replicas along dp are compared, and with two of them no check shows
            which one is wrong.
        replace_slow: See `elastic`; a rank is compared with the ranks at its place in the other
            replicas along dp. Not for GPUs, on which ranks wait for each other unseen.
        checkpoints: See `elastic`.
        checkpoint_every: See `elastic`.
        evaluate: See `elastic`; it may call `training.model.evaluate`.
        evaluate_every: See `elastic`.
        options: Further arguments of `HybridParallel`, such as `num_microbatches`, `schedule` and
            `shard`, which divides optimizer states (1), gradients (2) and parameters (3) among
            replicas.

    Raises:
        ConfigError: An argument is invalid.
        StaleError: `braid.init()` has not been called.

    Cost of a step: the cost on the mesh, one all-reduce of whole gradients over replicas for each
    round of micro-batches, one of 8 bytes, and the neighbour's copy (see `shadow`).
    """
    problems = _check_options(shards, verify, replace_slow)
    if (verify or replace_slow) and not copies:
        problems.append(
            f"verify={verify} and replace_slow={replace_slow} replace ranks, whose parts could be "
            "lost with copies=False: leave copies out"
        )
    if clip is not None and not clip > 0:
        problems.append(f"clip must be above 0, got {clip}")
    shard = options.get("shard", 0)
    if shard not in {0, 1, 2, 3}:
        problems.append(f"shard must be 0, 1, 2 or 3, got {shard!r}")
    raise_all(problems)
    require_rule(batch_per_rank, shards)

    choose = mesh_chooser(mesh)
    evaluation = Evaluation(evaluate, evaluate_every)
    saved = TrainingCheckpoints(checkpoints, checkpoint_every)
    members = JobMembers()
    first = None if members.is_newcomer else choose(members.group.size)
    if (verify or replace_slow) and first and first.size > 1 == first.axes.get("dp", 1):
        msg = (
            f"verify={verify} and replace_slow={replace_slow} compare replicas, but the mesh "
            f"{first} has only one: use a mesh with dp=2 or more, or leave them out"
        )
        raise ConfigError(msg)
    replica = MeshReplica(
        build,
        choose,
        layers=layers,
        clip=clip,
        copies=copies,
        options={"seed": seed, **options},
    )
    if replace_slow and not replica.has_times:
        msg = (
            f"replace_slow={replace_slow} compares the time that each rank computes, which is not "
            "known on a mesh of GPUs, where ranks wait for each other: leave it out"
        )
        raise ConfigError(msg)
    return ElasticTraining(
        members,
        replica,
        num_shards=shards,
        seed=seed,
        update=update,
        batch_per_rank=batch_per_rank,
        verify=verify,
        replace_slow=replace_slow,
        checkpoints=saved,
        evaluation=evaluation,
        flip_bits=flip_bits_on_signal() if members.takes_faults else None,
    )

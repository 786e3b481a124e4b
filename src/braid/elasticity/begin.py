"""`braid.elastic`: checks its arguments, and begins an elastic training with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from braid.elasticity.bit_flips import flip_bits_on_signal
from braid.elasticity.evaluation import evaluation_of
from braid.elasticity.learning_rate import RateRule, require_rule
from braid.elasticity.members import JobMembers
from braid.elasticity.replica import WholeModel
from braid.elasticity.saving import checkpoints_in
from braid.elasticity.state_transfer import Stateful, TrainingState
from braid.elasticity.training import ElasticTraining
from braid.errors import ConfigError, below, raise_all
from braid.parallel.expert_parallel import is_of_experts
from braid.parallel.hybrid import HybridParallel
from braid.parallel.pipeline import Pipeline
from braid.parallel.pipeline.asynchronous import AsynchronousPipeline
from braid.parallel.sharding import FSDPModule, has_pieces, sharding_of
from braid.parallel.tensor_parallel import slicing_of

__all__ = ["elastic"]


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
            wrongly leaves before its result is used, and is replaced. The first step of a new rank
            is checked, too. Needs equal hosts.
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
    problems = below(0, verify=verify)
    if replace_slow and not replace_slow > 1:
        problems.append(
            f"replace_slow must be above 1, or 0 for only a warning, got {replace_slow}"
        )
    raise_all(problems)
    raise_all(below(1, shards=shards) if shards is not None else [])
    require_rule(batch_per_rank, shards)
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            msg = (
                f"{name or 'the model'} has an extra state, which new ranks do not receive: remove "
                "get_extra_state()"
            )
            raise ConfigError(msg)
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
    if members.takes_faults:
        flip_bits_on_signal(model)
    return ElasticTraining(
        members,
        WholeModel(TrainingState(model, optimizer, others)),
        num_shards=shards,
        seed=seed,
        update=update,
        batch_per_rank=batch_per_rank,
        verify=verify,
        replace_slow=replace_slow,
        checkpoints=checkpoints_in(checkpoints, checkpoint_every),
        evaluation=evaluation_of(evaluate, evaluate_every),
    )

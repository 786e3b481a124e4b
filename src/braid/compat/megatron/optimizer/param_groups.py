"""Parameter groups of Megatron's optimizers, and the function that makes an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from braid.compat.megatron.distributed import DistributedDataParallel
from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.groups import braid_group
from braid.compat.megatron.optimizer.optimizer import MainParam, MegatronOptimizer
from braid.compat.megatron.optimizer.optimizer_config import OptimizerConfig
from braid.compat.megatron.process_groups_config import ProcessGroupCollection
from braid.errors import raise_all

__all__ = ["get_megatron_optimizer"]


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    config_overrides: Any = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
) -> MegatronOptimizer:
    """Return the optimizer of model chunks.

    Args:
        config: Options.
        model_chunks: Chunks of this rank, each in DistributedDataParallel.
        config_overrides: None for Megatron's groups, or {} for weight decay on all parameters;
            other values are not supported.
        use_gloo_process_groups: No effect.
        pg_collection: Groups of the model; the groups of `parallel_state` when None.
        dump_param_to_param_group_map: Must be None.

    Raises:
        UsageError: A chunk is not in DistributedDataParallel, or its configuration has another
            value of `use_distributed_optimizer`.
        UnsupportedError: An argument is not supported.
    """
    del use_gloo_process_groups
    if config_overrides or dump_param_to_param_group_map is not None:
        msg = (
            "config_overrides and dump_param_to_param_group_map are not supported: leave them out, "
            "and change param_groups of the optimizer"
        )
        raise UnsupportedError(msg)
    _check(config, model_chunks)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    mains: list[MainParam] = []
    by_key: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for chunk in model_chunks:
        assert isinstance(chunk, DistributedDataParallel)
        names = {param: name for name, param in chunk.named_parameters()}
        for main in _mains_of(chunk, sharded=config.use_distributed_optimizer):
            mains.append(main)
            decays = config_overrides is not None or _decays(config, names[main.param], main.param)
            decoupled = config.decoupled_lr is not None and getattr(
                main.param, "is_embedding_or_output_parameter", False
            )
            by_key.setdefault((decays, decoupled), []).append(main.main)
    param_groups = [
        _param_group(config, params, decays=decays, decoupled=decoupled)
        for (decays, decoupled), params in sorted(by_key.items(), key=lambda item: item[0])
    ]
    if not param_groups:  # this rank has no shard
        param_groups = [_param_group(config, [], decays=True, decoupled=False)]
    reduced = [braid_group(groups.mp)]
    if config.use_distributed_optimizer:
        reduced.append(braid_group(groups.dp_cp))
    return MegatronOptimizer(
        _torch_optimizer(config, param_groups), config, mains, model_chunks, reduced
    )


def _check(config: OptimizerConfig, chunks: Sequence[nn.Module]) -> None:
    """Raise UsageError with all problems of the chunks."""
    problems = []
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, DistributedDataParallel):
            problems.append(
                f"model chunk {index} is a {type(chunk).__name__}: wrap it in "
                "braid.compat.megatron.distributed.DistributedDataParallel"
            )
        elif chunk.ddp_config.use_distributed_optimizer != config.use_distributed_optimizer:
            problems.append(
                f"use_distributed_optimizer is {config.use_distributed_optimizer} in the "
                f"OptimizerConfig and {chunk.ddp_config.use_distributed_optimizer} in the "
                f"DistributedDataParallelConfig of chunk {index}: set both to the same value"
            )
    if config.lr is None:
        problems.append("OptimizerConfig has no lr: set it")
    raise_all(problems, UsageError)


def _mains_of(chunk: DistributedDataParallel, *, sharded: bool) -> Iterator[MainParam]:
    """Yield the main parameters of a chunk, in the order of the model without sharding."""
    if not sharded:
        for param in chunk.parameters():
            if param.requires_grad:
                main = param if param.dtype.itemsize >= 4 else _copy_of(param)
                yield MainParam(param, param.detach(), param.__dict__["main_grad"], main)
        return
    for bucket in chunk.buckets:
        assert bucket.values is not None
        shard_begin, shard_end = bucket.shard
        for param, start in zip(bucket.params, bucket.grads.starts, strict=True):
            begin, end = max(start, shard_begin), min(start + param.numel(), shard_end)
            if begin >= end:
                continue
            value = bucket.values.tensor[begin:end]
            main = nn.Parameter(value) if value.dtype.itemsize >= 4 else _copy_of(value)
            yield MainParam(param, value, bucket.grads.tensor[begin:end], main)


def _copy_of(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().float().clone())


def _decays(config: OptimizerConfig, name: str, param: nn.Parameter) -> bool:
    """Return whether schedulers of Megatron decay a parameter."""
    if config.apply_wd_to_qk_layernorm and ("q_layernorm." in name or "k_layernorm." in name):
        return True
    return not name.endswith(".bias") and param.dim() != 1


def _param_group(
    config: OptimizerConfig, params: list[nn.Parameter], *, decays: bool, decoupled: bool
) -> dict[str, Any]:
    """Return a parameter group, with Megatron's entries for schedulers of its options."""
    min_lr = config.decoupled_min_lr if decoupled else None
    return {
        "params": params,
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": decoupled,
        "default_config": not decoupled,
        "max_lr": config.decoupled_lr if decoupled else config.lr,
        "min_lr": config.min_lr if min_lr is None else min_lr,
    }


def _torch_optimizer(
    config: OptimizerConfig, param_groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(param_groups, momentum=config.sgd_momentum)
    kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    betas = (config.adam_beta1, config.adam_beta2)
    return kind(param_groups, betas=betas, eps=config.adam_eps)

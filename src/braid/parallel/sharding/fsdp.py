"""FullyShardedDataParallel: a wrapper whose parameters, gradients and states are in parts.

    model = braid.FullyShardedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()

`fully_shard` does the same without a wrapper, in the calls of FSDP2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from braid.comm import Group
from braid.comm.mesh_groups import MeshGroups
from braid.errors import ConfigError
from braid.parallel.gradients.process_groups import group_of
from braid.parallel.sharding import gathered_state
from braid.parallel.sharding.engine import Sharding
from braid.parallel.sharding.optimizer import refuse_wrong_rules
from braid.parallel.sharding.options import ShardingOptions
from braid.parallel.sharding.policies import MixedPrecisionPolicy, offload_of, precision_of

__all__ = ["FullyShardedDataParallel", "ShardedModule", "make_sharding"]


class ShardedModule:
    """Methods of a sharded model, whatever shards it.

    Attributes:
        sharding: The engine.
    """

    sharding: Sharding

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale gradients so that their norm is at most `max_norm`; a collective.

        Use it in place of torch's function, which sees the pieces of one rank only.

        Returns:
            The norm before scaling.
        """
        return self.sharding.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Keep gradients of backwards inside local; see `Sharding.no_sync`."""
        return self.sharding.no_sync()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Let the module have whole parameters inside, to be read; a collective."""
        return self.sharding.gathered()


class FullyShardedDataParallel(ShardedModule, nn.Module):
    """Wraps a module so that each rank keeps a part of its parameters, gradients and states.

    Parameters stay the same objects: between uses they are this rank's pieces, flat and possibly
    empty, which any optimizer that treats elements one by one may change. Optimizers that look at
    shapes or norms, such as Muon, Adafactor, LARS and LAMB, need `whole_parameters=True`, and their
    steps fail without it; LBFGS cannot be used.

    Args:
        module: Module to train; the same on every rank, up to values.
        process_group: Ranks that own the parts; see `DistributedDataParallel`.
        mesh: In place of `process_group`: a mesh of one axis, or of two of which the last one has
            the parts and the first one replicas of them (hybrid sharding), such as
            `braid.mesh("replica=2,shard=2")`; also a DeviceMesh of torch.
        units: Modules whose parameters are gathered together; the elements of the outermost
            ModuleLists when None.
        reshard_after_forward: Whether parameters are freed between forward and backward: None for
            all units but the root and the last one, False to keep them, which sends a third less.
        mp_policy: Data types, see `MixedPrecisionPolicy`; also torch's.
        offload_policy: Places, see `CPUOffloadPolicy` and `DiskOffloadPolicy`; also torch's.
        ignored_params: Parameters that stay as they are; nothing is averaged or copied for them.
        shard_placement_fn: Refused, as parts are ranges of elements, not of a dim.
        whole_parameters: Whether each parameter belongs to one rank.
        master_dtype: Data type of the optimizer's pieces, such as float32 for a bfloat16 model;
            that of the model when None.
        init_sync: Compare parameters, and copy rank 0's values and buffers at wrapping.

    Raises:
        ConfigError: The module cannot be sharded, or arguments contradict each other; all problems
            are named.
        MismatchError: Ranks have other parameters; the message shows which.

    Cost: see `Sharding`.

    Source: Y. Zhao et al., "PyTorch FSDP", VLDB 2023. Parts are ranges of flat vectors as in FSDP1;
        memory is freed and bounded as in FSDP2, without DTensor.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        *,
        mesh: Any = None,
        units: Sequence[nn.Module] | None = None,
        reshard_after_forward: bool | None = None,
        mp_policy: Any = None,
        offload_policy: Any = None,
        ignored_params: Iterable[nn.Parameter] | None = None,
        shard_placement_fn: Any = None,
        whole_parameters: bool = False,
        master_dtype: torch.dtype | None = None,
        init_sync: bool = True,
    ) -> None:
        super().__init__()
        refuse_placement(shard_placement_fn)
        self.module = module
        self.sharding = make_sharding(
            module,
            process_group,
            mesh,
            ignored=ignored_params,
            units=units,
            reshard_after_forward=reshard_after_forward,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            whole=whole_parameters,
            master_dtype=master_dtype,
            init_sync=init_sync,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        return self.module(*args, **kwargs)

    def close(self) -> None:
        """Stop sharding; see `Sharding.close`. Not a collective."""
        self.sharding.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that `no_sync` has left."""
        del set_to_none
        self.sharding.zero_grad()

    def state_dict(  # type: ignore[override]  # without the form that fills a given dict
        self, *_args: Any, **_options: Any
    ) -> dict[str, Any]:
        """Return whole parameters and buffers under the names of the module; a collective.

        `braid.save` writes the parts of each rank instead.
        """
        return dict(gathered_state.state_dict(self.sharding))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:
        """Load whole parameters and buffers, of which each rank takes its pieces.

        Raises:
            ConfigError: Names or shapes are not those of the module; nothing has been changed.
        """
        if assign:
            msg = "assign=True would replace the pieces of this rank: leave it out"
            raise ConfigError(msg)
        gathered_state.load_state_dict(self.sharding, state_dict, strict=strict)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's whole state by parameters' names; a collective."""
        return gathered_state.optimizer_state_dict(self.sharding, optimizer)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load what `optimizer_state_dict` has returned, on any number of ranks."""
        gathered_state.load_optimizer_state_dict(self.sharding, optimizer, state)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def make_sharding(
    module: nn.Module,
    process_group: Any,
    mesh: Any,
    *,
    ignored: Iterable[nn.Parameter] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    **options: Any,
) -> Sharding:
    """Shard a module with the arguments of FSDP2.

    Raises:
        ConfigError: There is no such group, mesh or policy; see `Sharding` for the others.
    """
    precision, offload = precision_of(mp_policy), offload_of(offload_policy)
    groups = _groups_of(process_group, mesh)
    left_out = {id(param) for param in ignored or ()}
    names = frozenset(name for name, p in module.named_parameters() if id(p) in left_out)
    sharding = Sharding(
        module,
        groups.shard,
        ShardingOptions(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            offload=offload,
            ignored=names,
            **options,
        ),
        replicas=groups.replicas,
    )
    _cast(sharding, precision)
    refuse_wrong_rules(sharding)
    return sharding


def refuse_placement(shard_placement_fn: Any) -> None:
    """Refuse the argument that says along which dim a parameter is cut.

    Raises:
        ConfigError: It is given.
    """
    if shard_placement_fn is not None:
        msg = (
            "shard_placement_fn is not supported: parts are ranges of a unit's elements, not of a "
            "dim. Leave it out, or pass whole_parameters=True for optimizers that look at shapes"
        )
        raise ConfigError(msg)


class _ShardGroups(NamedTuple):
    """Groups of a rank.

    Attributes:
        shard: Ranks that together own each parameter once.
        replicas: Ranks that own the same parts; None if there are no others.
    """

    shard: Group
    replicas: Group | None


def _groups_of(process_group: Any, mesh: Any) -> _ShardGroups:
    """Return the groups of this rank; the last axis of a mesh has the parts.

    Raises:
        ConfigError: There is no such group, the mesh has more than two axes, or both are given.
    """
    if mesh is None:
        groups = [group_of(process_group)]
    elif process_group is not None:
        msg = "pass either process_group or mesh, got both"
        raise ConfigError(msg)
    elif isinstance(mesh, Group):
        groups = [mesh]
    elif isinstance(mesh, DeviceMesh):
        _check_axes(mesh.ndim, str(mesh))
        groups = [group_of(mesh.get_group(mesh_dim=dim)) for dim in range(mesh.ndim)]
    elif isinstance(mesh, MeshGroups):
        axes = list(mesh.layout.axes)
        _check_axes(len(axes), str(mesh.layout))
        groups = [mesh[axis] for axis in axes]
    else:
        msg = (
            f"mesh must be a mesh of braid or a DeviceMesh of torch, got {type(mesh).__name__}: "
            'pass braid.mesh("replica=2,shard=2"), or a process_group'
        )
        raise ConfigError(msg)
    return _ShardGroups(groups[-1], groups[0] if len(groups) > 1 else None)


def _check_axes(num_axes: int, shown: str) -> None:
    if num_axes > 2:
        msg = (
            f"mesh {shown} has {num_axes} axes: pass one of replicas and one of shards, such as "
            'mesh["replica", "shard"], or the shards alone'
        )
        raise ConfigError(msg)


def _cast(sharding: Sharding, policy: MixedPrecisionPolicy) -> None:
    """Convert inputs of units, and outputs of the model, to the policy's data types."""
    for unit in sharding.units if policy.cast_forward_inputs else ():
        unit.input_dtype = policy.param_dtype
    sharding.units[0].output_dtype = policy.output_dtype

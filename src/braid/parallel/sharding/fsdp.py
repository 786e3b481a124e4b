"""FullyShardedDataParallel: module wrapper with sharded parameters, gradients and states.

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
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from braid.comm import Group
from braid.comm.mesh_groups import MeshGroups
from braid.errors import ConfigError
from braid.parallel.gradients.process_groups import group_of
from braid.parallel.sharding import gathered_state
from braid.parallel.sharding.engine import Sharding
from braid.parallel.sharding.optimizer import check_first_batch, refuse_wrong_rules
from braid.parallel.sharding.options import ShardingOptions
from braid.parallel.sharding.policies import offload_of, precision_of

__all__ = ["FullyShardedDataParallel", "ShardedModule", "make_sharding"]


class ShardedModule:
    """Methods of a sharded model, used by the wrapper and by `fully_shard`.

    Attributes:
        sharding: Engine that shards the model.
    """

    sharding: Sharding

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale gradients so that their norm is at most `max_norm`; a collective.

        Use it instead of torch's function, which uses the shards of one rank only.

        Args:
            max_norm: Largest norm of all gradients together.
            norm_type: Order of the norm, such as 2 or infinity.
            error_if_nonfinite: Whether to raise an error if the norm is NaN or infinite.

        Returns:
            The norm before scaling.
        """
        return self.sharding.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients stay local; see `Sharding.no_sync`."""
        return self.sharding.no_sync()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the module has whole parameters for reading; a collective."""
        return self.sharding.gathered()


class FullyShardedDataParallel(ShardedModule, nn.Module):
    """Module wrapper that keeps a shard of parameters, gradients and optimizer states per rank.

    Parameters stay the same objects: between uses they are this rank's pieces, flat and possibly
    empty, on which any elementwise optimizer may step. Optimizers that use shapes or norms, such as
    Muon, Adafactor, LARS and LAMB, need `whole_parameters=True`; without it their steps raise an
    error. LBFGS cannot be used.

    Args:
        module: Module to train; the same on every rank, except for values.
        process_group: Ranks that own the shards; see `DistributedDataParallel`.
        mesh: Instead of `process_group`: a mesh with one axis for shards, or with an axis for
            replicas before it (hybrid sharding), such as `braid.mesh("replica=2,shard=2")`; or a
            DeviceMesh of torch.
        units: Modules with parameters that are gathered together; None for the elements of the
            outermost ModuleLists.
        reshard_after_forward: Whether parameters are freed between forward and backward: None for
            all units but the root and the last one; False to keep them, which sends a third less.
        mp_policy: Dtypes, see `MixedPrecisionPolicy`; or torch's policy.
        offload_policy: Memory, see `CPUOffloadPolicy` and `DiskOffloadPolicy`; or torch's policy.
        ignored_params: Parameters that are not sharded, averaged or copied.
        shard_placement_fn: Not supported, because shards are ranges of elements, not of a dim.
        whole_parameters: Whether each parameter belongs to one rank.
        master_dtype: Dtype of the optimizer's pieces, such as float32 for a bfloat16 model; None
            for the model's dtype.
        init_sync: Whether to compare parameters, and copy rank 0's values and buffers at wrapping.

    Raises:
        ConfigError: The module cannot be sharded, or arguments are contradictory; the message has
            all problems.
        MismatchError: Parameters differ between ranks; the message shows which.

    Cost: see `Sharding`.

    Source: Y. Zhao et al., "PyTorch FSDP", VLDB 2023. Shards are ranges of flat vectors as FSDP1's;
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
        """Stop sharding; not a collective. See `Sharding.close`."""
        self.sharding.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, also local gradients of `no_sync`, for any `set_to_none`."""
        del set_to_none
        self.sharding.zero_grad()

    def state_dict(  # type: ignore[override]  # without the argument `destination`
        self, *_args: Any, **_options: Any
    ) -> dict[str, Any]:
        """Return whole parameters and buffers under the names of the module; a collective.

        `braid.save` writes the shards of each rank instead.
        """
        return dict(gathered_state.state_dict(self.sharding))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:
        """Load whole parameters and buffers; each rank keeps its shards.

        Args:
            state_dict: Whole tensors by the names of the module, on every rank.
            strict: Whether missing and unknown names raise an error.
            assign: Must be False.

        Raises:
            ConfigError: Names or shapes differ from the module's; nothing has been changed.
        """
        if assign:
            msg = "assign=True would replace this rank's shards: leave it out"
            raise ConfigError(msg)
        gathered_state.load_state_dict(self.sharding, state_dict, strict=strict)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's whole state by parameter name; a collective."""
        return gathered_state.optimizer_state_dict(self.sharding, optimizer)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load a state from `optimizer_state_dict`, which any number of ranks may have saved."""
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
        ConfigError: The group, mesh or policy is invalid; see `Sharding` for other problems.
    """
    precision, offload = precision_of(mp_policy), offload_of(offload_policy)
    shard_group, replicas = _groups_of(process_group, mesh)
    left_out = {id(param) for param in ignored or ()}
    names = frozenset(name for name, p in module.named_parameters() if id(p) in left_out)
    sharding = Sharding(
        module,
        shard_group,
        ShardingOptions(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            offload=offload,
            ignored=names,
            **options,
        ),
        replicas=replicas,
    )
    for unit in sharding.units if precision.cast_forward_inputs else ():
        unit.input_dtype = precision.param_dtype
    sharding.units[0].output_dtype = precision.output_dtype
    refuse_wrong_rules(sharding)
    check_first_batch(sharding)
    return sharding


def refuse_placement(shard_placement_fn: Any) -> None:
    """Raise if `shard_placement_fn`, which chooses the sharded dim of parameters, is used.

    Raises:
        ConfigError: `shard_placement_fn` is not None.
    """
    if shard_placement_fn is not None:
        msg = (
            "shard_placement_fn is not supported: FSDP here shards flattened parameters, not "
            "dims. Leave it out, or pass whole_parameters=True for optimizers that use shapes"
        )
        raise ConfigError(msg)


def _groups_of(process_group: Any, mesh: Any) -> tuple[Group, Group | None]:
    """Return the ranks that together own each parameter once, and those that own the same shard.

    The last axis of a mesh has the shards; without a first one there are no replicas.

    Raises:
        ConfigError: The group is invalid, the mesh has more than two axes, or both are given.
    """
    if mesh is None:
        groups = [group_of(process_group)]
    elif process_group is not None:
        msg = "process_group and mesh were both passed: pass only one of them"
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
    return groups[-1], groups[0] if len(groups) > 1 else None


def _check_axes(num_axes: int, shown: str) -> None:
    if num_axes > 2:
        msg = (
            f"mesh {shown} has {num_axes} axes: pass an axis of replicas and one of shards, as "
            'in mesh["replica", "shard"], or only the axis of shards'
        )
        raise ConfigError(msg)

"""fully_shard: the calls of FSDP2, first for blocks and finally for the model.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters())

A call marks a module as a unit. The model is sharded when its first forward begins, or when its
methods are used, because only then the outermost module is known. The parameters are the same
objects before and after, so an optimizer may be created in between.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from braid.errors import ConfigError
from braid.parallel.sharding import gathered_state
from braid.parallel.sharding.engine import Sharding
from braid.parallel.sharding.fsdp import (
    FullyShardedDataParallel,
    ShardedModule,
    make_sharding,
    refuse_placement,
)
from braid.parallel.sharding.residency import CALL
from braid.parallel.sharding.units import MARK

__all__ = ["FSDPModule", "fully_shard", "register_fsdp_forward_method"]

NOTE = "braid_fully_shard"  # arguments of the call, as an attribute of the module
OUTER = "braid_fully_shard_outer"  # the next enclosing module that was passed later


class FSDPModule(ShardedModule):
    """Methods that `fully_shard` adds to a module, as a base class of the module's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; the first forward of the outermost module shards it first."""
        _divide(self)  # type: ignore[arg-type]  # a module, see the class
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # of the module

    @property
    def sharding(self) -> Sharding:  # type: ignore[override]  # made at its first use
        """Engine that shards the model; a collective at its first use."""
        return _engine_of(self)  # type: ignore[arg-type]  # a module, see the class

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether gradients are averaged over ranks in later backwards.

        Args:
            requires_gradient_sync: Whether to average; if False, gradients stay local to the rank.
        """
        self.sharding.reducer.synchronizes = requires_gradient_sync

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Raise once the module is sharded, because it would return the flat shards of one rank.

        Raises:
            ConfigError: The module is sharded.
        """
        is_asked = not args and not options  # torch passes a destination to modules inside
        if is_asked and "braid_fully_shard_engine" in vars(self):
            msg = (
                "state_dict() of a module after fully_shard would contain only this rank's flat "
                "shards: call full_state_dict() on all ranks, or braid.save, whose checkpoints "
                "any number of ranks loads"
            )
            raise ConfigError(msg)
        return super().state_dict(*args, **options)  # type: ignore[misc,no-any-return]

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return whole parameters and buffers; a collective."""
        return gathered_state.state_dict(self.sharding)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load whole parameters and buffers by name; each rank keeps its shards."""
        gathered_state.load_state_dict(self.sharding, state)


def fully_shard(
    module: nn.Module,
    *,
    mesh: Any = None,
    process_group: Any = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Any = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> nn.Module:
    """Mark a module as a unit of a sharded model, or as the model itself.

    The arguments of the outermost module apply to all units.

    Args:
        module: Block or model, changed in place.
        mesh: See `FullyShardedDataParallel`.
        process_group: See `FullyShardedDataParallel`.
        reshard_after_forward: See `FullyShardedDataParallel`.
        shard_placement_fn: Not supported.
        mp_policy: See `FullyShardedDataParallel`.
        offload_policy: See `FullyShardedDataParallel`.
        ignored_params: See `FullyShardedDataParallel`.

    Returns:
        The module; its class also has the methods of `FSDPModule`.

    Raises:
        ConfigError: The module has been passed before, or `shard_placement_fn` is given.
    """
    refuse_placement(shard_placement_fn)
    if NOTE in vars(module):
        msg = f"this {type(module).__name__} has been passed to fully_shard before: pass it once"
        raise ConfigError(msg)
    for unit in module.modules():
        if NOTE in vars(unit):
            vars(unit).setdefault(OUTER, module)
    kind = type(module)
    module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    vars(module)[NOTE] = {
        "mesh": mesh,
        "process_group": process_group,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored": ignored_params,
    }
    return module


def _engine_of(module: nn.Module) -> Sharding:
    """Return the engine of the outermost module; create it if necessary.

    Raises:
        ConfigError: The module is a unit of another module.
    """
    _divide(module)
    engine = vars(module).get("braid_fully_shard_engine")
    if not isinstance(engine, Sharding):
        msg = (
            f"{type(module).__name__} is a part of a sharded model: call the method of the root "
            "model, the last one passed to fully_shard"
        )
        raise ConfigError(msg)
    return engine


def _divide(module: nn.Module) -> None:
    """Shard the outermost model around a module, unless this has been done."""
    if NOTE not in vars(module):
        return
    model = module
    while OUTER in vars(model):
        model = vars(model)[OUTER]
    inner = [m for m in model.modules() if NOTE in vars(m)]
    note = dict(vars(model)[NOTE])
    for unit in inner:
        del vars(unit)[NOTE]
        vars(unit).pop(OUTER, None)
    units = [unit for unit in inner if unit is not model]
    vars(model)["braid_fully_shard_engine"] = make_sharding(
        model, note.pop("process_group"), note.pop("mesh"), units=units or None, **note
    )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather a unit's parameters also during a method other than forward.

    No-op for a module without sharded parameters.

    Args:
        module: A `FullyShardedDataParallel`, or a unit of a sharded model, such as a module passed
            to `fully_shard`.
        method_name: Name of the method, such as "encode".

    Raises:
        ConfigError: The method does not exist, or the module's parameters belong to an outer unit.
    """
    if isinstance(module, FullyShardedDataParallel):
        module = module.module
    original = getattr(module, method_name, None)
    if not callable(original):
        msg = (
            f"{type(module).__name__} has no method {method_name!r}: pass the name of an "
            "existing method"
        )
        raise ConfigError(msg)
    if not any(key in vars(module) for key in (NOTE, CALL)):
        if any(hasattr(param, MARK) for param in module.parameters()):
            msg = (
                f"{type(module).__name__} is not a sharding unit of the model: pass it in "
                "units=, or register the method of the model that calls it"
            )
            raise ConfigError(msg)
        return

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        _divide(module)
        call = vars(module).get(CALL)  # a module without parameters is not a unit
        return original(*args, **kwargs) if call is None else call(original, args, kwargs)

    setattr(module, method_name, method)

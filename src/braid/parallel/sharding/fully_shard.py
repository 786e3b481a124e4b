"""fully_shard: the calls of FSDP2, blocks first and the model last.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters())

A call notes that a module is a unit. The model is divided when its first forward begins, or its
methods are used, since only then is known which module is the outermost one. The parameters are
the same objects before and after, so an optimizer may be made in between.
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
OUTER = "braid_fully_shard_outer"  # the next module around it that was passed after it


class FSDPModule(ShardedModule):
    """Methods that a module has after `fully_shard`; its class derives from its own and this."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; the first one of the outermost module divides it before."""
        _divide(self)  # type: ignore[arg-type]  # a module, see the class
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # of the module

    @property
    def sharding(self) -> Sharding:  # type: ignore[override]  # made at its first use
        """The engine; a collective at its first use."""
        return _engine_of(self)  # type: ignore[arg-type]  # a module, see the class

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Let backwards from now on average gradients, or keep them local."""
        self.sharding.synchronizes = requires_gradient_sync

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Refuse, once the module is divided: it would have the flat pieces of one rank.

        Raises:
            ConfigError: The module is divided.
        """
        is_asked = not args and not options  # torch passes a destination to modules inside
        if is_asked and "braid_fully_shard_engine" in vars(self):
            msg = (
                "state_dict() of a module after fully_shard would have this rank's flat pieces: "
                "call full_state_dict() on all ranks, or braid.save, whose checkpoints any number "
                "of ranks loads"
            )
            raise ConfigError(msg)
        return super().state_dict(*args, **options)  # type: ignore[misc,no-any-return]

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return whole parameters and buffers; a collective."""
        return gathered_state.state_dict(self.sharding)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load whole parameters and buffers, of which each rank takes its pieces."""
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
    """Let a module be a unit of a sharded model, or the model itself.

    The arguments of the outermost module hold for all units.

    Args:
        module: Block, or model; changed in place.
        mesh: See `FullyShardedDataParallel`.
        process_group: See `FullyShardedDataParallel`.
        reshard_after_forward: See `FullyShardedDataParallel`.
        shard_placement_fn: Refused.
        mp_policy: See `FullyShardedDataParallel`.
        offload_policy: See `FullyShardedDataParallel`.
        ignored_params: See `FullyShardedDataParallel`.

    Returns:
        The module, whose class has the methods of `FSDPModule`, too.

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
    """Return the engine of the outermost module, made if it is not there yet.

    Raises:
        ConfigError: The module is a unit of another one.
    """
    _divide(module)
    engine = vars(module).get("braid_fully_shard_engine")
    if not isinstance(engine, Sharding):
        msg = (
            f"{type(module).__name__} is a unit of a sharded model: use the methods of the model "
            "that fully_shard was called with last"
        )
        raise ConfigError(msg)
    return engine


def _divide(module: nn.Module) -> None:
    """Divide the outermost model around a module, if that has not been done."""
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
    """Gather a unit's parameters also while another method than forward computes with them.

    No-op for a module without sharded parameters.

    Args:
        module: A `FullyShardedDataParallel`, or a unit of a sharded model, such as a module passed
            to `fully_shard`.
        method_name: Name of the method, such as "encode".

    Raises:
        ConfigError: There is no such method, or the module has parameters of a unit around it.
    """
    if isinstance(module, FullyShardedDataParallel):
        module = module.module
    original = getattr(module, method_name, None)
    if not callable(original):
        msg = f"{type(module).__name__} has no method {method_name!r}"
        raise ConfigError(msg)
    if not any(key in vars(module) for key in (NOTE, CALL)):
        if any(hasattr(param, MARK) for param in module.parameters()):
            msg = (
                f"{type(module).__name__} is not a unit of the sharded model: pass it in units=, "
                "or register the method of the model that calls it"
            )
            raise ConfigError(msg)
        return

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        _divide(module)
        call = vars(module).get(CALL)  # a module without parameters is not a unit
        return original(*args, **kwargs) if call is None else call(original, args, kwargs)

    setattr(module, method_name, method)

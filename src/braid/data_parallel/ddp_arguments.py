"""What the arguments of DistributedDataParallel mean, where torch's names say it in several ways."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from braid.errors import ConfigError
from braid.params import Caps, ParamTable

__all__ = ["caps_of", "checked_hash_every", "first_given", "table_of", "trigger_of"]

MIB = 1 << 20


def table_of(module: nn.Module, ignored: Collection[str]) -> ParamTable:
    """Parameters that are averaged.

    Raises:
        ConfigError: None requires a gradient.
    """
    table = ParamTable.of(module, ignored)
    if not table.trained:
        msg = (
            f"expected at least one parameter that requires a gradient in {type(module).__name__}, found "
            f"{len(table)} frozen ones: there is nothing to average, use the module as it is"
        )
        raise ConfigError(msg)
    return table


def first_given(forward_sync_buffers: bool | None, broadcast_buffers: bool | None) -> bool:
    """Whether buffers are kept equal: what is said by the newer name, else by the older one; by default they are."""
    for given in (forward_sync_buffers, broadcast_buffers):
        if given is not None:
            return given
    return True


def caps_of(cap_mb: float | None, caps_mb: Sequence[float] | None) -> Caps:
    """When buckets are closed."""
    if caps_mb:
        return Caps(tuple(int(cap * MIB) for cap in caps_mb))
    return Caps.of_mb(cap_mb)


def checked_hash_every(steps: int) -> int:
    """A number of steps, or 0.

    Raises:
        ConfigError: It is neither.
    """
    if type(steps) is not int or steps < 0:
        msg = f"expected hash_every to be a number of steps, or 0, found {steps!r}"
        raise ConfigError(msg)
    return steps


def trigger_of(
    table: ParamTable,
    param: nn.Parameter | None,
    delayed: Sequence[tuple[str, nn.Parameter]] | None,
) -> str:
    """Name of the parameter that lets delayed ones go; empty where there are none.

    Raises:
        ConfigError: Only one of the two is given, or a parameter is not in the table.
    """
    if (param is None) != (not delayed):
        msg = "expected delay_all_reduce_named_params and param_to_hook_all_reduce together, found only one of them"
        raise ConfigError(msg)
    if param is None:
        return ""
    known = {id(record.param): record.name for record in table}
    unknown = [name for name, _ in delayed or () if not any(name in r.names for r in table)]
    if id(param) not in known or unknown:
        what = f"{', '.join(map(repr, unknown))}" if unknown else "param_to_hook_all_reduce"
        msg = f"expected parameters of the module to delay, found that {what} is none of it"
        raise ConfigError(msg)
    return known[id(param)]

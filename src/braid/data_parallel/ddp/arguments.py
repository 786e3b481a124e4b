"""What the arguments of DistributedDataParallel mean, where torch's names say it in several ways."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields

from torch import nn
from torch.nn.parameter import UninitializedParameter

from braid.errors import ConfigError
from braid.params import Caps, ParamTable, ReducerOptions

__all__ = [
    "arguments_in_common",
    "caps_of",
    "checked_hash_every",
    "checked_names",
    "checked_weight",
    "first_given",
    "table_of",
    "trigger_of",
]

MIB = 1 << 20


def table_of(module: nn.Module, ignored: Collection[str]) -> ParamTable:
    """Parameters that are averaged.

    Raises:
        ConfigError: None requires a gradient, or some have no shape yet.
    """
    lazy = [
        name
        for name, param in module.named_parameters()
        if isinstance(param, UninitializedParameter)
    ]
    if lazy:
        msg = f"expected parameters that have a shape, found {lazy[0]!r} of a lazy module: run the module once before it is wrapped"
        raise ConfigError(msg)
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
    """When buckets are closed.

    Raises:
        ConfigError: A cap is no number.
    """
    given = [*(caps_mb or ()), *(() if cap_mb is None else (cap_mb,))]
    wrong = [cap for cap in given if not isinstance(cap, int | float)]
    if wrong:
        msg = f"expected a bucket's cap as a number of MiB, found {wrong[0]!r}"
        raise ConfigError(msg)
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


def checked_weight(weight: object) -> float | None:
    """A weight as a number, also where it is a tensor of one element.

    Raises:
        ConfigError: It is negative, not finite or no number.
    """
    if weight is None:
        return None
    try:
        number = -1.0 if isinstance(weight, str) else float(weight)  # type: ignore[arg-type]  # whatever the program has
    except (TypeError, ValueError, RuntimeError):
        number = -1.0
    if not 0 <= number < float("inf"):
        msg = f"expected a weight that is finite and not negative, found {weight!r}"
        raise ConfigError(msg)
    return number


def checked_names(names: Collection[str]) -> tuple[str, ...]:
    """Names of parameters and buffers.

    Raises:
        ConfigError: It is one name, whose letters would be taken for names.
    """
    if isinstance(names, str):
        msg = f"expected a list of names, found the string {names!r}: put it in brackets"
        raise ConfigError(msg)
    return tuple(names)


def arguments_in_common(
    options: ReducerOptions, nonfinite: object, **others: object
) -> dict[str, object]:
    """What all ranks must have said alike, or their collectives would not meet, or their parameters part; in a form that compares as text.

    Args:
        options: Of the reducer; what one rank looks at by itself is left out.
        nonfinite: A reaction; those that only tell something may differ.
        **others: As they are.
    """
    own = {field.name: getattr(options, field.name) for field in fields(options)}
    del own["check_all"]
    own["delayed"] = sorted(options.delayed)
    if nonfinite in {"skip", "raise"}:
        own["nonfinite"] = nonfinite
    else:
        own["nonfinite"] = "go on"
    return own | others


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

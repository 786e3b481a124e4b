"""The meaning of DistributedDataParallel's arguments, some of which torch names in several ways."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

from torch import nn
from torch.nn.parameter import UninitializedParameter

from braid.errors import ConfigError
from braid.parallel.data_parallel.finite import NonfiniteHandler
from braid.parallel.gradients import Caps, CheckedNumbers, Hook, ParamTable, ReducerOptions

__all__ = [
    "WrapperSettings",
    "arguments_in_common",
    "caps_of",
    "checked_hash_every",
    "checked_hook",
    "checked_names",
    "checked_weight",
    "first_given",
    "table_of",
    "trigger_of",
]

MIB = 1 << 20


def table_of(module: nn.Module, ignored: Collection[str], ranks: Collection[int]) -> ParamTable:
    """Return the parameters that are averaged.

    Args:
        module: Module whose parameters are averaged.
        ignored: Names of parameters that are not.
        ranks: Global ranks that average.

    Raises:
        ConfigError: No parameter requires a gradient, some have no shape yet, or these ranks have
            different experts in some.
    """
    divided = [
        name
        for name, param in module.named_parameters()
        if name not in ignored and len({*param.__dict__.get("braid_experts", ())} & {*ranks}) > 1
    ]
    if divided:
        msg = (
            f"ranks {sorted(ranks)} have different experts in {', '.join(divided)}, which would be "
            "made equal: use braid.parallel.expert_parallel.average_gradients instead, or average "
            "over ranks that have the same experts"
        )
        raise ConfigError(msg)
    lazy = [
        name
        for name, param in module.named_parameters()
        if isinstance(param, UninitializedParameter)
    ]
    if lazy:
        msg = f"parameter {lazy[0]!r} of a lazy module has no shape yet: run the module once before"
        raise ConfigError(msg)
    table = ParamTable.of(module, ignored)
    if not table.requires_grad:
        msg = (
            f"none of the {len(table)} parameters of {type(module).__name__} requires a gradient: "
            "there is nothing to average, use the module as it is"
        )
        raise ConfigError(msg)
    return table


def first_given(forward_sync_buffers: bool | None, broadcast_buffers: bool | None) -> bool:
    """Return whether buffers are kept equal: the newer argument, else the older one, else True."""
    for given in (forward_sync_buffers, broadcast_buffers):
        if given is not None:
            return given
    return True


def caps_of(cap_mb: float | None, caps_mb: Sequence[float] | None) -> Caps:
    """Return the sizes of buckets.

    Raises:
        ConfigError: A cap is not a positive number.
    """
    given = [*(caps_mb or ()), *(() if cap_mb is None else (cap_mb,))]
    wrong = [cap for cap in given if not isinstance(cap, int | float)]
    if wrong:
        msg = f"bucket caps must be numbers of MiB, got {wrong[0]!r}"
        raise ConfigError(msg)
    if caps_mb:
        return Caps(tuple(int(cap * MIB) for cap in caps_mb))
    return Caps.of_mb(cap_mb)


def checked_hash_every(steps: int) -> int:
    """Return a number of steps, or 0.

    Raises:
        ConfigError: `steps` is neither.
    """
    if type(steps) is not int or steps < 0:
        msg = f"hash_every must be a number of steps, or 0, got {steps!r}"
        raise ConfigError(msg)
    return steps


def checked_hook(state: object, hook: object) -> Hook:
    """Return a communication hook.

    Raises:
        ConfigError: The hook cannot be called with a state and a bucket.
    """
    if not callable(hook):
        swapped = ": the state comes first" if callable(state) else ""
        msg = (
            f"a communication hook must be a function hook(state, bucket), got the "
            f"{type(hook).__name__} {hook!r}: call register_comm_hook(state, hook){swapped}"
        )
        raise ConfigError(msg)
    try:
        inspect.signature(hook).bind(state, None)
    except TypeError as error:
        name = getattr(hook, "__qualname__", repr(hook))
        msg = (
            f"a communication hook is called as hook(state, bucket), and "
            f"{name}{inspect.signature(hook)} cannot be: {error}"
        )
        raise ConfigError(msg) from None
    except ValueError:  # written in C: nobody knows before it is called
        pass
    known: Hook = hook
    return known


def checked_weight(weight: object) -> float | None:
    """Return a loss weight as a number, also where it is a tensor of one element.

    Raises:
        ConfigError: The weight is negative, not finite or no number.
    """
    if weight is None:
        return None
    try:
        # the program may pass anything
        number = -1.0 if isinstance(weight, str) else float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = -1.0
    if not 0 <= number < float("inf"):
        msg = f"a loss weight must be finite and not negative, got {weight!r}"
        raise ConfigError(msg)
    return number


def checked_names(names: Collection[str]) -> tuple[str, ...]:
    """Return names of parameters and buffers.

    Raises:
        ConfigError: `names` is one name, whose letters would be taken for names.
    """
    if isinstance(names, str):
        msg = f"names must be a list, got the string {names!r}: put it in brackets"
        raise ConfigError(msg)
    return tuple(names)


def arguments_in_common(
    options: ReducerOptions, nonfinite: object, **others: object
) -> dict[str, object]:
    """Return the arguments that must be equal on all ranks, in a form that compares as text.

    Args:
        options: Options of the reducer; what one rank looks at by itself is left out.
        nonfinite: Reaction to NaN and infinity; reactions that only tell something may differ.
        **others: Further arguments.
    """
    own = {field.name: getattr(options, field.name) for field in fields(options)}
    del own["finite_check"]
    own["delayed"] = sorted(options.delayed)
    own["nonfinite"] = nonfinite if nonfinite in {"skip", "raise"} else "go on"
    return own | others


def finite_check_of(nonfinite: object, *, check_all: bool) -> CheckedNumbers:
    """Return the numbers to look at; a reaction that changes nothing may come one step late."""
    if check_all:
        return "all"
    return "late" if nonfinite in {"ignore", "warn"} else "first"


def trigger_of(
    table: ParamTable,
    param: nn.Parameter | None,
    delayed: Sequence[tuple[str, nn.Parameter]] | None,
) -> str:
    """Return the name of the parameter that launches delayed ones; empty where there are none.

    Raises:
        ConfigError: Only one of the two is given, or a parameter is not in the table.
    """
    if (param is None) != (not delayed):
        msg = (
            "delay_all_reduce_named_params and param_to_hook_all_reduce belong together: pass both "
            "or none"
        )
        raise ConfigError(msg)
    if param is None:
        return ""
    known = {id(record.param): record.name for record in table}
    unknown = [name for name, _ in delayed or () if not any(name in r.names for r in table)]
    if id(param) not in known or unknown:
        named = ", ".join(map(repr, unknown)) if unknown else "param_to_hook_all_reduce"
        msg = f"{named} is no parameter of the module: pass those that the module has"
        raise ConfigError(msg)
    return known[id(param)]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapperSettings:
    """Arguments of a wrapper without module and group, as copies need them; parameters by name.

    Attributes:
        init_sync: Whether rank 0's values are copied at wrapping.
        broadcast_buffers: Whether rank 0's buffers are copied at wrapping.
        caps: Sizes of buckets.
        delayed: Names of parameters whose gradients are launched late.
        delayed_after: Name of the parameter whose gradient launches them.
        gradient_accumulation_steps: Number of backwards from average to average.
        nonfinite: Reaction to NaN and infinity.
        check_all: Whether every number is looked at.
        hash_every: Number of averagings from one comparison of parameters to the next.
        hook: Communication hook by name.
    """

    init_sync: bool
    broadcast_buffers: bool
    caps: Caps
    delayed: frozenset[str]
    delayed_after: str
    gradient_accumulation_steps: int
    nonfinite: str | NonfiniteHandler
    check_all: bool
    hash_every: int
    hook: str | None

    def options(self, wire: str | None, *, static_graph: bool) -> ReducerOptions:
        """Return the options of the reducer.

        Args:
            wire: Format in which gradients cross a network.
            static_graph: Whether every backward uses the same parameters, equally often.
        """
        return ReducerOptions(
            caps=self.caps,
            wire=wire,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            static_graph=static_graph,
            delayed=self.delayed,
            delayed_after=self.delayed_after,
            finite_check=finite_check_of(self.nonfinite, check_all=self.check_all),
        )

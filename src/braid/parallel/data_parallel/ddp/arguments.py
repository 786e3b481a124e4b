"""Checks and defaults of DistributedDataParallel's arguments, including torch's older names."""

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
    "first_given",
    "table_of",
    "trigger_of",
]

MIB = 1 << 20


def table_of(module: nn.Module, ignored: Collection[str], ranks: Collection[int]) -> ParamTable:
    """Return a table of the parameters with gradients that are averaged.

    Args:
        module: Module with the parameters.
        ignored: Names of parameters that are not averaged.
        ranks: Global ranks that average.

    Raises:
        ConfigError: No parameter requires a gradient, some parameters have no shape yet, or some
            hold different experts on these ranks.
    """
    divided = [
        name
        for name, param in module.named_parameters()
        if name not in ignored and len({*param.__dict__.get("braid_experts", ())} & {*ranks}) > 1
    ]
    if divided:
        msg = (
            f"ranks {sorted(ranks)} have different experts in {', '.join(divided)}, and DDP "
            "would average them: use braid.parallel.expert_parallel.average_gradients instead, "
            "or average over ranks that have the same experts"
        )
        raise ConfigError(msg)
    lazy = [
        name
        for name, param in module.named_parameters()
        if isinstance(param, UninitializedParameter)
    ]
    if lazy:
        msg = (
            f"parameter {lazy[0]!r} of a lazy module has no shape yet: run the module once "
            "before you wrap it"
        )
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
    """Return the first argument that is not None: whether rank 0's buffers are copied to all.

    Both arguments have the same meaning; if both are None, the result is True.
    """
    for argument in (forward_sync_buffers, broadcast_buffers):
        if argument is not None:
            return argument
    return True


def caps_of(cap_mb: float | None, caps_mb: Sequence[float] | None) -> Caps:
    """Return the size limits of buckets.

    Args:
        cap_mb: Limit of all buckets in MiB; None for the default limits.
        caps_mb: Limits of the first, second, ... bucket in MiB, instead of `cap_mb`; None or empty
            to use `cap_mb`.

    Raises:
        ConfigError: A cap is not a positive number.
    """
    caps = [*(caps_mb or ()), *(() if cap_mb is None else (cap_mb,))]
    wrong = [cap for cap in caps if not isinstance(cap, int | float)]
    if wrong:
        msg = f"bucket caps must be numbers of MiB, got {wrong[0]!r}"
        raise ConfigError(msg)
    if caps_mb:
        return Caps(tuple(int(cap * MIB) for cap in caps_mb))
    return Caps.of_mb(cap_mb)


def checked_hash_every(steps: int) -> int:
    """Return `steps` if it is a number of steps or 0.

    Raises:
        ConfigError: `steps` is anything else.
    """
    if type(steps) is not int or steps < 0:
        msg = f"hash_every must be a number of steps of at least 0, got {steps!r}"
        raise ConfigError(msg)
    return steps


def checked_hook(state: object, hook: object) -> Hook:
    """Return `hook` with its type checked.

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
            "a communication hook is called as hook(state, bucket), but "
            f"{name}{inspect.signature(hook)} does not take these arguments: {error}"
        )
        raise ConfigError(msg) from None
    except ValueError:  # functions written in C have no signature to check
        pass
    known: Hook = hook
    return known


def checked_names(names: Collection[str]) -> tuple[str, ...]:
    """Return names of parameters and buffers as a tuple.

    Raises:
        ConfigError: `names` is a string, which would be taken for a list of letters.
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
        options: Options of the reducer; options that only matter on this rank are left out.
        nonfinite: Reaction to NaN and infinity; ranks may differ in reactions that only report.
        **others: Further arguments.
    """
    arguments = {field.name: getattr(options, field.name) for field in fields(options)}
    del arguments["finite_check"]
    arguments["delayed"] = sorted(options.delayed)
    arguments["nonfinite"] = nonfinite if nonfinite in {"skip", "raise"} else "go on"
    return arguments | others


def finite_check_of(nonfinite: object, *, check_all: bool) -> CheckedNumbers:
    """Return which numbers of gradients to check for NaN and infinity.

    Args:
        nonfinite: Reaction to NaN and infinity; see `DistributedDataParallel`.
        check_all: Whether to check every number.
    """
    if check_all:
        return "all"
    return "late" if nonfinite in {"ignore", "warn"} else "first"


def trigger_of(
    table: ParamTable,
    param: nn.Parameter | None,
    delayed: Sequence[tuple[str, nn.Parameter]] | None,
) -> str:
    """Return the name of `param`; empty if it is None.

    Args:
        table: Parameters of the module.
        param: Parameter whose gradient, once computed, starts the reduction of delayed gradients.
        delayed: (name, parameter) pairs with delayed gradients.

    Raises:
        ConfigError: Only one of `param` and `delayed` is given, or a parameter is not in the table.
    """
    if (param is None) != (not delayed):
        msg = (
            "delay_all_reduce_named_params and param_to_hook_all_reduce work only together: pass "
            "both or neither"
        )
        raise ConfigError(msg)
    if param is None:
        return ""
    known = {id(record.param): record.name for record in table}
    unknown = [name for name, _ in delayed or () if not any(name in r.names for r in table)]
    if id(param) not in known or unknown:
        named = ", ".join(map(repr, unknown)) if unknown else "param_to_hook_all_reduce"
        msg = f"{named} is not a parameter of the module: pass parameters of the module"
        raise ConfigError(msg)
    return known[id(param)]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapperSettings:
    """Arguments of a wrapper, except module and group; copies of the wrapper keep them.

    Attributes:
        init_sync: Whether rank 0's values are copied at wrapping.
        broadcast_buffers: Whether rank 0's buffers are copied at wrapping.
        caps: Size limits of buckets.
        delayed: Names of parameters with gradients that are reduced late.
        delayed_after: Name of the parameter whose gradient, once computed, starts that reduction.
        gradient_accumulation_steps: Number of backwards per average.
        nonfinite: Reaction to NaN and infinity.
        check_all: Whether to check every number.
        hash_every: Number of averagings between two comparisons of parameters.
        hook: Name of the communication hook.
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
            wire: Format of gradients on a network.
            static_graph: Whether every backward uses the same parameters the same number of times.
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

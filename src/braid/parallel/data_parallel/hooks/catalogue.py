"""Communication hooks by name: formats and compression of gradients.

    "bf16", "fp16", "int8", "topk:0.01"    wire formats of `braid.comm`: numbers change on a network
                                           only, never in shared memory
    "powersgd:rank=2,start=500"            two thin factors of each matrix (`powersgd`)
    "bf16+powersgd:rank=2"                 the same, with the factors in 16 bits on a network

The error of a format stays on the rank where it occurs, and is added to its next gradient.
`bf16_hook` and `fp16_hook` use 16 bits inside of a host as well:
`model.register_comm_hook(None, bf16_hook)`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from braid.comm import Group, StepsBy
from braid.comm.formats import by_name
from braid.errors import ConfigError
from braid.parallel.data_parallel.hooks.powersgd import COMPRESSED, PowerSGDHook, PowerSGDOptions
from braid.parallel.gradients import GradBucket, Hook, ParamTable
from braid.parallel.gradients.grad_bucket import Steps
from braid.parallel.gradients.process_groups import group_of
from braid.types import dtype_name

__all__ = ["NAMES", "CastHook", "bf16_hook", "fp16_hook", "hook_of"]

FORMATS = {"bf16": "bf16", "fp16": "float16", "float16": "float16", "int8": "int8"}
DENSE = tuple(FORMATS)  # for factors, which have no small numbers to drop
POWERSGD = "powersgd"
NAMES = (*DENSE, "topk:RATIO", "powersgd:OPTIONS", "FORMAT+powersgd:OPTIONS")
WORDS = {"true": True, "false": False}


class CastHook:
    """Hook that averages gradients in another dtype, on all links, and casts them back.

    Complex gradients and gradients of 16 bits are sent unchanged.

    Args:
        dtype: 16-bit dtype in which gradients are exchanged. Sums are computed in 32 bits and
            rounded once.

    Cost: half the bytes of float32, and two passes over the gradients; rounding errors are lost.
    Gradients above 65504 become infinite in float16; `nonfinite=` does not detect this, since it
    checks gradients before the hook.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, state: Any, bucket: GradBucket) -> Steps:
        """Average a bucket over the group `state`, or over the bucket's group if it is None."""
        group = bucket.group if state is None else group_of(state)
        buffer = bucket.buffer()
        longer = buffer.is_floating_point() and buffer.itemsize > self.dtype.itemsize
        cast = buffer.to(self.dtype) if longer else buffer
        with group.coalesce(steps_by=StepsBy.WAITER) as batch:
            batch.all_reduce(cast, "avg")
        yield batch.work
        if longer:
            buffer.copy_(cast)

    def __repr__(self) -> str:
        return f"CastHook({self.dtype})"


bf16_hook = CastHook(torch.bfloat16)
fp16_hook = CastHook(torch.float16)


def hook_of(text: str, group: Group, table: ParamTable) -> tuple[str | None, Hook | None]:
    """Return the wire format and the hook for a name; one of the two is None.

    Args:
        text: Name, such as "bf16" or "powersgd:rank=2"; see the module docstring for all names.
        group: Ranks that train together.
        table: Parameters of the model.

    Raises:
        ConfigError: The name is unknown, an option is invalid, or no parameter would be
            compressed.
    """
    if not isinstance(text, str):
        # for callers without a type checker
        msg = f"hook takes a name, got {text!r}: use register_comm_hook(state, hook) for functions"  # type: ignore[unreachable]
        raise ConfigError(msg)
    wire, _, rest = text.rpartition("+")
    kind, _, options = rest.partition(":")
    if kind == POWERSGD:
        if wire and wire not in FORMATS:
            known = ", ".join(DENSE)
            msg = (
                f"hook={text!r}: {wire!r} is not a wire format for powersgd, choose one of {known}"
            )
            raise ConfigError(msg)
        hook = PowerSGDHook(_options_of(options, text), wire=FORMATS.get(wire))
        if wire:
            _check_wires(group, text, f"hook={rest!r}")
        _check_any_matrix(hook.options, table, text)
        return None, hook
    if wire or (text not in FORMATS and kind != "topk"):
        msg = f"hook={text!r} is unknown: choose one of {', '.join(NAMES)}"
        raise ConfigError(msg)
    name = FORMATS.get(text, text)
    by_name(name)  # raises for invalid options
    _check_wires(group, text, "register_comm_hook(None, bf16_hook) or fp16_hook")
    return name, None


def _check_wires(group: Group, text: str, instead: str) -> None:
    if not group.engine.capabilities.wires:
        msg = (
            f"hook={text!r} cannot run on this group, because a backend of torch moves its data: "
            f"use {instead} instead"
        )
        raise ConfigError(msg)


def _options_of(text: str, whole: str) -> PowerSGDOptions:
    fields = dataclasses.fields(PowerSGDOptions)
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields}
    values: dict[str, Any] = {}
    for option in filter(None, text.split(",")):
        name, _, value = option.partition("=")
        try:
            kind = kinds[name]
            values[name] = WORDS[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError) as exc:
            known = ", ".join(f"{field.name}={str(field.default).lower()}" for field in fields)
            msg = f"hook={whole!r}: {option!r} is not an option of powersgd, which has {known}"
            raise ConfigError(msg) from exc
    return PowerSGDOptions(**values)


def _check_any_matrix(options: PowerSGDOptions, table: ParamTable, text: str) -> None:
    dense = [record for record in table.requires_grad if not record.sparse]
    if any(options.compresses(record.param) for record in dense):
        return
    fit = [record for record in dense if record.param.dtype in COMPRESSED]
    others = len(table.requires_grad) - len(fit)
    largest = max(fit, key=lambda record: record.param.numel(), default=None)
    kinds = ", ".join(map(dtype_name, COMPRESSED))
    shown = "" if largest is None else f", the largest is {largest}"
    rest = f"; {others} more, sparse or of other dtypes, are never factored" if others else ""
    advice = "" if largest is None else "lower rank or rate, or "
    msg = (
        f"hook={text!r} finds nothing to compress: low-rank factors (rank {options.rank}) make "
        f"no matrix {options.rate} times smaller among {len(fit)} parameters of {kinds} with "
        f"dense gradients{shown}{rest}. Use other options: {advice}leave the hook out"
    )
    raise ConfigError(msg)

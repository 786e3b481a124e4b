"""Formats by name, as in `wire="bf16"` and in configuration files: `name`, or `name:option`."""

from __future__ import annotations

import torch

from braid.comm.formats.floats import BF16, FLOAT16, FLOAT32
from braid.comm.formats.integers import Int8
from braid.comm.formats.sparse import TopKFormat
from braid.comm.formats.wire_format import WireFormat
from braid.errors import ConfigError

__all__ = ["NAMES", "by_name"]

_CASTS = {form.name: form for form in (FLOAT32, BF16, FLOAT16)}
NAMES = (*_CASTS, "int8", "int8:stochastic", "topk:RATIO")


def by_name(name: str, *, generator: torch.Generator | None = None) -> WireFormat:
    """Return the format called `name`.

    Args:
        name: One of `NAMES`, with a number for RATIO: `topk:0.01` sends at most 1 % of the numbers.
        generator: Source of random numbers for stochastic rounding; unused by other formats.

    Raises:
        ConfigError: There is no such format, its option is invalid, or it needs a generator.
    """
    if name in _CASTS:
        return _CASTS[name]
    if name == "int8":
        return Int8()
    if name == "int8:stochastic":
        return Int8(stochastic=True, generator=generator)
    kind, _, option = name.partition(":")
    if kind == "topk":
        return TopKFormat(_ratio(name, option))
    hint = ""
    if kind.startswith(("rank", "powersgd")):
        hint = "; low-rank compression needs two all-reduces: use LowRank"
    msg = f"there is no wire format {name!r}: choose one of {', '.join(NAMES)}{hint}"
    raise ConfigError(msg)


def _ratio(name: str, option: str) -> float:
    try:
        return float(option)
    except ValueError:
        msg = f"the ratio in {name!r} is not a number: write one such as topk:0.01"
        raise ConfigError(msg) from None

"""Names and groups of an optimizer's parameters."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from braid.errors import ConfigError

__all__ = ["named_groups", "named_of"]


def named_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]] | None
) -> dict[nn.Parameter, str]:
    """A name for each parameter of an optimizer.

    Raises:
        ConfigError: Names repeat, are no pairs, or are missing.
    """
    own = [
        (number, place, param)
        for number, group in enumerate(optimizer.param_groups)
        for place, param in enumerate(group["params"])
    ]
    if named is None:
        return {param: f"noname.{number}.{place}" for number, place, param in own}
    pairs = list(named)
    strange: list[Any] = [pair for pair in pairs if not _is_pair(pair)]
    if strange:
        msg = (
            "expected named_parameters to be pairs of name and parameter, such as "
            f"model.named_parameters(), found {strange[0]!r}"
        )
        raise ConfigError(msg)
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        msg = (
            "expected different names for all parameters, found "
            f"{', '.join(map(repr, twice[:5]))} more than once"
        )
        raise ConfigError(msg)
    names = {param: name for name, param in reversed(pairs)}
    missing = sum(param not in names for _, _, param in own)
    if missing:
        msg = (
            f"expected a name for every parameter of the optimizer, found {missing} of {len(own)} "
            "without: pass named_parameters() of all models whose "
            "parameters it has"
        )
        raise ConfigError(msg)
    return {param: names[param] for _, _, param in own}


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2


def named_groups(
    names: dict[nn.Parameter, str], groups: int | Sequence[Sequence[nn.Parameter]] | None
) -> list[list[nn.Parameter]]:
    """Parameters that are reduced together.

    Args:
        names: All of them.
        groups: Number of groups of about the same number of parameters, or lists.

    Raises:
        ConfigError: A number below 1, something that is no parameter of the optimizer, or one that
            is in two groups.
    """
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups < 0:
            msg = f"expected a number of groups of at least 1, found {groups}"
            raise ConfigError(msg)
        trained = [param for param in names if param.requires_grad]
        count = min(groups, len(trained))
        if not count:
            return []
        size, more = divmod(len(trained), count)
        ends = [number * size + min(number, more) for number in range(count + 1)]
        return [trained[a:b] for a, b in itertools.pairwise(ends)]
    lists = [list(group) for group in groups]
    flat = [param for group in lists for param in group]
    if len(set(flat)) < len(flat) or any(param not in names for param in flat):
        msg = (
            "expected groups of different parameters of the optimizer, found one twice or one "
            "that it does not have"
        )
        raise ConfigError(msg)
    return [[param for param in group if param.requires_grad] for group in lists if group]

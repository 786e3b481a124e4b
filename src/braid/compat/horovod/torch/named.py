"""Names and groups of an optimizer's parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from braid.compat.horovod.common.util import split_list
from braid.errors import ConfigError
from braid.types import first_few

__all__ = ["named_groups", "named_of"]


def named_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]] | None
) -> dict[nn.Parameter, str]:
    """Return a name for each parameter of an optimizer.

    Raises:
        ConfigError: Names repeat or are missing, or the values are not pairs.
    """
    positions = [
        (number, place, param)
        for number, group in enumerate(optimizer.param_groups)
        for place, param in enumerate(group["params"])
    ]
    if named is None:
        return {param: f"noname.{number}.{place}" for number, place, param in positions}
    pairs = list(named)
    strange: list[Any] = [pair for pair in pairs if not _is_pair(pair)]
    if strange:
        msg = (
            f"named_parameters must be pairs of name and parameter, got {strange[0]!r}: pass "
            "model.named_parameters()"
        )
        raise ConfigError(msg)
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        msg = (
            f"parameters must have different names, but {first_few(map(repr, twice), 5)} occur "
            "more than once"
        )
        raise ConfigError(msg)
    names = {param: name for name, param in reversed(pairs)}
    missing = sum(param not in names for _, _, param in positions)
    if missing:
        msg = (
            f"{missing} of the optimizer's {len(positions)} parameters have no name: pass "
            "named_parameters() of all models with parameters in the optimizer"
        )
        raise ConfigError(msg)
    return {param: names[param] for _, _, param in positions}


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2


def named_groups(
    names: dict[nn.Parameter, str], groups: int | Sequence[Sequence[nn.Parameter]] | None
) -> list[list[nn.Parameter]]:
    """Return lists of parameters that are reduced together.

    Args:
        names: Names of all parameters.
        groups: Number of groups of nearly equal size, or lists of parameters.

    Raises:
        ConfigError: The number is below 0, a parameter is in two groups, or a group has a value
            that is not a parameter of the optimizer.
    """
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups < 0:
            msg = f"groups must be a number of at least 0, got {groups}"
            raise ConfigError(msg)
        required = [param for param in names if param.requires_grad]
        count = min(groups, len(required))
        return split_list(required, count) if count else []
    lists = [list(group) for group in groups]
    flat = [param for group in lists for param in group]
    if len(set(flat)) < len(flat) or any(param not in names for param in flat):
        msg = (
            "groups must contain different parameters of the optimizer: remove parameters that "
            "are listed twice or do not belong to the optimizer"
        )
        raise ConfigError(msg)
    return [[param for param in group if param.requires_grad] for group in lists if group]

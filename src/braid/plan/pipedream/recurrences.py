"""PipeDream's dynamic programs: which states make a stage, and how many machines share it.

    A(j, m)   seconds per minibatch of the best pipeline of states 0..j on m machines
            = min over k before j and n < m of  max(A(k, m - n), stage(k+1..j on n), transfers)

    paper      stage = max(compute, 2 (n - 1) w / (n B)) / n        the sum of gradients overlaps
    released   stage = (compute + 4 (n - 1) w / (n B)) / n          it does not

B is bytes per second of a link, w bytes of parameters. An input of a stage takes 2 a / B, there and
back, and is spread over its n machines in the released program. `released` is that of the code,
whose results `paper` does not always give.

Cost: O(S^2 M^2) operations for S states and M machines, vectorised over states.

Source: D. Narayanan et al., SOSP 2019, section 3.1 and its released optimizer.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braid.errors import ConfigError
from braid.plan.pipedream.antichains import States

__all__ = ["Partition", "Recurrence", "StagePlan", "partition"]

Recurrence = Literal["paper", "released"]
Floats = NDArray[np.float64]


class StagePlan(NamedTuple):
    """A stage.

    Attributes:
        first: First state of the stage.
        end: State after its last one.
        replicas: Machines that share it.
        nodes: Names of its nodes.
    """

    first: int
    end: int
    replicas: int
    nodes: frozenset[str]


class Partition(NamedTuple):
    """A pipeline.

    Attributes:
        seconds: Time of a minibatch in the steady state, that of the slowest stage or transfer.
        stages: Stages, the first one first.
        one_machine_s: Time of a minibatch on one machine.
        data_parallel_s: Time of a minibatch if all machines share one stage.
    """

    seconds: float
    stages: tuple[StagePlan, ...]
    one_machine_s: float
    data_parallel_s: float


def partition(
    states: States,
    machines: int,
    bytes_per_s: float,
    *,
    recurrence: Recurrence = "paper",
    straight: bool = False,
) -> Partition:
    """Return the best pipeline.

    Args:
        states: States of the profiled graph.
        machines: Number of machines.
        bytes_per_s: Bandwidth between two of them.
        recurrence: One of the two programs.
        straight: Whether each stage has one machine.

    Raises:
        ConfigError: A number is not positive, or a straight pipeline needs more states.
    """
    if machines < 1 or not bytes_per_s > 0:
        msg = f"needs machines >= 1 and a bandwidth, got {machines} and {bytes_per_s} bytes/s"
        raise ConfigError(msg)
    size = len(states.compute_s)
    limit = 1 if straight else machines
    best = np.full((machines + 1, size), np.inf)  # by machines and last state
    split = np.full((machines + 1, size, 2), -1)  # state before the last stage, its machines
    ends = np.arange(size)
    for m in range(1, machines + 1):
        if m <= limit:
            best[m] = _stage_s(states, None, ends, m, bytes_per_s, recurrence)
            split[m, :, 1] = m
        for n in range(1, min(limit, m - 1) + 1):
            for k in range(size):
                later = np.flatnonzero(states.before[:, k])
                if not len(later) or not np.isfinite(best[m - n, k]):
                    continue
                seconds = np.maximum(
                    _stage_s(states, k, later, n, bytes_per_s, recurrence), best[m - n, k]
                )
                seconds = np.maximum(seconds, _transfer_s(states, k, n, bytes_per_s, recurrence))
                if recurrence == "released":
                    handed = 2 * states.output_bytes[later] / (bytes_per_s * n)
                    seconds = np.maximum(seconds, np.where(later < size - 1, handed, 0.0))
                better = seconds < best[m, later]
                best[m, later[better]] = seconds[better]
                split[m, later[better]] = k, n
    if not np.isfinite(best[machines, -1]):
        msg = f"a straight pipeline of {machines} stages needs as many states, the graph has {size}"
        raise ConfigError(msg)
    return Partition(
        float(best[machines, -1]),
        _stages(states, split, machines),
        float(states.compute_s[-1]),
        float(_stage_s(states, None, ends[-1:], machines, bytes_per_s, recurrence)[0]),
    )


def _stage_s(
    states: States,
    before: int | None,
    ends: NDArray[np.intp],
    machines: int,
    bytes_per_s: float,
    recurrence: Recurrence,
) -> Floats:
    """Return the seconds of stages that begin after one state and end with each of others."""
    compute, params = states.compute_s[ends], states.param_bytes[ends]
    if before is not None:
        compute = compute - states.compute_s[before]
        params = params - states.param_bytes[before]
    wire = (machines - 1) * params / bytes_per_s
    if recurrence == "released":
        return np.asarray((compute + 4 * wire / machines) / machines)
    return np.maximum(compute / machines, 2 * wire / machines)


def _transfer_s(
    states: States, state: int, machines: int, bytes_per_s: float, recurrence: Recurrence
) -> float:
    share = machines if recurrence == "released" else 1
    return float(2 * states.output_bytes[state] / (bytes_per_s * share))


def _stages(states: States, split: NDArray[np.int64], machines: int) -> tuple[StagePlan, ...]:
    stages: list[StagePlan] = []
    last = len(states.compute_s) - 1
    while machines:
        before, replicas = (int(x) for x in split[machines, last])
        nodes = states.members[last] - (states.members[before] if before >= 0 else frozenset())
        stages.append(StagePlan(before + 1, last + 1, replicas, nodes))
        last, machines = before, machines - replicas
    return tuple(reversed(stages))

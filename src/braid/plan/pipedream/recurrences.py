"""PipeDream's dynamic programs: which states make a stage, and how many machines share it.

    A(j, m)   seconds per minibatch of the best pipeline of states 0..j on m machines
            = min over k before j and n < m of  max(A(k, m - n), stage(k+1..j on n), transfers)

    paper      stage = max(compute, 2 (n - 1) w / (n B)) / n        the sum of gradients overlaps
    released   stage = (compute + 4 (n - 1) w / (n B) / q) / n      it does not

B is bytes per second of a link, w bytes of parameters. An input of a stage takes 2 a / B, there and
back, and is spread over its n machines in the released program. `released` is the recurrence in
the code; its results can differ from `paper`.

Machines may be in levels, such as GPUs of a server and servers of a rack: then the best pipeline of
states i..j on all q machines of a level is what one machine of the next level computes.

Cost: O(S^3 M^2) operations for S states and M machines of a level, O(S^2 M^2) for the outermost
one; vectorised over first and last states.

Source: D. Narayanan et al., SOSP 2019, section 3.1 and its released optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braid.errors import ConfigError
from braid.plan.pipedream.antichains import States
from braid.plan.pipedream.memory import MemoryLimit

__all__ = ["MachineLevel", "Partition", "StagePlan", "partition"]

Recurrence = Literal["paper", "released"]
Floats = NDArray[np.float64]


class MachineLevel(NamedTuple):
    """Level of a cluster, with equal bandwidth between all of its machines.

    Attributes:
        machines: Number of machines; at higher levels, number of groups of the level below.
        bytes_per_s: Bandwidth between two of them.
    """

    machines: int
    bytes_per_s: float


class StagePlan(NamedTuple):
    """A stage of a pipeline: its layers and its replicas.

    Attributes:
        first: Number of the state (see `States`) at which the stage begins.
        end: Number of the state at which the next stage begins.
        replicas: Number of machines that run the stage, each on other minibatches.
        nodes: Names of its nodes.
    """

    first: int
    end: int
    replicas: int
    nodes: frozenset[str]


class Partition(NamedTuple):
    """Pipeline that the search has found, with its predicted times.

    Attributes:
        seconds: Time of a minibatch in the steady state: the time of the slowest stage or transfer.
        stages: Stages, the first one first.
        one_machine_s: Time of a minibatch on one machine.
        data_parallel_s: Time of a minibatch if all machines share one stage, level by level.
    """

    seconds: float
    stages: tuple[StagePlan, ...]
    one_machine_s: float
    data_parallel_s: float


def partition(
    states: States,
    levels: Sequence[MachineLevel],
    *,
    recurrence: Recurrence = "paper",
    straight: bool = False,
    memory: MemoryLimit | None = None,
) -> Partition:
    """Return the pipeline with the least time per minibatch; see the module docstring.

    Args:
        states: States of the profiled graph.
        levels: Levels of machines, beginning with the level of the fastest links.
        recurrence: `paper` or `released`, the two variants of PipeDream's dynamic program.
        straight: Whether each stage has one machine.
        memory: Memory of a machine; without a limit when None.

    Raises:
        ConfigError: A number is not positive, a straight pipeline needs more states, or no pipeline
            fits into memory.
    """
    problems = [level for level in levels if level.machines < 1 or not level.bytes_per_s > 0]
    if not levels or problems:
        msg = (
            "each level needs at least 1 machine and a bandwidth above 0 bytes/s, got "
            f"{list(map(tuple, levels))}"
        )
        raise ConfigError(msg)
    spans = _Spans.of(states)
    total = prod(level.machines for level in levels)
    solved: list[_Solved] = []
    for number, level in enumerate(levels):
        solved.append(
            _Solved(
                states,
                spans if not solved else spans._replace(compute_s=solved[-1].best[-1]),
                level,
                recurrence,
                inner=prod(inner_level.machines for inner_level in levels[:number]),
                later=0 if len(levels) == 1 else total - level.machines,
                straight=straight,
                memory=None if number else memory,
                whole=number + 1 == len(levels),
            )
        )
    seconds = float(solved[-1].best[levels[-1].machines][0, -1])
    if not np.isfinite(seconds):
        size = len(states.compute_s)
        if memory is not None and not (straight and total > size):
            raise ConfigError(memory.too_small(spans.params, spans.saved, total))
        msg = (
            f"a straight pipeline of {total} stages needs {total} cuts of the graph, which has "
            f"only {size}: use fewer machines"
        )
        raise ConfigError(msg)
    stages = tuple(
        StagePlan(first, end, replicas, _nodes(states, first, end))
        for first, end, replicas in _stages(solved, 0, len(states.compute_s) - 1)
    )
    together_s, params = spans.compute_s[:1, -1:], spans.params[:1, -1:]
    one_s, inner = float(together_s[0, 0]), 1
    for level in levels:
        together_s = _Solved.stage_s(together_s, params, level.machines, level, recurrence, inner)
        inner *= level.machines
    return Partition(seconds, stages, one_s, float(together_s[0, 0]))


class _Spans(NamedTuple):
    """States from one to another, by the first one and the last one.

    Attributes:
        compute_s: Seconds of all nodes; infinite where these are not in order.
        params: Bytes of their parameters.
        saved: Bytes that they keep for a minibatch, their input among them.
    """

    compute_s: Floats
    params: Floats
    saved: Floats

    @classmethod
    def of(cls, states: States) -> _Spans:
        size = len(states.compute_s)
        in_order = np.ones((size, size), np.bool_)
        in_order[1:] = states.before.T[:-1]  # the state before the first one

        def between(totals: Floats, otherwise: float = 0.0) -> Floats:
            before = np.concatenate([[0.0], totals[:-1]])
            return np.where(in_order, totals[None, :] - before[:, None], otherwise)

        input_bytes = np.concatenate([[0.0], states.output_bytes[:-1]])
        return cls(
            between(states.compute_s, np.inf),
            between(states.param_bytes),
            between(states.saved_bytes) + input_bytes[:, None],
        )


class _Solved:
    """The best pipelines of a level, for all first and last states.

    Attributes:
        best: Seconds, by number of machines, first state and last state.
    """

    def __init__(
        self,
        states: States,
        spans: _Spans,
        level: MachineLevel,
        recurrence: Recurrence,
        *,
        inner: int,
        later: int,
        straight: bool,
        memory: MemoryLimit | None,
        whole: bool,
    ) -> None:
        self._states, self._spans, self._level = states, spans, level
        self._recurrence, self._inner, self._later = recurrence, inner, later
        self._memory = memory
        self.limit = 1 if straight else level.machines
        size = len(states.compute_s)
        rows = 1 if whole else size  # of the outermost level only the whole is needed
        self.best = [np.full((rows, size), np.inf) for _ in range(level.machines + 1)]
        for m in range(1, level.machines + 1):
            best = self.best[m]
            if m <= self.limit:
                best[:] = self._stages_s(m, m)[:rows]
            for n in range(1, min(self.limit, m - 1) + 1):
                last_s = self._last_s(m, n)
                for k in range(size - 1):
                    first = self.best[m - n][: k + 1, k, None]
                    block = best[: k + 1, k + 1 :]
                    np.minimum(block, np.maximum(first, last_s[k]), out=block)

    def parts(self, m: int, begin: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield first state, last state and machines of each stage of a best pipeline.

        The pipeline has the states from `begin` to `last`, and `m` machines.
        """
        wanted = self.best[m][begin, last]
        if m <= self.limit and self._stages_s(m, m)[begin, last] == wanted:
            yield begin, last, m
            return
        for n in range(1, min(self.limit, m - 1) + 1):
            last_s = self._last_s(m, n)
            for k in range(begin, last):
                if max(self.best[m - n][begin, k], last_s[k][last - k - 1]) == wanted:
                    yield from self.parts(m - n, begin, k)
                    yield k + 1, last, n
                    return

    def _last_s(self, m: int, n: int) -> list[Floats]:
        """Return the seconds of a last stage on n of m machines, with its transfers, by state k."""
        stages, output, size = self._stages_s(m, n), self._states.output_bytes, len(self.best[0][0])
        bandwidth = self._level.bytes_per_s
        if self._recurrence == "paper":
            input_s = 2 * output / bandwidth
            return [np.maximum(stages[k + 1, k + 1 :], input_s[k]) for k in range(size - 1)]
        input_s = 2 * output / (bandwidth * n)
        handed = input_s.copy()
        handed[-1] = 0.0  # the last state hands on nothing
        return [
            np.maximum(np.maximum(stages[k + 1, k + 1 :], input_s[k]), handed[k + 1 :])
            for k in range(size - 1)
        ]

    def _stages_s(self, m: int, n: int) -> Floats:
        """Return the seconds of one stage on n machines, the last of m, by first and last state."""
        seconds = self.stage_s(
            self._spans.compute_s, self._spans.params, n, self._level, self._recurrence, self._inner
        )
        if self._memory is None:
            return seconds
        machines = self._level.machines - m + n + self._later  # of this stage and all later ones
        held = (machines - 1) // n + 1
        fits = self._memory.fits(self._spans.params, self._spans.saved, held)
        return np.where(fits, seconds, np.inf)

    @staticmethod
    def stage_s(
        compute_s: Floats,
        params: Floats,
        machines: int,
        level: MachineLevel,
        recurrence: Recurrence,
        inner: int = 1,
    ) -> Floats:
        """Return the seconds of stages that some machines of a level share.

        Args:
            compute_s: Seconds of computation of each stage on one machine.
            params: Bytes of parameters of each stage.
            machines: Number of machines.
            level: The level.
            recurrence: Variant of PipeDream's program; see `partition`.
            inner: Number of machines of lower levels in each of these machines.
        """
        wire = (machines - 1) * params / level.bytes_per_s
        if recurrence == "released":
            return np.asarray((compute_s + 4 * wire / machines / inner) / machines)
        return np.maximum(compute_s / machines, 2 * wire / machines)


def _stages(solved: Sequence[_Solved], begin: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield each stage: its first cut of the graph, the cut after its last, and its replicas.

    A stage of the outermost level is divided by the solutions of the inner levels.
    """
    *inner, outer = solved
    for first, own_last, machines in outer.parts(len(outer.best) - 1, begin, last):
        if not inner:
            yield first, own_last + 1, machines
            continue
        for deeper_first, end, replicas in _stages(inner, first, own_last):
            yield deeper_first, end, machines * replicas


def _nodes(states: States, first: int, end: int) -> frozenset[str]:
    before = states.members[first - 1] if first else frozenset()
    return states.members[end - 1] - before

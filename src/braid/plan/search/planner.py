"""The planner: every split, its time and memory; the best ones simulated.

    splits ── estimate (closed forms) ── fits? ── 20 fastest ── simulate their programs ── ranking
                                          |
                                          no: reason, and missing bytes

All splits are considered, so the result is never worse than plain data parallelism, a pipeline of
even stages, or any other one by itself. Combinations that the engines do not support are excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from braid.errors import ConfigError
from braid.plan.costs import Machines, ModelCosts, Training
from braid.plan.search.estimate import Estimator, SplitEstimate
from braid.plan.search.rescoring import rescore
from braid.plan.search.split import splits
from braid.programs.schedule.pipeline import TRAINING

__all__ = ["Ranking", "find_splits"]

NUM_SIMULATED = 20


class Ranking(NamedTuple):
    """Possible splits of a training: splits that fit into memory, and splits that do not.

    Attributes:
        fitting: Estimates of splits that fit, the fastest first.
        too_large: Estimates of splits that do not fit, the one with the least memory first.
        estimator: Estimator that made these estimates.
    """

    fitting: list[SplitEstimate]
    too_large: list[SplitEstimate]
    estimator: Estimator

    @property
    def best(self) -> SplitEstimate:
        """Fastest split that fits.

        Raises:
            ConfigError: No split fits; the message names the missing memory.
        """
        if self.fitting:
            return self.fitting[0]
        machines = self.estimator.machines
        least = self.too_large[0]
        memory = least.memory
        largest = max(memory._fields, key=lambda part: getattr(memory, part))
        msg = (
            f"{self.estimator.model.model} does not fit on {machines.num_ranks} ranks of "
            f"{machines.memory_bytes / 1e9:.3g} GB: the smallest split, {least.split}, needs "
            f"{memory.nbytes / 1e9:.3g} GB a rank, most of it for {largest}. Use more ranks, a "
            f"smaller batch, or {memory.nbytes / 1e9:.3g} GB"
        )
        raise ConfigError(msg)


def find_splits(
    model: ModelCosts,
    machines: Machines,
    training: Training,
    *,
    schedules: Sequence[str] = TRAINING,
    num_simulated: int = NUM_SIMULATED,
    asynchronous: bool = False,
    servers: bool = True,
) -> Ranking:
    """Return all possible splits of a training, ranked by predicted time.

    Args:
        model: Costs of the model's layers.
        machines: Costs of the machines.
        training: Batch and optimizer.
        schedules: Schedules of pipelines to consider.
        num_simulated: Number of splits whose programs are simulated.
        asynchronous: Whether to consider pipelines with stale gradients: their losses differ from
            the losses of all other splits.
        servers: Whether to consider parameter servers, if their costs are known.

    Raises:
        ConfigError: The batch cannot be divided over the ranks in any way.
    """
    estimator = Estimator(model, machines, training)
    candidates = list(
        splits(
            machines.num_ranks,
            training.batch,
            model.num_layers,
            model.tensor_sizes,
            sequence_sizes=model.sequence_sizes,
            expert_sizes=model.expert_sizes,
            schedules=schedules,
            servers=servers and machines.knows_servers,
            asynchronous=asynchronous,
        )
    )
    if not candidates:
        msg = (
            f"a batch of {training.batch} rows and {model.num_layers} layers cannot be divided "
            f"over exactly {machines.num_ranks} ranks: replicas must divide the batch, and each "
            "stage needs a layer. Use another batch or number of ranks"
        )
        raise ConfigError(msg)
    estimates = [estimator.estimate(split) for split in candidates]
    limit = machines.memory_bytes
    fitting = sorted((e for e in estimates if e.memory.nbytes <= limit), key=_rank)
    too_large = sorted(
        (e for e in estimates if e.memory.nbytes > limit), key=lambda e: e.memory.nbytes
    )
    first = sorted((rescore(estimator, e) for e in fitting[:num_simulated]), key=_rank)
    # a closed form that was not simulated does not displace the best of those that were
    rest = sorted([*first[1:], *fitting[num_simulated:]], key=_rank)
    return Ranking([*first[:1], *rest], too_large, estimator)


def _rank(estimate: SplitEstimate) -> tuple[float, int, float]:
    """Return the key of the order: by time; simpler splits first, where times are alike."""
    split = estimate.split
    parts = [*(n > 1 for axis, n in split.axes.items() if axis != "dp"), split.recompute != "never"]
    parts += [bool(split.strategy)] * 2 + [bool(split.versions)] * 3
    seconds = float(f"{estimate.seconds:.2e}")  # what could be measured
    return seconds, split.shard + sum(parts), estimate.memory.nbytes

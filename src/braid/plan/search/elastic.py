"""The fastest mesh of a number of ranks for a training whose step does not change with it.

An elastic training keeps the micro-batches of a step when ranks are lost or come. Replicas take
them in rounds, so a step of s micro-batches on d replicas lasts ceil(s / d) times as long as one
micro-batch on one replica. More stages make a micro-batch faster, more replicas save rounds.
"""

from __future__ import annotations

from dataclasses import replace

from braid.errors import ConfigError
from braid.plan.costs import Machines, ModelCosts, Training
from braid.plan.search.estimate import Estimator
from braid.plan.search.split import Split

__all__ = ["fastest_mesh"]


def fastest_mesh(
    costs: ModelCosts, machines: Machines, training: Training, wish: Split, shards: int
) -> str:
    """Return the mesh with the fastest steps on all ranks: pipeline stages and replicas, pp x dp.

    Args:
        costs: Costs of the model's layers.
        machines: Costs of the ranks.
        training: Dtype and optimizer states; its `batch` is the number of rows of a micro-batch.
        wish: Split with the wanted sharding stage, schedule and number of micro-batches of a
            pipeline; its numbers of ranks are replaced.
        shards: Number of micro-batches of a step, over all replicas.

    Raises:
        ConfigError: No mesh fits into the memory of the ranks.
    """
    estimates = []
    num_ranks = machines.num_ranks
    is_divisible = training.batch % wish.microbatches == 0
    most_stages = num_ranks if is_divisible else 1
    for pp in (n for n in range(1, most_stages + 1) if num_ranks % n == 0):
        dp = num_ranks // pp
        split = replace(
            wish,
            pp=pp,
            dp=dp,
            shard=wish.shard if dp > 1 else 0,
            microbatches=wish.microbatches if pp > 1 else 1,
        )
        if split.num_stages <= costs.num_layers:
            whole = replace(training, batch=dp * training.batch)
            estimate = Estimator(costs, machines, whole).estimate(split)
            estimates.append((-(-shards // dp) * estimate.seconds, pp, estimate.memory.nbytes))
    fitting = [one for one in estimates if one[2] <= machines.memory_bytes]
    if not fitting:
        least = min(nbytes for _, _, nbytes in estimates)
        msg = (
            f"{costs.model} does not fit on {num_ranks} ranks of {machines.memory_bytes / 1e9:.3g} "
            f"GB: the smallest split needs {least / 1e9:.3g} GB a rank"
        )
        raise ConfigError(msg)
    _, pp, _ = min(fitting)
    return f"pp={pp},dp={num_ranks // pp}" if pp > 1 else f"dp={num_ranks}"

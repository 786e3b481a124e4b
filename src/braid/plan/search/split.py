"""Ways of splitting a training over ranks: all that `braid train` can do, as data.

    ranks = pp * dp * tp         stages, replicas, parts of layers; tp neighbours are the nearest
    batch = dp * microbatches * rows

The generator of splits knows which combinations the engines refuse, so every split can be run.
Asynchronous pipelines train with stale gradients, so they are there only if they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from braid.programs.schedule.files import schedule_named
from braid.programs.schedule.pipeline import LOOPED, TRAINING, VersionRule, most_held, stage_ranks

__all__ = ["SPLIT_BACKWARD", "Split", "held", "homes", "splits"]

SPLIT_BACKWARD = ("zb_h1", "zb_h2", "zbv", "v_half", "v_min")
TWO_STAGES = (*LOOPED, "zbv", "v_half", "v_min")  # stages of each rank, unless there is a number
HOLDS_ALL = ("gpipe", "breadth_first")
MORE_STAGES = (4, 8)  # of each rank, besides two
MOST_MICROBATCHES = 256
PS: Literal["ps"] = "ps"
RECOMPUTE: tuple[Literal["never", "always"], ...] = ("never", "always")


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One way to split a training over a mesh, with its schedule.

    Attributes:
        pp: Number of ranks of a pipeline.
        dp: Number of replicas.
        tp: Number of ranks that share each layer.
        shard: ZeRO stage of the sharding over replicas: 1, 2 or 3; 0 for no sharding.
        schedule: Name of the pipeline's schedule.
        microbatches: Micro-batches of a step.
        recompute: Whether forwards run again in backward: `never` or `always`.
        strategy: `ps` for a parameter server, with one server per worker on the same hosts.
        versions: Rule for the weight versions of an asynchronous pipeline: `stash` or `2bw`. 2bw
            takes a step every `microbatches` micro-batches. Empty for a synchronous pipeline.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    shard: int = 0
    schedule: str = "1f1b"
    microbatches: int = 1
    recompute: Literal["never", "always"] = "never"
    strategy: Literal["", "ps"] = ""
    versions: VersionRule | Literal[""] = ""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that train."""
        return self.pp * self.dp * self.tp

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.pp * (_stages_per_rank(self.schedule) if self.pp > 1 else 1)

    @property
    def mesh(self) -> str:
        """Axes of the mesh, as text for `braid train --mesh`; empty if all ranks are replicas."""
        is_row = self.pp > 1 or self.microbatches > 1 or self.recompute != "never"
        axes = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        shown = [f"{k}={n}" for k, n in axes.items() if n > 1 or (k == "pp" and is_row)]
        return ",".join(shown) if is_row or self.tp > 1 else ""

    def __str__(self) -> str:
        """Return a short description, such as `pp=2,dp=4 1f1b m=8 recompute zero1`."""
        words = [f"pp={self.pp}"] if self.pp > 1 else []
        words += [f"dp={self.dp}"] if self.dp > 1 else []
        words += [f"tp={self.tp}"] if self.tp > 1 else []
        text = ",".join(words) or "one rank"
        text += f" {self.versions or self.schedule}" if self.pp > 1 else ""
        text += f" m={self.microbatches}" if self.microbatches > 1 else ""
        text += " recompute" if self.recompute != "never" else ""
        text += f" zero{self.shard}" if self.shard else ""
        text += f" ({self.stale} stale)" if self.versions else ""
        return text + (" parameter server" if self.strategy else "")

    @property
    def stale(self) -> int:
        """Age of the oldest gradients in steps; 0 unless the pipeline is asynchronous."""
        return {"": 0, "2bw": 1}.get(self.versions, self.pp - 1)


def splits(
    num_ranks: int,
    batch: int,
    num_layers: int,
    tensor_sizes: Sequence[int] = (1,),
    *,
    schedules: Sequence[str] = TRAINING,
    servers: bool = True,
    asynchronous: bool = False,
) -> Iterator[Split]:
    """Yield every split of a batch over exactly `num_ranks` ranks.

    Args:
        num_ranks: Number of ranks.
        batch: Rows of a step.
        num_layers: Number of layers, at least one for each stage.
        tensor_sizes: Numbers of ranks that can share a layer.
        schedules: Names of the pipeline schedules to use.
        servers: Whether to yield the split with a parameter server.
        asynchronous: Whether to yield pipelines with stale gradients.
    """
    names = [
        *schedules,
        *(f"{name}:{n}" for name in LOOPED if name in schedules for n in MORE_STAGES),
    ]
    for tp in tensor_sizes:
        if num_ranks % tp:
            continue
        for pp in _divisors(num_ranks // tp):
            dp = num_ranks // tp // pp
            if pp > num_layers or batch % dp:
                continue
            yield from _of_mesh(pp, dp, tp, batch, num_layers, names)
            if asynchronous and pp > 1 and dp == tp == 1:
                yield Split(pp=pp, versions="stash")
                for m in _divisors(batch):
                    if pp <= m <= MOST_MICROBATCHES:
                        yield Split(pp=pp, versions="2bw", microbatches=m)
            if servers and dp > 1 and pp == tp == 1:
                yield Split(dp=dp, strategy=PS)


def _of_mesh(
    pp: int, dp: int, tp: int, batch: int, num_layers: int, schedules: Sequence[str]
) -> Iterator[Split]:
    for m in _divisors(batch // dp):
        if m > MOST_MICROBATCHES:
            continue
        for schedule in schedules if pp > 1 else ("1f1b",):
            for recompute in RECOMPUTE:
                for shard in (0, 1, 2, 3) if dp > 1 else (0,):
                    split = Split(
                        pp=pp,
                        dp=dp,
                        tp=tp,
                        shard=shard,
                        schedule=schedule,
                        microbatches=m,
                        recompute=recompute,
                    )
                    splits_backward = pp > 1 and schedule in SPLIT_BACKWARD
                    if split.num_stages <= num_layers and not (shard and splits_backward):
                        yield split


@cache
def homes(schedule: str, pp: int) -> tuple[int, ...]:
    """Return the rank of each stage of a schedule with `pp` ranks."""
    ranks = stage_ranks(schedule_named(schedule)(pp, 1))
    return tuple(ranks[stage] for stage in range(len(ranks)))


@cache
def held(schedule: str, pp: int, microbatches: int) -> tuple[int, ...]:
    """Return, by rank, the largest number of (micro-batch, stage) pairs with stored activations.

    If a backward is split into two parts, gradients that are stored between them count as well.
    """
    if schedule.partition(":")[0] in HOLDS_ALL:
        per_rank = _stages_per_rank(schedule) if pp > 1 else 1
        return (microbatches * per_rank,) * pp
    # more micro-batches than this are never under way at a time
    chunks = _stages_per_rank(schedule)
    program = schedule_named(schedule)(pp, min(microbatches, 2 * chunks * pp + 2))
    if schedule not in SPLIT_BACKWARD:
        return tuple(most_held(program))
    counts = []
    for actions in program.ranks:
        now, most = 0, 0
        for action in actions:
            has_inputs = action.unit > 0  # the first stage does all of its backward in W
            now += {"F": 1, "I": has_inputs, "W": -1 - has_inputs}.get(action.kind, 0)
            most = max(most, now)
        counts.append(most)
    return tuple(counts)


def _stages_per_rank(schedule: str) -> int:
    name, _, count = schedule.partition(":")
    return int(count) if count else 1 + (name in TWO_STAGES)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)

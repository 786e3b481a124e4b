"""Ways of splitting a training over ranks: all that `braid train` can do, as data.

    ranks = pp * dp * cp * ep * tp     stages, replicas, parts of sequences, experts and layers
    batch = dp * ep * microbatches * rows

Neighbours along the last axis, tp, are the nearest ranks.

The generator of splits knows which combinations the engines refuse, so every split can be run.
Asynchronous pipelines train with stale gradients, so they are there only if they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Literal

from braid.programs.schedule.files import schedule_named
from braid.programs.schedule.pipeline import LOOPED, TRAINING, VersionRule, most_held, stage_ranks

__all__ = ["GATHERED", "SPLIT_BACKWARD", "Split", "held", "homes", "splits"]

GATHERED = 3  # stage of ZeRO at which parameters are in parts
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
        cp: Number of ranks that share each sequence.
        ep: Number of ranks that share the experts; they have different samples.
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
    cp: int = 1
    ep: int = 1
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
        return self.pp * self.replicas * self.tp

    @property
    def replicas(self) -> int:
        """Number of ranks with the same layers, over which gradients are averaged."""
        return self.dp * self.cp * self.ep

    @property
    def samples(self) -> int:
        """Number of ranks that each train on their own samples of a batch."""
        return self.dp * self.ep

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.pp * (_stages_per_rank(self.schedule) if self.pp > 1 else 1)

    @property
    def mesh(self) -> str:
        """Axes of the mesh, as text for `braid train --mesh`; empty if all ranks are replicas."""
        is_row = self.pp > 1 or self.microbatches > 1 or self.recompute != "never"
        shown = [f"{k}={n}" for k, n in self.axes.items() if n > 1 or (k == "pp" and is_row)]
        return ",".join(shown) if is_row or self.num_ranks > self.dp else ""

    @property
    def axes(self) -> dict[str, int]:
        """Number of ranks along each axis; neighbours along the last axis are the nearest."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep, "tp": self.tp}

    def __str__(self) -> str:
        """Return a short description, such as `pp=2,dp=4 1f1b m=8 recompute zero1`."""
        words = [f"{axis}={size}" for axis, size in self.axes.items() if size > 1]
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

    @property
    def num_gathers(self) -> int:
        """Number of times that a step gathers all parameters: after it, or around each use."""
        return 2 * self.microbatches if self.shard == GATHERED else int(self.shard > 0)

    @property
    def slots(self) -> float:
        """Temporary memory of sharded units, in units of the largest layer's bytes."""
        # stage 1: two sums of parts; stage 2: two gradients; stage 3: two gradients, two parameters
        return (0.0, 2.0 / self.replicas, 2.0, 4.0)[self.shard]


def splits(
    num_ranks: int,
    batch: int,
    num_layers: int,
    tensor_sizes: Sequence[int] = (1,),
    *,
    sequence_sizes: Sequence[int] = (1,),
    expert_sizes: Sequence[int] = (1,),
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
        sequence_sizes: Numbers of ranks that can share a sequence.
        expert_sizes: Numbers of ranks that can share the experts.
        schedules: Names of the pipeline schedules to use.
        servers: Whether to yield the split with a parameter server.
        asynchronous: Whether to yield pipelines with stale gradients.
    """
    names = [
        *schedules,
        *(f"{name}:{n}" for name in LOOPED if name in schedules for n in MORE_STAGES),
    ]
    for cp, ep, tp in product(sequence_sizes, expert_sizes, tensor_sizes):
        if num_ranks % (cp * ep * tp):
            continue
        base, remaining = Split(cp=cp, ep=ep, tp=tp), num_ranks // (cp * ep * tp)
        # the layers of a model with experts are captured, and a pipeline cannot shard these
        for pp in _divisors(remaining) if ep == 1 else (1,):
            split = replace(base, pp=pp, dp=remaining // pp)
            if pp > num_layers or batch % split.samples:
                continue
            yield from _of_mesh(split, batch, num_layers, names)
            if asynchronous and pp == num_ranks > 1:
                yield Split(pp=pp, versions="stash")
                for m in _divisors(batch):
                    if pp <= m <= MOST_MICROBATCHES:
                        yield Split(pp=pp, versions="2bw", microbatches=m)
            if servers and split.dp == num_ranks > 1:
                yield Split(dp=num_ranks, strategy=PS)


def _of_mesh(mesh: Split, batch: int, num_layers: int, schedules: Sequence[str]) -> Iterator[Split]:
    """Yield the splits with the sizes of `mesh` along all axes."""
    for m in _divisors(batch // mesh.samples):
        if m > MOST_MICROBATCHES:
            continue
        for schedule in schedules if mesh.pp > 1 else ("1f1b",):
            for recompute in RECOMPUTE:
                for shard in (0, 1, 2, 3) if mesh.replicas > 1 else (0,):
                    split = replace(
                        mesh,
                        shard=shard,
                        schedule=schedule,
                        microbatches=m,
                        recompute=recompute,
                    )
                    splits_backward = mesh.pp > 1 and schedule in SPLIT_BACKWARD
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

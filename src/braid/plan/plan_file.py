"""A plan: one split of one training, as a file to read, to change and to follow.

    braid plan ... --plan plan.json        braid train --model small --plan plan.json

Of two kinds: the planner's, and PipeDream's (`pipedream.plan_file`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from braid.errors import ConfigError
from braid.plan.costs import Origin
from braid.plan.pipedream import PipeDreamPlan
from braid.plan.search.estimate import Estimator, MemoryEstimate, SplitEstimate, StepTimeEstimate
from braid.plan.search.rescoring import action_s, program_of
from braid.plan.search.split import Split
from braid.programs.layout import Mesh
from braid.programs.schedule.files import check_schedule
from braid.programs.schedule.pipeline import VersionRule
from braid.programs.topology import DTYPES

__all__ = ["Plan", "Prediction", "read_plan"]

WORK = frozenset("FBIWR")
Count = Annotated[int, msgspec.Meta(ge=1)]


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted time and memory of a plan.

    Attributes:
        seconds: Seconds of a step.
        parts: Parts of these seconds, by the names of the fields of `StepTimeEstimate`.
        memory: Bytes on the rank that holds most, by the names of the fields of `MemoryEstimate`.
        actions: Seconds of each action of a pipeline, by its kind and stage, such as F0.
        level_bytes: Bytes that a step sends over one link of each level of the cluster.
        layers: Whether the times of layers were `measured` or `estimated`.
        machines: Whether the times of communication were `measured` or `estimated`.
        simulated: Whether the pipeline's program was simulated.
    """

    seconds: float
    parts: dict[str, float]
    memory: dict[str, float]
    actions: dict[str, float] = {}
    level_bytes: dict[str, float] = {}
    layers: Origin = "estimated"
    machines: Origin = "estimated"
    simulated: bool = False


class Plan(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="split",
):
    """A way to split a training over ranks, as a plan file contains it.

    Attributes:
        model: Name of the model.
        batch: Rows of a step.
        context: Bytes of a sequence, for a GPT; 0 for another model.
        mesh: Ranks along each axis, such as `pp=2,dp=2`; empty if all ranks are replicas.
        ranks: Number of ranks.
        balance: Number of layers of each stage.
        schedule: Schedule of the pipeline.
        microbatches: Micro-batches of a step.
        recompute: Whether forwards run again in backward: `never` or `always`.
        shard: ZeRO stage of the sharding over replicas: 1, 2 or 3; 0 for no sharding.
        strategy: `ps` for a parameter server.
        versions: Rule for the weight versions of an asynchronous pipeline: `stash`, `vertical_sync`
            or `2bw`.
        dtype: Dtype of parameters and activations.
        optimizer_states: Number of optimizer states per parameter.
        predicted: Predicted time and memory; None if the file has none.
    """

    model: str = ""
    batch: Count
    context: Annotated[int, msgspec.Meta(ge=0)] = 0
    mesh: str = ""
    ranks: Count
    balance: tuple[int, ...] = ()
    schedule: str = "1f1b"
    microbatches: Count = 1
    recompute: Literal["never", "always"] = "never"
    shard: Annotated[int, msgspec.Meta(ge=0, le=3)] = 0
    strategy: Literal["", "ps"] = ""
    versions: VersionRule | Literal[""] = ""
    dtype: str = "fp32"
    optimizer_states: Annotated[int, msgspec.Meta(ge=0)] = 2
    predicted: Prediction | None = None

    @classmethod
    def of(cls, estimator: Estimator, estimate: SplitEstimate, *, context: int = 0) -> Plan:
        """Return the plan file's content for an estimated split.

        Args:
            estimator: Estimator that made the estimate.
            estimate: The split, with its predicted time and memory.
            context: Bytes of a sequence, for a GPT; 0 for another model.
        """
        split = estimate.split
        return cls(
            model=estimator.model.model,
            batch=estimator.training.batch,
            context=context,
            mesh=split.mesh,
            ranks=split.num_ranks,
            balance=estimate.balance if split.pp > 1 else (),
            schedule=split.schedule,
            microbatches=split.microbatches,
            recompute=split.recompute,
            shard=split.shard,
            strategy=split.strategy,
            versions=split.versions,
            dtype=estimator.training.dtype,
            optimizer_states=estimator.training.optimizer_states,
            predicted=Prediction(
                seconds=estimate.seconds,
                parts=estimate.time._asdict(),
                memory=estimate.memory._asdict(),
                actions=_actions(estimator, split),
                level_bytes=dict(estimator.level_bytes(split)),
                layers=estimator.model.origin,
                machines=estimator.machines.origin,
                simulated=estimate.simulated,
            ),
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.ranks

    @property
    def split(self) -> Split:
        """The plan as a `Split`."""
        axes = dict(Mesh.parse(self.mesh).axes) if self.mesh else {"dp": self.ranks}
        return Split(
            pp=axes.get("pp", 1),
            dp=axes.get("dp", 1),
            cp=axes.get("cp", 1),
            ep=axes.get("ep", 1),
            tp=axes.get("tp", 1),
            shard=self.shard,
            schedule=self.schedule,
            microbatches=self.microbatches,
            recompute=self.recompute,
            strategy=self.strategy,
            versions=self.versions,
        )

    def write(self, path: str | Path) -> None:
        """Write the plan as JSON, which may be changed and read again."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))


def read_plan(path: str | Path) -> Plan | PipeDreamPlan:
    """Read a plan file that `braid plan` has written.

    Raises:
        ConfigError: The file cannot be read, or is not a plan; the message names the error.
    """
    try:
        plan = msgspec.json.decode(Path(path).read_bytes(), type=Plan | PipeDreamPlan)
    except OSError as exc:
        msg = f"cannot read {path}: {exc.strerror}"
        raise ConfigError(msg) from exc
    except msgspec.MsgspecError as exc:
        msg = f"{path} is not a plan: {exc}. Make one with `braid plan --plan {path}`"
        raise ConfigError(msg) from exc
    if isinstance(plan, PipeDreamPlan):
        plan.check(str(path))
    elif problems := [*_problems(plan)]:
        msg = f"{path}: {'; '.join(problems)}"
        raise ConfigError(msg)
    return plan


def _actions(estimator: Estimator, split: Split) -> dict[str, float]:
    """Return the seconds of each kind of work of each stage of a pipeline."""
    if split.pp == 1:
        return {}
    actions = [action for program in program_of(split).ranks for action in program]
    works = {(action.kind, action.unit) for action in actions if action.kind in WORK}
    return {f"{k}{stage}": action_s(estimator, split, k, stage) for k, stage in sorted(works)}


def _refused_by_engines(plan: Plan, split: Split) -> Iterator[str]:
    """Yield combinations that no engine runs."""
    if min(plan.balance, default=1) < 1:
        yield f"balance must have at least one layer for each stage, got {list(plan.balance)}"
    if plan.strategy and split.num_ranks > split.dp:
        yield "a parameter server has replicas only: leave the mesh out"
    if plan.versions and split.num_ranks > split.pp:
        yield (
            f"versions {plan.versions!r} works only with pipeline parallelism alone: use a mesh "
            f"such as pp={plan.ranks}"
        )
    if plan.versions == "2bw" and plan.microbatches < split.pp:
        yield (
            f"versions '2bw' needs at least {split.pp} micro-batches, one for each stage, got "
            f"{plan.microbatches}"
        )


def _problems(plan: Plan) -> Iterator[str]:
    """Yield what does not fit together in a plan that was changed by hand."""
    split = plan.split
    if problem := check_schedule(plan.schedule):
        yield problem
        return
    if plan.dtype not in DTYPES:
        yield f"dtype must be one of {', '.join(DTYPES)}, got {plan.dtype!r}"
    yield from _refused_by_engines(plan, split)
    if split.num_ranks != plan.ranks:
        yield (
            f"mesh {plan.mesh} has {split.num_ranks} ranks, but ranks is {plan.ranks}: make the "
            "two equal"
        )
    is_row = "pp" in plan.mesh
    if not is_row and (plan.microbatches > 1 or plan.recompute != "never" or plan.versions):
        yield "micro-batches, recompute and versions apply to pipelines only: add pp=1 to the mesh"
    if is_row and split.pp > 1 and len(plan.balance) != split.num_stages:
        yield (
            f"balance has {len(plan.balance)} numbers, but {split} has {split.num_stages} "
            "stages: give one number per stage"
        )
    if plan.batch % (split.samples * plan.microbatches):
        yield (
            f"a batch of {plan.batch} rows cannot be divided by {split.samples} replicas and "
            f"{plan.microbatches} micro-batches: use a multiple of "
            f"{split.samples * plan.microbatches}"
        )
    if plan.predicted is not None:
        for name, part in (("parts", StepTimeEstimate), ("memory", MemoryEstimate)):
            unknown = set(getattr(plan.predicted, name)) - set(part._fields)
            if unknown:
                yield (
                    f"predicted.{name} contains unknown names, {', '.join(sorted(unknown))}: "
                    "remove them"
                )

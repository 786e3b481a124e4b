"""`braid plan`: predict the fastest way to split a training over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from braid.cli.commands.typed import bytes_in, check_place
from braid.errors import ConfigError, below, raise_all
from braid.plan.costs import Training
from braid.plan.failures import Failures
from braid.runtime.option_types import NumRanks, Target, Text, shown_as

if TYPE_CHECKING:
    from braid.plan.costs import Machines, ModelCosts
    from braid.plan.plan_file import Plan
    from braid.plan.profiling import Profile
    from braid.plan.search import Ranking
    from braid.programs.topology import Cluster, Device

__all__ = ["plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Options of `braid plan`: training, machines, and files to write.

    Attributes:
        target: Your model, as for `braid profile`.
        num_ranks: Number of ranks (default: all ranks of the cluster or the profile).
        model: A GPT of `braid train`, such as gpt2-medium.
        cluster: TOML file of a cluster, with a [device]; see `docs/handbook`.
        device: Built-in device to use instead of the cluster's, such as a100-40gb.
        memory: Memory of a rank, such as 16GB (default: the device's).
        training: Batch and optimizer.
        context: Bytes of a sequence, with --model and --cluster; a profile has its context.
        asynchronous: Also consider asynchronous pipelines (PipeDream): their gradients are stale,
            so losses differ.
        profile: Profile of `braid profile -n N`, instead of model and cluster.
        top: Number of splits to list.
        plan: File for the fastest split, as `braid train --plan` reads it.
        timeline: File for a picture of the fastest split's predicted timeline.
        picture: File for a picture that compares the kinds of splits.
        export: Directory for the split in the formats of torchgpipe, torch's pipelining and
            Megatron.
        steps: Steps of the training, to predict its total time.
        failures: Rate of failures of ranks.
    """

    target: Target = ""
    num_ranks: NumRanks = None
    model: Text = ""
    cluster: Text = ""
    device: Text = ""
    memory: Annotated[str, shown_as("BYTES")] = ""
    training: Annotated[Training, tyro.conf.arg(name="")]
    context: int = 128
    asynchronous: bool = False
    profile: Text = ""
    top: int = 10
    plan: Text = ""
    timeline: Text = ""
    picture: Text = ""
    export: Text = ""
    steps: int = 0
    failures: Annotated[Failures, tyro.conf.arg(name="")]

    def __post_init__(self) -> None:
        problems = below(1, **{"--top": self.top}) + below(0, **{"--steps": self.steps})
        if self.num_ranks is not None:
            problems += below(1, **{"-n": self.num_ranks})
        if bool(self.cluster) == bool(self.profile):
            problems.append(
                "braid plan needs a description of the machines: give --cluster FILE, or "
                "--profile FILE of `braid profile -n N`"
            )
        raise_all(problems)


def plan(request: Annotated[PlanRequest, tyro.conf.arg(name="")]) -> int:
    """Predict which way of splitting a training over ranks is fastest.

    Considers replicas, ZeRO, pipelines with all schedules, tensor, context and expert parallelism,
    parameter servers and their combinations. Costs come from a cluster description or a profile of
    this machine.

    Args:
        request: Training to plan, machines, and files to write.
    """
    from braid.plan.described import DescribedMachines
    from braid.plan.exports import exports
    from braid.plan.plan_file import Plan
    from braid.plan.profiling import MeasuredMachines, MeasuredModel
    from braid.plan.search import find_splits
    from braid.train.models import described

    for file in filter(None, (request.plan, request.timeline, request.picture)):
        check_place(file)
    if request.export:
        check_place(request.export, is_directory=True)
    limit = bytes_in(request.memory) if request.memory else None
    training, context = request.training, request.context
    costs: ModelCosts
    machines: Machines
    products = "fp32"
    if request.profile:
        read = _profile_of(request)
        assert read.host is not None, "checked"
        costs, machines = MeasuredModel(read), MeasuredMachines(read.host, limit)
        names, context = [layer.name for layer in read.layers], read.context
        products = read.dtype
    else:
        computes, device = _cluster(request.cluster, request.device)
        machines = DescribedMachines(
            computes, device, num_ranks=request.num_ranks, memory_bytes=limit, dtype=training.dtype
        )
        costs, names = described(request.target, request.model, context, device, training.dtype)
    ranking = find_splits(costs, machines, training, asynchronous=request.asynchronous)
    made = Plan.of(ranking.estimator, ranking.best, context=0 if request.target else context)
    _show(ranking, request)
    if request.plan:
        made.write(request.plan)
        print(f"{request.plan}: the plan{_hint(made, request.plan, products)}")
    _draw(ranking, request)
    _export(request.export, exports(made, names) if request.export else {})
    return 0


def _draw(ranking: Ranking, request: PlanRequest) -> None:
    """Write the requested pictures."""
    from pathlib import Path

    from braid.plan.search import timeline_of
    from braid.plan.tables import comparison
    from braid.programs.schedule.plot import to_svg

    split = ranking.best.split
    if request.timeline:
        drawn = timeline_of(ranking.estimator, split)
        Path(request.timeline).write_text(to_svg(drawn, split.pp, caption=str(split)))
        print(f"{request.timeline}: the predicted timeline")
    if request.picture:
        Path(request.picture).write_text(comparison(ranking))
        print(f"{request.picture}: kinds of splits, side by side")


def _show(ranking: Ranking, request: PlanRequest) -> None:
    """Print the table, the splits that are too large, and why the first split is the fastest."""
    from rich.console import Console

    from braid.plan.search import flips, reasons
    from braid.plan.tables import infeasible, ranking_table

    Console().print(ranking_table(ranking, request.top, request.steps, request.failures))
    for line in infeasible(ranking):
        print(f"too large   {line}")
    for line in reasons(ranking):
        print(f"why         {line}")
    for change, estimate in flips(ranking):
        print(f"would flip  with {change}: {estimate.split}")
    count = len(ranking.fitting) + len(ranking.too_large)
    print(f"{count:,} splits were considered, {len(ranking.too_large):,} of them are too large")


def _hint(made: Plan, file: str, products: str) -> str:
    """Return the command that trains by a plan, if its model is a GPT of `braid train`.

    Args:
        made: The plan.
        file: File of the plan.
        products: Dtype of matrix products.
    """
    if not made.context or (made.dtype, made.optimizer_states) != ("fp32", 2):
        return ""
    command = f"braid train -n {made.ranks} --model {made.model} --plan {file}"
    return f"; train with {command}{' --dtype bf16' if products == 'bf16' else ''}"


def _export(directory: str, texts: Mapping[str, str]) -> None:
    """Write a plan's files for other systems."""
    from pathlib import Path

    for name, text in texts.items():
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(directory, name).write_text(text)
        print(f"{Path(directory, name)}: {text.splitlines()[0][:70]}")


def _cluster(file: str, name: str) -> tuple[Cluster, Device]:
    """Return the cluster in a file, and its device or the built-in device `name`."""
    from braid.programs.topology import DEVICES, read_cluster

    cluster = read_cluster(file)
    if name and name not in DEVICES:
        msg = f"--device must be one of {', '.join(DEVICES)}, got {name!r}"
        raise ConfigError(msg)
    device = DEVICES[name] if name else cluster.device
    if device is None:
        msg = (
            f"{file} does not name a device: add a [device] with a name, or give --device, "
            f"one of {', '.join(DEVICES)}"
        )
        raise ConfigError(msg)
    return cluster, device


def _profile_of(request: PlanRequest) -> Profile:
    """Read and check a profile of ranks of this host."""
    from braid.plan.profiling import read_profile
    from braid.train.models import gpt_name

    file, model = request.profile, request.model
    read = read_profile(file)
    if model and gpt_name(model) != read.model:
        msg = f"{file} is a profile of {read.model}, got --model {model}: leave --model out"
        raise ConfigError(msg)
    if read.host is None or (request.num_ranks or read.host.ranks) != read.host.ranks:
        wanted = request.num_ranks or 2
        msg = f"{file} was not measured on {wanted} ranks: make it with braid profile -n {wanted}"
        raise ConfigError(msg)
    return read

"""`braid plan`: which way of splitting a training is fastest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from braid.cli.commands.typed import bytes_in, check_place
from braid.runtime.option_types import NumRanks, Target, Text, shown_as

if TYPE_CHECKING:
    from braid.plan.costs import Machines, ModelCosts
    from braid.plan.plan_file import Plan
    from braid.plan.profiling import Profile
    from braid.plan.search import Failures, Ranking
    from braid.programs.topology import Cluster, Device

__all__ = ["plan"]


def plan(
    target: Target = "",
    *,
    n: NumRanks = None,
    model: Text = "",
    cluster: Text = "",
    device: Text = "",
    memory: Annotated[str, shown_as("BYTES")] = "",
    batch: int = 16,
    context: int = 128,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    optimizer_states: int = 2,
    asynchronous: bool = False,
    profile: Text = "",
    top: int = 10,
    plan: Text = "",
    timeline: Text = "",
    picture: Text = "",
    export: Text = "",
    steps: int = 0,
    rank_mean_hours: float = 0.0,
    checkpoint_s: float = 60.0,
    recovery_s: float = 300.0,
) -> int:
    """Predict which way of splitting a training over ranks is fastest.

    Considers replicas, ZeRO, pipelines with all schedules, divided layers, parameter servers and
    their combinations. Costs are those of a described cluster, or of a profile of this machine.

    Args:
        target: Model of your own, as `braid profile` takes it.
        n: Number of ranks (default: all of the cluster, or those of the profile).
        model: A GPT of `braid train`, such as gpt2-medium.
        cluster: TOML file of a cluster, with a [device]; see `docs/handbook`.
        device: Device of the table in place of the cluster's, such as a100-40gb.
        memory: Memory of a rank, such as 16GB (default: the device's).
        batch: Rows of a step over all ranks.
        context: Bytes of a sequence, with --model and --cluster; a profile has its own.
        dtype: Dtype of parameters and activations.
        optimizer_states: States of the optimizer for each parameter: 2 for Adam, 1 for momentum.
        asynchronous: Consider asynchronous pipelines, too (PipeDream): their gradients are stale,
            so losses are others.
        profile: Profile of `braid profile -n N`, in place of model and cluster.
        top: Number of splits to list.
        plan: File for the fastest split, as `braid train --plan` reads it.
        timeline: File for a picture of its predicted timeline.
        picture: File for a picture that compares the kinds of splits.
        export: Directory for the split as torchgpipe, torch's pipelining and Megatron take it.
        steps: Steps of the training, for its time to solution.
        rank_mean_hours: Mean hours between failures of one rank; 0 for never.
        checkpoint_s: Seconds for which a checkpoint holds up the training.
        recovery_s: Seconds from a failure to the next step.
    """
    from braid.errors import ConfigError
    from braid.plan.described import DescribedMachines
    from braid.plan.exports import exports
    from braid.plan.plan_file import Plan
    from braid.plan.profiling import MeasuredModel
    from braid.plan.search import Failures, Training, find_splits
    from braid.train.models import described

    for file in filter(None, (plan, timeline, picture)):
        check_place(file)
    if export:
        check_place(export, is_directory=True)
    if batch < 1 or top < 1 or optimizer_states < 0 or steps < 0:
        msg = "--batch and --top must be at least 1, --optimizer-states and --steps at least 0"
        raise ConfigError(msg)
    if n is not None and n < 1:
        msg = f"-n must be at least 1, got {n}"
        raise ConfigError(msg)
    if bool(cluster) == bool(profile):
        msg = "give --cluster FILE, or --profile FILE of `braid profile -n N`"
        raise ConfigError(msg)
    limit = bytes_in(memory) if memory else None
    costs: ModelCosts
    machines: Machines
    products = "fp32"
    if profile:
        read = _profile_of(profile, n, model)
        costs, machines, context = MeasuredModel(read), _machines_of(read, limit), read.context
        names, products = [layer.name for layer in read.layers], read.dtype
    else:
        computes, made_of = _cluster(cluster, device)
        machines = DescribedMachines(
            computes, made_of, num_ranks=n, memory_bytes=limit, dtype=dtype
        )
        costs, names = described(target, model, context, made_of, dtype)
    training = Training(batch, optimizer_states, dtype)
    ranking = find_splits(costs, machines, training, asynchronous=asynchronous)
    hours = rank_mean_hours
    failures = Failures(3600 * hours, checkpoint_s, recovery_s) if hours else None
    best = ranking.best
    _show(ranking, top, steps, failures)
    made = Plan.of(ranking.estimator, best, context=0 if target else context)
    if plan:
        made.write(plan)
        print(f"{plan}: the plan{_hint(made, plan, products)}")
    _draw(ranking, timeline, picture)
    _export(export, exports(made, names) if export else {})
    return 0


def _draw(ranking: Ranking, timeline: str, picture: str) -> None:
    """Write the pictures that were asked for."""
    from pathlib import Path

    from braid.plan.search import timeline_of
    from braid.plan.tables import comparison
    from braid.programs.schedule.plot import to_svg

    split = ranking.best.split
    if timeline:
        drawn = timeline_of(ranking.estimator, split)
        Path(timeline).write_text(to_svg(drawn, split.pp, caption=str(split)))
        print(f"{timeline}: the predicted timeline")
    if picture:
        Path(picture).write_text(comparison(ranking))
        print(f"{picture}: kinds of splits, side by side")


def _show(ranking: Ranking, top: int, steps: int, failures: Failures | None) -> None:
    """Print the table, what is too large, and why the first split is the first."""
    from rich.console import Console

    from braid.plan.search import flips, reasons
    from braid.plan.tables import infeasible, ranking_table

    Console().print(ranking_table(ranking, top, steps, failures))
    for line in infeasible(ranking):
        print(f"too large   {line}")
    for line in reasons(ranking):
        print(f"why         {line}")
    for change, estimate in flips(ranking):
        print(f"would flip  with {change}: {estimate.split}")
    count = len(ranking.fitting) + len(ranking.too_large)
    print(f"{count:,} splits were considered, {len(ranking.too_large):,} of them are too large")


def _hint(made: Plan, file: str, products: str) -> str:
    """Return the command that follows a plan, if it is of a GPT.

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
    """Write the texts for other systems."""
    from pathlib import Path

    for name, text in texts.items():
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(directory, name).write_text(text)
        print(f"{Path(directory, name)}: {text.splitlines()[0][:70]}")


def _cluster(file: str, name: str) -> tuple[Cluster, Device]:
    """Return the cluster of a file, and its device or the one of the table that is named."""
    from braid.errors import ConfigError
    from braid.programs.schedule.files import read_text
    from braid.programs.topology import DEVICES, from_toml

    try:
        cluster = from_toml(read_text(file))
    except ConfigError as exc:
        msg = f"{file}: {exc}"
        raise ConfigError(msg) from exc
    if name and name not in DEVICES:
        msg = f"--device must be one of {', '.join(DEVICES)}, got {name!r}"
        raise ConfigError(msg)
    device = DEVICES[name] if name else cluster.device
    if device is None:
        msg = (
            f"{file} does not say what computes: add a [device] with a name, or give --device, "
            f"one of {', '.join(DEVICES)}"
        )
        raise ConfigError(msg)
    return cluster, device


def _machines_of(profile: Profile, limit: float | None) -> Machines:
    """Return the ranks of this host, as a profile has them."""
    from braid.plan.profiling import MeasuredMachines

    assert profile.host is not None, "checked"
    return MeasuredMachines(profile.host, limit)


def _profile_of(file: str, ranks: int | None, model: str) -> Profile:
    """Return a profile of ranks of this host, checked."""
    from braid.errors import ConfigError
    from braid.plan.profiling import read_profile
    from braid.train.models import gpt_name

    read = read_profile(file)
    if model and gpt_name(model) != read.model:
        msg = f"{file} is a profile of {read.model}, got --model {model}: leave --model out"
        raise ConfigError(msg)
    if read.host is None or (ranks or read.host.ranks) != read.host.ranks:
        wanted = ranks or 2
        msg = (
            f"{file} was not measured with {wanted} ranks at once: make it with braid profile "
            f"-n {wanted}"
        )
        raise ConfigError(msg)
    return read

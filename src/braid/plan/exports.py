"""Export of a plan to other systems.

torchgpipe    GPipe(model, balance=[...], chunks=m), for one stage on each device
torch         split points of torch.distributed.pipelining, and its schedule; a CSV of the actions
              if torch does not have the schedule
Megatron      sizes on the command line
PipeDream     its graph with the stage of each node (`braid plan pipedream --out`)

A comment in the file lists the parts of the plan that a system does not support.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from braid.plan.plan_file import Plan
from braid.programs.schedule.files import schedule_named
from braid.programs.schedule.pipeline import to_csv

__all__ = ["exports"]

TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "breadth_first": "ScheduleLoopedBFS",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}
CSV = "schedule.csv"


def exports(plan: Plan, layer_names: Sequence[str]) -> Mapping[str, str]:
    """Convert a plan to files for torch, Megatron and torchgpipe; return file name -> text.

    Args:
        plan: The plan.
        layer_names: Names of the model's layers, in order.
    """
    split = plan.split
    files = {"megatron.txt": _megatron(plan)}
    if split.pp == 1:
        return files
    if split.num_stages == split.pp:
        checkpoint = "always" if plan.recompute == "always" else "never"
        note = "  # synchronous" if plan.versions else ""
        files["torchgpipe.py"] = (
            f"model = GPipe(model, balance={list(plan.balance)}, chunks={plan.microbatches}, "
            f'checkpoint="{checkpoint}"){note}\n'
        )
    firsts = [*accumulate(plan.balance)][:-1]
    points = "".join(f'    "{layer_names[i]}": SplitPoint.BEGINNING,\n' for i in firsts)
    files["torch_pipelining.py"] = f"split_spec = {{\n{points}}}\n{_torch_schedule(plan)}"
    if _needs_csv(plan):
        files[CSV] = to_csv(schedule_named(plan.schedule)(split.pp, plan.microbatches))
    return files


def _needs_csv(plan: Plan) -> bool:
    return plan.schedule.partition(":")[0] not in TORCH_SCHEDULES


def _torch_schedule(plan: Plan) -> str:
    """Return the lines that make torch's schedule."""
    split = plan.split
    stage_word = "stages" if split.num_stages > split.pp else "stage"
    sizes = f"n_microbatches={plan.microbatches}"
    if plan.versions:
        return f"# torch has no asynchronous pipeline\nschedule = Schedule1F1B(stage, {sizes})\n"
    if _needs_csv(plan):
        return (
            f"# torch has no {plan.schedule}: its actions are in {CSV}\n"
            f"schedule = _PipelineScheduleRuntime(stages, {sizes})\n"
            f'schedule._load_csv("{CSV}")\n'
        )
    return f"schedule = {TORCH_SCHEDULES[plan.schedule.partition(':')[0]]}({stage_word}, {sizes})\n"


def _megatron(plan: Plan) -> str:
    split = plan.split
    rows = plan.batch // (split.samples * plan.microbatches)
    words = [
        f"--tensor-model-parallel-size {split.tp}",
        f"--pipeline-model-parallel-size {split.pp}",
        f"--micro-batch-size {rows}",
        f"--global-batch-size {plan.batch}",
    ]
    words += [f"--context-parallel-size {split.cp}"] * (split.cp > 1)
    words += [f"--expert-model-parallel-size {split.ep}"] * (split.ep > 1)
    if plan.recompute == "always":
        words.append(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )
    if plan.shard:
        words.append("--use-distributed-optimizer")
    if split.num_stages > split.pp:
        words.append(f"--num-virtual-stages-per-pipeline-rank {split.num_stages // split.pp}")
    notes = []
    if plan.shard > 1:
        notes.append("# Megatron's distributed optimizer divides states of the optimizer only")
    name = plan.versions or plan.schedule.partition(":")[0]
    if split.pp > 1 and name not in {"1f1b", "interleaved"}:
        used = "interleaved 1F1B" if split.num_stages > split.pp else "1F1B"
        notes.append(f"# Megatron has no {name}: it uses {used}")
    if plan.strategy:
        notes.append("# Megatron has no parameter server: it averages gradients")
    return "\n".join([" ".join(words), *notes, ""])

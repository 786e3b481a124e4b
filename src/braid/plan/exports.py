"""A plan in the words of other systems.

torchgpipe    GPipe(model, balance=[...], chunks=m)
torch         split points of torch.distributed.pipelining, and its schedule
Megatron      sizes on the command line
PipeDream     its graph with the stage of each node (`braid plan pipedream --out`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from braid.plan.plan_file import Plan

__all__ = ["exports"]

TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "breadth_first": "ScheduleLoopedBFS",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}


def exports(plan: Plan, layer_names: Sequence[str]) -> Mapping[str, str]:
    """Return the texts of a plan for other systems, by name of a file.

    Args:
        plan: The plan.
        layer_names: Names of the model's layers, in order.
    """
    split = plan.split
    files = {"megatron.txt": _megatron(plan)}
    if split.pp > 1:
        recompute = (
            ', checkpoint="always"' if plan.recompute == "always" else ', checkpoint="never"'
        )
        files["torchgpipe.py"] = (
            f"model = GPipe(model, balance={list(plan.balance)}, chunks={plan.microbatches}"
            f"{recompute})\n"
        )
        firsts = [*accumulate(plan.balance)][:-1]
        points = "".join(f'    "{layer_names[i]}": SplitPoint.BEGINNING,\n' for i in firsts)
        schedule = TORCH_SCHEDULES.get(plan.schedule, "Schedule1F1B")
        own = "stages" if split.num_stages > split.pp else "stage"
        note = "" if plan.schedule in TORCH_SCHEDULES else f"  # torch has no {plan.schedule}"
        files["torch_pipelining.py"] = (
            f"split_spec = {{\n{points}}}\nschedule = {schedule}({own}, "
            f"n_microbatches={plan.microbatches}){note}\n"
        )
    return files


def _megatron(plan: Plan) -> str:
    split = plan.split
    rows = plan.batch // (split.dp * plan.microbatches)
    words = [
        f"--tensor-model-parallel-size {split.tp}",
        f"--pipeline-model-parallel-size {split.pp}",
        f"--micro-batch-size {rows}",
        f"--global-batch-size {plan.batch}",
    ]
    if plan.recompute == "always":
        words.append(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )
    if plan.shard:
        words.append("--use-distributed-optimizer")
    if split.num_stages > split.pp:
        words.append(f"--num-virtual-stages-per-pipeline-rank {split.num_stages // split.pp}")
    return " ".join(words) + "\n"

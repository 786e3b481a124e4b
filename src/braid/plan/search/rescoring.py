"""The time of a split by simulating its program, action by action.

A closed form supposes that stages are alike and that the pipeline has one bubble. The simulator
knows neither: it executes what the pipeline's engine executes, with the costs of each stage and of
each message. The time of gradients and optimizer is added as in the closed form.
"""

from __future__ import annotations

from braid.plan.costs import Axis
from braid.plan.search.estimate import Estimator, SplitEstimate, StepTimeEstimate
from braid.plan.search.split import Split
from braid.programs.schedule import Action, Costs, Program, Timeline, simulate
from braid.programs.schedule.files import schedule_named
from braid.programs.schedule.pipeline import asynchronous, with_recompute
from braid.programs.topology import flat

__all__ = ["action_s", "program_of", "rescore", "timeline_of"]

MOST_ACTIONS = 6000  # larger programs keep their closed form
NUM_STEPS = 8  # of an asynchronous pipeline; more than stages that are simulated


def program_of(split: Split, num_steps: int = 1) -> Program:
    """Return the program of actions that the pipeline of a split executes.

    Args:
        split: The split.
        num_steps: Number of steps of an asynchronous pipeline until it has used all gradients.
    """
    if split.versions:
        return asynchronous(
            (1,) * split.pp,
            split.microbatches * num_steps,
            versions=split.versions,
            every=split.microbatches,
        )
    program = schedule_named(split.schedule)(split.pp, split.microbatches)
    return with_recompute(program, split.recompute)


def action_s(estimator: Estimator, split: Split, kind: str, number: int) -> float:
    """Return the seconds of an action, such as F (forward), of stage `number`; 0 for messages."""
    stage, machines = estimator.stages(split)[1][number], estimator.machines
    if kind == "STEP":
        return machines.optimizer_s(stage.param_bytes)
    parts = {
        "F": stage.forward_s,
        "R": stage.forward_s,
        "B": stage.input_s + stage.weight_s,
        "I": stage.input_s,
        "W": stage.weight_s + stage.split_s,
    }
    if not number:  # the first stage has no inputs that need gradients
        parts |= {"I": 0.0, "W": stage.input_s + stage.weight_s}
    seconds = parts.get(kind)
    return 0.0 if seconds is None else seconds + machines.action_s


def timeline_of(estimator: Estimator, split: Split, num_steps: int = NUM_STEPS) -> Timeline:
    """Return the simulated timeline of one pipeline of a split.

    Args:
        estimator: Estimator of the training.
        split: The split.
        num_steps: Number of steps of an asynchronous pipeline until it has used all gradients.
    """
    stages, machines = estimator.stages(split)[1], estimator.machines
    last = len(stages) - 1

    def seconds(_rank: int, action: Action) -> float:
        return action_s(estimator, split, action.kind, action.unit)

    def nbytes(_rank: int, action: Action) -> float:
        source = action.unit if action.kind.endswith("_f") else action.unit - 1
        return stages[min(max(source, 0), last)].output_bytes

    hops = Axis(split.pp, split.num_ranks // split.pp)
    largest = max(stage.output_bytes for stage in stages)
    a = machines.message_s(hops, 0.0)
    b = (machines.message_s(hops, largest) - a) / largest if largest else 0.0
    network = flat(split.pp, a, 1 / b if b else 1e18)
    program = program_of(split, num_steps)
    return simulate(program, Costs(nbytes, seconds), network, buffered=True)


def rescore(estimator: Estimator, estimate: SplitEstimate) -> SplitEstimate:
    """Return the estimate with its pipeline's time replaced by a simulated time."""
    split = estimate.split
    num_steps = 2 * NUM_STEPS if split.versions else 1
    num_actions = 5 * split.num_stages * split.microbatches * num_steps
    if split.pp == 1 or num_actions > MOST_ACTIONS:
        return estimate
    if split.versions:
        return _rescore_asynchronous(estimator, estimate)
    timeline = timeline_of(estimator, split)
    stages = estimator.by_rank(split)
    work_s = _work_s(timeline, split.pp)
    busiest = max(range(split.pp), key=lambda rank: work_s[rank])
    again = split.recompute != "never"
    tensor_s = split.microbatches * sum(s.sends_s(again=again) for s in stages[busiest])
    waited_s = timeline.seconds - work_s[busiest]
    message_s = min(waited_s, estimate.time.message_s)
    time = StepTimeEstimate(work_s[busiest] - tensor_s, waited_s - message_s, tensor_s, message_s)
    time = estimator.on_cores(time, sum(work_s) / split.pp)
    backward_s = sum(stage.backward_s for stage in stages[busiest])
    return estimate._replace(time=estimator.with_step(split, time, backward_s), simulated=True)


def _rescore_asynchronous(estimator: Estimator, estimate: SplitEstimate) -> SplitEstimate:
    """Return the estimate with the time of a step between two others: no bubble at either end."""
    split, other_s = estimate.split, estimator.machines.step_s
    shorter, longer = (timeline_of(estimator, split, n * NUM_STEPS) for n in (1, 2))
    seconds = (longer.seconds - shorter.seconds) / NUM_STEPS
    both = zip(_work_s(longer, split.pp), _work_s(shorter, split.pp), strict=True)
    work_s = [(more - less) / NUM_STEPS for more, less in both]
    waited_s = max(0.0, seconds - max(work_s))
    message_s = min(waited_s, estimate.time.message_s)
    time = StepTimeEstimate(max(work_s), waited_s - message_s, message_s=message_s)
    time = estimator.on_cores(time, sum(work_s) / split.pp)
    stage = estimator.stages(split)[1][estimate.busiest]
    optimizer_s = min(time.compute_s, estimator.machines.optimizer_s(stage.param_bytes))
    compute_s = time.compute_s - optimizer_s
    time = time._replace(compute_s=compute_s, optimizer_s=optimizer_s, other_s=other_s)
    return estimate._replace(time=time, simulated=True)


def _work_s(timeline: Timeline, num_ranks: int) -> list[float]:
    """Return the seconds for which each rank works."""
    work_s = [0.0] * num_ranks
    for interval in timeline.intervals:
        if not interval.is_message:
            work_s[interval.rank] += interval.end_s - interval.start_s
    return work_s

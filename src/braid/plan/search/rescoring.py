"""The time of a split by simulating its program, action by action.

A closed form supposes that stages are alike and that the pipeline has one bubble. The simulator
knows neither: it executes what the pipeline's engine executes, with the costs of each stage and of
each message. What follows the program (gradients, optimizer) is added as in the closed form.
"""

from __future__ import annotations

from braid.plan.search.estimate import Estimate, Estimator, StepTime
from braid.plan.search.split import Split
from braid.schedule import Action, Costs, Program, Timeline, simulate
from braid.schedule.pipeline import SCHEDULES, with_recompute
from braid.topology import flat

__all__ = ["MOST_ACTIONS", "program_of", "rescore", "timeline_of"]

MOST_ACTIONS = 6000  # larger programs keep their closed form
KIB = 1024


def program_of(split: Split) -> Program:
    """Return the program that the pipeline of a split executes."""
    program = SCHEDULES[split.schedule](split.pp, split.microbatches)
    return with_recompute(program, split.recompute)


def timeline_of(estimator: Estimator, split: Split) -> Timeline:
    """Return the simulated timeline of one pipeline of a split."""
    stages, machines = estimator.stages(split)[1], estimator.machines
    action_s = machines.action_s if split.pp > 1 or split.microbatches > 1 else 0.0
    last = len(stages) - 1

    def seconds(_rank: int, action: Action) -> float:
        stage = stages[action.unit]
        parts = {
            "F": stage.forward_s,
            "R": stage.forward_s,
            "B": stage.input_s + stage.weight_s,
            "I": stage.input_s,
            "W": stage.weight_s,
        }
        if not action.unit:  # the first stage has no inputs that need gradients
            parts |= {"I": 0.0, "W": stage.input_s + stage.weight_s}
        own = parts.get(action.kind)
        return 0.0 if own is None else own + action_s

    def nbytes(_rank: int, action: Action) -> float:
        source = action.unit if action.kind.endswith("_f") else action.unit - 1
        return stages[min(max(source, 0), last)].output_bytes

    stride = split.dp * split.tp
    a = machines.message_s(stride, 0.0) if split.pp > 1 else 0.0
    b = (machines.message_s(stride, KIB) - a) / KIB if split.pp > 1 else 0.0
    network = flat(split.pp, a, 1 / b if b else 1e18)
    return simulate(program_of(split), Costs(nbytes, seconds), network, buffered=True)


def rescore(estimator: Estimator, estimate: Estimate) -> Estimate:
    """Return the estimate with the simulated time of its program, unless that is very long."""
    split = estimate.split
    num_actions = 5 * split.num_stages * split.microbatches
    if split.pp == 1 or num_actions > MOST_ACTIONS:
        return estimate
    timeline = timeline_of(estimator, split)
    own = estimator.by_rank(split)
    work_s = [0.0] * split.pp
    for interval in timeline.intervals:
        if not interval.is_message:
            work_s[interval.rank] += interval.end_s - interval.start_s
    busiest = max(range(split.pp), key=lambda rank: work_s[rank])
    times = 1.5 if split.recompute != "never" else 1.0
    tensor_s = times * split.microbatches * sum(stage.tensor_s for stage in own[busiest])
    waited_s = timeline.seconds - work_s[busiest]
    message_s = min(waited_s, estimate.time.message_s)
    time = StepTime(work_s[busiest] - tensor_s, waited_s - message_s, tensor_s, message_s)
    time = estimator.on_cores(time, sum(work_s) / split.pp)
    backward_s = sum(stage.input_s + stage.weight_s for stage in own[busiest])
    return estimate._replace(time=estimator.with_step(split, time, backward_s), simulated=True)

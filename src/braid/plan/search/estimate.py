"""Time and memory of a split, by closed forms.

    step = m * (busiest rank's compute + its all-reduces) + bubble + messages
           + gradients (what a backward does not hide) + optimizer + what every step costs

    memory = parameters + gradients + optimizer + activations under way + workspace

The bubble is the time until the pipeline is full and after it runs dry: for 1F1B the work of one
micro-batch on all other ranks. `rescore` replaces compute, bubble and messages by a simulation of
the program.

Ranks that share a layer send in each forward and backward, without overlap (kv: bytes of keys and
values; c: 1 for float32, 2 for 16-bit dtypes, since gradients are summed in float32):

    tp    all-reduces of activations                as many in backward as in forward
    cp    ring of keys and values: all_gather(kv)   backward: again, and reduce_scatter(c kv)
    ep    tokens to experts and back: 2 all_to_all  backward: 2

Source: D. Narayanan et al., SC 2021, sections 2.2 and 3; S. Rajbhandari et al., ZeRO, SC 2020,
section 5; P. Qi et al., ICLR 2024, table 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from braid.parallel.pipeline import block_partition
from braid.plan.costs import Axis, Machines, MicrobatchCost, ModelCosts, Training
from braid.plan.search.split import GATHERED, SPLIT_BACKWARD, Split, held, homes
from braid.programs.topology import DTYPES

__all__ = ["Estimator", "MemoryEstimate", "SplitEstimate", "StepTimeEstimate"]


class StepTimeEstimate(NamedTuple):
    """Parts of the seconds of a step.

    Attributes:
        compute_s: Seconds in which the busiest rank computes forwards and backwards.
        bubble_s: Seconds in which that rank waits for other stages.
        tensor_s: Seconds of that rank's collectives in layers that several ranks share.
        message_s: Seconds of messages between stages that do not overlap with computation.
        gradient_s: Seconds of collectives of gradients and parameters that do not overlap with
            computation.
        optimizer_s: Seconds of the optimizer's step.
        other_s: Constant overhead of a step, the same for all splits.
    """

    compute_s: float
    bubble_s: float = 0.0
    tensor_s: float = 0.0
    message_s: float = 0.0
    gradient_s: float = 0.0
    optimizer_s: float = 0.0
    other_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return math.fsum(self)


class MemoryEstimate(NamedTuple):
    """Estimated bytes, by purpose, on the rank that needs the most memory."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def nbytes(self) -> float:
        """All bytes."""
        return math.fsum(self)


class LayerSends(NamedTuple):
    """Seconds of the collectives of layers that several ranks share."""

    forward_s: float
    backward_s: float


class StageCost(NamedTuple):
    """Costs of a pipeline stage for one micro-batch.

    Attributes:
        forward_s: Seconds of a forward, with its collectives.
        input_s: Seconds of the backward to inputs, with its collectives.
        weight_s: Seconds of the backward to weights.
        split_s: Additional seconds of a backward in two parts, if the schedule splits it.
        sends: Seconds of the collectives in a forward and in a backward.
        saved_bytes: Bytes kept for backward.
        output_bytes: Bytes sent to the next stage.
        param_bytes: Bytes of parameters on this rank.
        expert_bytes: Bytes of experts among these parameters, if each rank has other experts.
        largest_bytes: Bytes of the largest layer's parameters, without such experts.
        workspace_bytes: Peak bytes of a layer's backward in addition to the saved bytes.
    """

    forward_s: float
    input_s: float
    weight_s: float
    split_s: float
    sends: LayerSends
    saved_bytes: float
    output_bytes: float
    param_bytes: float
    expert_bytes: float
    largest_bytes: float
    workspace_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def backward_s(self) -> float:
        """Seconds of the backward."""
        return self.input_s + self.weight_s + self.split_s

    def sends_s(self, *, again: bool) -> float:
        """Return the seconds of all collectives; `again` if backward repeats the forward."""
        return self.sends.forward_s * (1 + again) + self.sends.backward_s


class SplitEstimate(NamedTuple):
    """Predicted time and memory of a split.

    Attributes:
        split: The split.
        balance: Number of layers of each stage.
        time: Parts of a step's time.
        memory: Bytes of the rank that holds most.
        busiest: Number of the stage that takes longest.
        simulated: Whether the time comes from a simulation of the pipeline's program.
    """

    split: Split
    balance: tuple[int, ...]
    time: StepTimeEstimate
    memory: MemoryEstimate
    busiest: int = 0
    simulated: bool = False

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.time.seconds


class Estimator:
    """Estimates time and memory of the splits of one training.

    Args:
        model: Costs of the model's layers.
        machines: Costs of the machines.
        training: Batch and optimizer.
    """

    def __init__(self, model: ModelCosts, machines: Machines, training: Training) -> None:
        self.model, self.machines, self.training = model, machines, training
        self._wide = DTYPES["fp32"] / DTYPES[training.dtype]  # sums by activations
        self._stages: dict[tuple[object, ...], tuple[tuple[int, ...], list[StageCost]]] = {}

    def rows(self, split: Split) -> int:
        """Return the rows of a micro-batch."""
        return self.training.batch // (split.samples * split.microbatches)

    def stages(self, split: Split) -> tuple[tuple[int, ...], list[StageCost]]:
        """Return the number of layers of each stage, as even as possible, and the stages' costs."""
        in_parts = split.schedule in SPLIT_BACKWARD
        key = (self.rows(split), split.num_stages, split.cp, split.ep, split.tp, in_parts)
        if key not in self._stages:
            costs = self.layers(split)
            sends = [self._sends(cost, split) for cost in costs]
            totals = [
                c.forward_s + c.input_s + c.weight_s + sum(s)
                for c, s in zip(costs, sends, strict=True)
            ]
            sizes = block_partition(totals, split.num_stages)
            made, begin = [], 0
            for size in sizes:
                part = slice(begin, begin + size)
                # inputs of the first stage need no gradients
                split_s = sum(cost.split_s for cost in costs[part]) if in_parts and begin else 0.0
                made.append(_stage(costs[part], sends[part], split.ep, split_s))
                begin += size
            self._stages[key] = tuple(sizes), made
        return self._stages[key]

    def layers(self, split: Split) -> Sequence[MicrobatchCost]:
        """Return the costs of all layers for a micro-batch, on one rank."""
        return self.model.layers(self.rows(split) / split.cp, split.tp)

    def estimate(self, split: Split) -> SplitEstimate:
        """Return the time and memory of a split, computed by closed forms."""
        sizes, stages = self.stages(split)
        return SplitEstimate(
            split,
            sizes,
            self.time(split),
            self.memory(split),
            max(range(len(stages)), key=lambda s: stages[s].seconds),
        )

    def time(self, split: Split) -> StepTimeEstimate:
        """Return the parts of a step's time by closed forms."""
        m, machines, stages = split.microbatches, self.machines, self.stages(split)[1]
        action_s = machines.action_s if split.pp > 1 or m > 1 else 0.0
        again = split.recompute != "never"
        work = [_Work.of(costs, action_s, again=again) for costs in self.by_rank(split)]
        busiest = max(range(split.pp), key=lambda r: work[r].seconds)
        busy = work.pop(busiest)
        message_s = 0.0
        if split.pp > 1:
            nbytes = max(stage.output_bytes for stage in stages[:-1])
            per_rank = split.num_stages // split.pp
            # an asynchronous pipeline neither fills nor runs dry
            hops = m if split.versions else split.num_stages - 1 + (m - 1) * per_rank
            axis = Axis(split.pp, split.num_ranks // split.pp)
            message_s = 2 * hops * machines.message_s(axis, nbytes)
        time = StepTimeEstimate(
            m * (busy.seconds - busy.tensor_s),
            0.0 if split.versions else sum(_fill(split, work_of_rank) for work_of_rank in work),
            m * busy.tensor_s,
            message_s,
        )
        mean_s = m * (busy.seconds + sum(work_of_rank.seconds for work_of_rank in work)) / split.pp
        return self.with_step(split, self.on_cores(time, mean_s), busy.backward_s)

    def on_cores(self, time: StepTimeEstimate, mean_s: float) -> StepTimeEstimate:
        """Return the time, corrected for ranks that share CPU cores.

        Args:
            time: Time by costs that were measured while all ranks computed. A rank that waits
                leaves its core to other ranks, so it counts less.
            mean_s: Mean seconds of work of the ranks of a pipeline.
        """
        shared = self.machines.ranks_per_core
        if shared == 1.0:
            return time
        least_s = max(mean_s, time.seconds / shared)
        work_s = min(least_s, time.seconds)
        scale = min(1.0, work_s / (time.seconds - time.bubble_s))
        parts = StepTimeEstimate(*(scale * part for part in time))._replace(bubble_s=0.0)
        return parts._replace(bubble_s=work_s - parts.seconds)

    def with_step(
        self, split: Split, time: StepTimeEstimate, backward_s: float
    ) -> StepTimeEstimate:
        """Return `time` plus the seconds of gradients, sharded parameters and optimizer.

        Args:
            split: The split.
            time: Time of forwards and backwards.
            backward_s: Seconds of the last backward, which may hide collectives.
        """
        machines, axis = self.machines, Axis(split.replicas, split.tp)
        alike = Axis(split.replicas // split.ep, split.ep * split.tp)  # with the same experts
        nbytes, expert_bytes = max(map(_param_bytes, self.by_rank(split)), key=sum)
        hidden_s = machines.overlap * backward_s if split.schedule == "1f1b" else 0.0
        gradient_s = 0.0
        if split.strategy or split.shard or split.replicas > 1:
            sharded = "reduce_scatter" if split.shard else "all_reduce"
            collective = "push_pull" if split.strategy else sharded
            gradient_s = machines.collective_s(collective, axis, nbytes) - hidden_s
        if expert_bytes:
            gradient_s += machines.collective_s("all_reduce", alike, expert_bytes)
        gathers_s = split.num_gathers * machines.collective_s("all_gather", axis, nbytes)
        if split.shard == GATHERED:  # units are gathered while earlier ones compute
            gathers_s -= machines.overlap * (time.compute_s - backward_s)
        optimizer_s = 0.0  # servers step inside of push_pull
        if not split.strategy:
            shard_bytes = nbytes / split.replicas if split.shard else nbytes
            optimizer_s = machines.optimizer_s(shard_bytes + expert_bytes)
        return time._replace(
            gradient_s=max(0.0, gradient_s) + max(0.0, gathers_s),
            optimizer_s=optimizer_s,
            other_s=machines.step_s,
        )

    def by_rank(self, split: Split) -> list[list[StageCost]]:
        """Return the costs of the stages on each rank of a pipeline."""
        ranks: list[list[StageCost]] = [[] for _ in range(split.pp)]
        at = homes(split.schedule, split.pp) if split.pp > 1 else (0,)
        for stage, rank in zip(self.stages(split)[1], at, strict=True):
            ranks[rank].append(stage)
        return ranks

    def _sends(self, cost: MicrobatchCost, split: Split) -> LayerSends:
        """Return the seconds of a layer's collectives, for a micro-batch."""
        collective_s = self.machines.collective_s
        forward_s = backward_s = 0.0
        if cost.reduces:
            nbytes = cost.reduced_bytes / cost.reduces
            forward_s = cost.reduces * collective_s("all_reduce", Axis(split.tp, 1), nbytes)
            backward_s = forward_s
        if split.cp > 1 and cost.kv_bytes:
            ring, nbytes = Axis(split.cp, split.ep * split.tp), split.cp * cost.kv_bytes
            ring_s = collective_s("all_gather", ring, nbytes)
            forward_s += ring_s
            backward_s += ring_s + collective_s("reduce_scatter", ring, self._wide * nbytes)
        if split.ep > 1 and cost.routed_bytes:
            routed_s = 2 * collective_s("all_to_all", Axis(split.ep, split.tp), cost.routed_bytes)
            forward_s += routed_s
            backward_s += routed_s
        return LayerSends(forward_s, backward_s)

    def memory(self, split: Split) -> MemoryEstimate:
        """Return the memory on the rank that needs most."""
        training, ranks = self.training, self.by_rank(split)
        # forwards are as far ahead of backwards as with 1F1B, however many are between two steps
        count_of = max(split.microbatches, split.pp) if split.versions else split.microbatches
        under_way = held(split.schedule, split.pp, count_of)
        memories = []
        for rank, (stages, count) in enumerate(zip(ranks, under_way, strict=True)):
            dense, experts = _param_bytes(stages)
            copies = {"": 0, "2bw": 1}.get(split.versions, split.pp - 1 - rank)
            item = DTYPES[training.dtype]
            kept = training.optimizer_states + (item < 4)  # states and a copy, 4 bytes each
            per_byte = 0.0 if split.strategy else 4.0 * kept / item
            saved = sum(stage.saved_bytes for stage in stages) / len(stages)
            inputs = max(stage.output_bytes for stage in stages)
            activations = count * saved
            if split.recompute != "never":
                activations = count * inputs + max(stage.saved_bytes for stage in stages)
            memories.append(
                MemoryEstimate(
                    dense * (1 + copies) / (split.replicas if split.shard == GATHERED else 1)
                    + experts,
                    _gradient_bytes(split, dense, item) + experts,
                    per_byte * (dense / (split.replicas if split.shard else 1) + experts),
                    activations,
                    max(stage.workspace_bytes for stage in stages)
                    + split.slots * max(stage.largest_bytes for stage in stages),
                )
            )
        return max(memories, key=lambda memory: memory.nbytes)

    def level_bytes(self, split: Split) -> Mapping[str, float]:
        """Return the bytes that a step sends over one link of each level of the cluster."""
        machines, m = self.machines, split.microbatches
        stages = self.stages(split)[1]
        nbytes, expert_bytes = max(map(_param_bytes, self.by_rank(split)), key=sum)
        costs = self.layers(split)
        times = 1 + split.num_gathers if split.shard else 2
        passes = 2 if split.recompute == "never" else 3
        per_rank = m / split.pp
        reduced = 2 * passes * per_rank * sum(cost.reduced_bytes for cost in costs)
        # a pass of the ring with keys and values; a backward also sends their gradients
        kv_bytes = sum(split.cp * cost.kv_bytes for cost in costs)
        in_rings = (passes + self._wide) * per_rank * kv_bytes
        routed = 2 * passes * per_rank * sum(cost.routed_bytes for cost in costs)
        sent: defaultdict[Axis, float] = defaultdict(float)
        for axis, sent_bytes in (
            (Axis(split.replicas, split.tp), times * nbytes),
            (Axis(split.replicas // split.ep, split.ep * split.tp), 2 * expert_bytes),
            (Axis(split.tp, 1), reduced),
            (Axis(split.cp, split.ep * split.tp), in_rings),
            (Axis(split.ep, split.tp), routed),
        ):  # a rank keeps its own part
            sent[axis] += (axis.size - 1) / axis.size * sent_bytes
        if split.pp > 1:
            largest = max(stage.output_bytes for stage in stages[:-1])
            axis = Axis(split.pp, split.num_ranks // split.pp)
            sent[axis] = m * split.num_stages // split.pp * largest
        levels: defaultdict[str, float] = defaultdict(float)
        for axis, nbytes_sent in sent.items():
            for level, count in machines.level_bytes(axis, nbytes_sent).items():
                levels[level] += count
        return dict(levels)


def _gradient_bytes(split: Split, params: float, item: int) -> float:
    """Return the bytes of gradients when a backward begins; they are reused in all steps.

    Args:
        split: The split.
        params: Bytes of the rank's parameters before they are sharded.
        item: Bytes of an element of a parameter; the optimizer's gradients have 4.
    """
    if not split.shard:
        return params
    shard = params * 4 / item / split.replicas
    vector = params + (shard if item < 4 else 0.0) if split.shard == 1 else shard
    # on a mesh, gradients accumulate unsharded over the micro-batches, in separate memory
    return vector + (params if split.mesh else 0.0)


def _param_bytes(stages: Sequence[StageCost]) -> tuple[float, float]:
    """Return the bytes of parameters of a rank's stages: without experts, and of experts."""
    expert_bytes = sum(stage.expert_bytes for stage in stages)
    return sum(stage.param_bytes for stage in stages) - expert_bytes, expert_bytes


class _Work(NamedTuple):
    """Work of a rank on a micro-batch."""

    forward_s: float
    input_s: float
    weight_s: float
    split_s: float
    tensor_s: float

    @classmethod
    def of(cls, stages: Sequence[StageCost], action_s: float, *, again: bool) -> _Work:
        forward_s = sum(stage.forward_s + action_s for stage in stages)
        return cls(
            forward_s,
            sum(stage.input_s + action_s for stage in stages) + (forward_s if again else 0.0),
            sum(stage.weight_s for stage in stages),
            sum(stage.split_s for stage in stages),
            sum(stage.sends_s(again=again) for stage in stages),
        )

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s + self.split_s


def _fill(split: Split, work: _Work) -> float:
    """Return the seconds for which a rank lengthens the bubble."""
    f, i, w = work.forward_s, work.input_s, work.weight_s
    name, per_rank = split.schedule.partition(":")[0], split.num_stages // split.pp
    return {
        "breadth_first": (f + i + w) / per_rank,
        "interleaved": (f + i + w) / per_rank,
        "zb_h1": max(0.0, f + i - w),
        "zb_h2": max(0.0, f + i - 2 * w),
        "zbv": max(0.0, f + i - 2 * w) / 2,
        "v_half": (f + i) / 2,
        "v_min": 2 * (f + i) / 3,
    }.get(name, f + i + w)


def _stage(
    costs: Sequence[MicrobatchCost], sends: Sequence[LayerSends], expert_ranks: int, split_s: float
) -> StageCost:
    """Return the costs of a stage of layers on one of `expert_ranks` ranks that share experts."""
    kept = [cost.expert_bytes / expert_ranks if expert_ranks > 1 else 0.0 for cost in costs]
    params: dict[object, float] = {}
    for number, (cost, experts) in enumerate(zip(costs, kept, strict=True)):
        share = cost.param_bytes - (expert_ranks - 1) * experts
        params[cost.params or number] = share  # layers of one stage share tied parameters
    both = LayerSends(*(math.fsum(seconds) for seconds in zip(*sends, strict=True)))
    return StageCost(
        math.fsum(cost.forward_s for cost in costs) + both.forward_s,
        math.fsum(cost.input_s for cost in costs) + both.backward_s,
        math.fsum(cost.weight_s for cost in costs),
        split_s,
        both,
        math.fsum(cost.saved_bytes for cost in costs),
        costs[-1].output_bytes,
        sum(params.values()),
        sum(kept),
        max(
            cost.param_bytes - expert_ranks * experts
            for cost, experts in zip(costs, kept, strict=True)
        ),
        max(cost.workspace_bytes for cost in costs),
    )

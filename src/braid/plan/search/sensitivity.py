"""Answers to "why this split?": its bottleneck, its lead, and what would make another one faster.

Another split is tried with slower and faster links, with slower and faster devices, and with more
memory, by closed forms. A simulated time scales them, so that today's order is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from braid.plan.costs import Axis, Machines, MicrobatchCost, ModelCosts, Origin
from braid.plan.search.estimate import Estimator, SplitEstimate, StepTimeEstimate
from braid.plan.search.planner import Ranking

__all__ = ["PART_NAMES", "flips", "reasons"]

LEAD = 0.02  # less is not worth another split
FACTORS = tuple(2.0 ** (k / 4) for k in range(1, 25))  # up to 64
NUM_CANDIDATES = 60
PART_NAMES: Mapping[str, str] = {
    "compute_s": "compute",
    "bubble_s": "bubble",
    "tensor_s": "collectives of divided layers",
    "message_s": "messages between stages",
    "gradient_s": "gradients",
    "optimizer_s": "optimizer",
    "other_s": "other",
}


class Flip(NamedTuple):
    """A change that makes another split the fastest.

    Attributes:
        change: The change, such as `links 2.8 times slower`.
        estimate: Estimate of the split that is the fastest after the change.
    """

    change: str
    estimate: SplitEstimate


def reasons(ranking: Ranking) -> list[str]:
    """Return sentences that explain why the best split is the fastest."""
    best = ranking.fitting[0]
    time = best.time
    shares = [(getattr(time, part) / time.seconds, PART_NAMES[part]) for part in time._fields]
    listed = ", ".join(f"{name} {100 * s:.0f} %" for s, name in sorted(shares)[::-1] if s >= 0.005)
    lines = [f"{best.split} takes {1e3 * best.seconds:.4g} ms a step: {listed}."]
    if best.split.pp > 1:
        ends = sum(best.balance[: best.busiest + 1])
        first = ends - best.balance[best.busiest]
        lines.append(
            f"Its busiest stage is {best.busiest}, layers {first} to {ends - 1}; layers of stages: "
            f"{', '.join(map(str, best.balance))}."
        )
    levels = ranking.estimator.level_bytes(best.split)
    if levels:
        busiest = max(levels, key=lambda level: levels[level])
        lines.append(
            f"A link of level {busiest} carries most: {levels[busiest] / 1e6:.4g} MB a step."
        )
    lines += ranking.estimator.model.left_out
    other = next((e for e in ranking.fitting[1:] if _family(e) != _family(best)), None)
    if other is not None:
        parts: Sequence[str] = StepTimeEstimate._fields
        worst = max(parts, key=lambda part: getattr(other.time, part) - getattr(time, part))
        more = getattr(other.time, worst) - getattr(time, worst)
        lines.append(
            f"The next of another kind, {other.split}, takes "
            f"{100 * (other.seconds / best.seconds - 1):.2g} % longer, most of all for "
            f"{PART_NAMES[worst]} (+{1e3 * more:.3g} ms)."
        )
    return lines


def flips(ranking: Ranking) -> Iterator[Flip]:
    """Yield the smallest changes of memory, links and devices that make another split fastest."""
    best, estimator = ranking.fitting[0], ranking.estimator
    closed_s = estimator.time(best.split).seconds  # closed forms, as for splits that are too large
    larger = [e for e in ranking.too_large if e.seconds < closed_s * (1 - LEAD)]
    if larger:
        least = min(larger, key=lambda e: e.memory.nbytes)
        yield Flip(f"memory of {least.memory.nbytes / 1e9:.3g} GB a rank", least)
    candidates = ranking.fitting[:NUM_CANDIDATES]
    kinds = {_family(e): e for e in reversed(ranking.fitting)}  # the fastest of each
    candidates = [*candidates, *(e for e in kinds.values() if e not in candidates)]
    scale = {e.split: e.seconds / estimator.time(e.split).seconds for e in candidates}
    for what, knob in (("links", "links"), ("devices", "compute")):
        for word, sign in (("slower", 1), ("faster", -1)):
            for factor in FACTORS:
                changed = _scaled(estimator, **{knob: factor**sign})
                times = {
                    e.split: changed.time(e.split).seconds * scale[e.split] for e in candidates
                }
                first = min(candidates, key=lambda e: times[e.split])
                is_other = _family(first) != _family(best)
                if is_other and times[first.split] < times[best.split] * (1 - LEAD):
                    yield Flip(f"{what} {factor:.2g} times {word}", first)
                    break


def _family(estimate: SplitEstimate) -> tuple[int | str, ...]:
    split = estimate.split
    return *split.axes.values(), split.strategy or split.versions


def _scaled(estimator: Estimator, *, links: float = 1.0, compute: float = 1.0) -> Estimator:
    """Return an estimator with slower links and devices, by the given factors."""
    model = _ScaledModel(estimator.model, compute)
    return Estimator(model, _ScaledMachines(estimator.machines, links), estimator.training)


class _ScaledModel:
    """A model on devices that take `factor` times as long."""

    def __init__(self, model: ModelCosts, factor: float) -> None:
        self._model, self._factor = model, factor
        self.model, self.origin, self.spread = model.model, model.origin, model.spread
        self.num_layers, self.tensor_sizes = model.num_layers, model.tensor_sizes
        self.sequence_sizes, self.expert_sizes = model.sequence_sizes, model.expert_sizes
        self.left_out = model.left_out

    def layers(self, rows: float, tensor: int) -> Sequence[MicrobatchCost]:
        x = self._factor
        return [
            c._replace(
                forward_s=x * c.forward_s,
                input_s=x * c.input_s,
                weight_s=x * c.weight_s,
                split_s=x * c.split_s,
            )
            for c in self._model.layers(rows, tensor)
        ]


class _ScaledMachines:
    """Machines with links that take `factor` times as long."""

    def __init__(self, machines: Machines, factor: float) -> None:
        self._machines, self._factor = machines, factor
        self.num_ranks = machines.num_ranks
        self.origin: Origin = machines.origin
        self.knows_servers = machines.knows_servers
        self.ranks_per_core = machines.ranks_per_core
        self.memory_bytes, self.overlap = machines.memory_bytes, machines.overlap
        self.action_s, self.step_s = machines.action_s, machines.step_s

    def collective_s(self, operation: str, axis: Axis, nbytes: float) -> float:
        return self._factor * self._machines.collective_s(operation, axis, nbytes)

    def message_s(self, axis: Axis, nbytes: float) -> float:
        return self._factor * self._machines.message_s(axis, nbytes)

    def optimizer_s(self, param_bytes: float) -> float:
        return self._machines.optimizer_s(param_bytes)

    def level_bytes(self, axis: Axis, sent: float) -> Mapping[str, float]:
        return self._machines.level_bytes(axis, sent)

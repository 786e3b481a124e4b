"""Plans of which layers to recompute: their cost in memory and time, and the best plan.

A plan cuts a chain of layers into segments. A *recomputed* segment keeps only its input; a *kept*
segment keeps all tensors that its layers save. For layer i, s_i is the number of saved bytes
including the output, and o_i the bytes of the output alone. A segment's input is the output of the
previous layer. It costs nothing if the previous segment is kept (its layers saved it), or at the
start of the chain (the caller owns it). During the backward of segment j, all of segment j and the
kept bytes of earlier segments are alive:

    kept before j:   K_j = sum over segments k < j of
                           (input of k, unless free) + (s of k, if k is kept)
    peak             = max over j of K_j + (input of j, unless free) + (s of j)
    extra time       = forward time of the recomputed segments, at most one forward

With n equal layers in k segments, the last one kept, the peak is (k - 1) + n / k outputs: 2 sqrt(n)
- 1 for k = sqrt(n). Gradients, parameters and temporaries are extra, and are equal for all plans.

Plans have one level. Checkpoints may also be nested, for less memory and more time: see the
sources.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016), sections
3 and 4; Griewank and Walther, "Algorithm 799: revolve" (2000), for the optimal nesting of equal
steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from braid.errors import ConfigError

__all__ = [
    "LayerCost",
    "RecomputePlan",
    "Segment",
    "by_budget",
    "equal_segments",
    "least_budget",
    "sqrt_segments",
]


class LayerCost(NamedTuple):
    """Costs of a layer.

    Attributes:
        saved_bytes: Bytes that backward needs from the layer: its saved tensors and its output,
            without its input and parameters.
        output_bytes: Bytes of the output alone.
        forward_s: Seconds of one forward.
    """

    saved_bytes: int
    output_bytes: int
    forward_s: float


class Segment(NamedTuple):
    """Layers `start` to `stop` (exclusive), recomputed or kept."""

    start: int
    stop: int
    recomputed: bool


class RecomputePlan(NamedTuple):
    """Consecutive segments of a chain of layers.

    Attributes:
        segments: Segments from the first layer to the last, without gaps.
    """

    segments: tuple[Segment, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers in the whole chain."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def num_recomputed(self) -> int:
        """Number of layers that run forward twice."""
        return sum(s.stop - s.start for s in self.segments if s.recomputed)

    def peak_bytes(self, layers: Sequence[LayerCost]) -> int:
        """Return the largest number of bytes kept for backward at any time; see the module."""
        kept = peak = 0
        free = True
        for start, stop, recomputed in self.segments:
            kept += 0 if free else layers[start - 1].output_bytes
            saved = sum(layer.saved_bytes for layer in layers[start:stop])
            peak = max(peak, kept + saved)
            kept += 0 if recomputed else saved
            free = not recomputed
        return peak

    def recomputed_s(self, layers: Sequence[LayerCost]) -> float:
        """Return the extra seconds in backward, for layers with these costs."""
        return math.fsum(
            layer.forward_s
            for s in self.segments
            if s.recomputed
            for layer in layers[s.start : s.stop]
        )

    def check(self, num_layers: int) -> None:
        """Raise if the plan does not cover exactly `num_layers` layers.

        Raises:
            ConfigError: The plan has gaps, empty segments, or another number of layers.
        """
        ends = [0, *(s.stop for s in self.segments)]
        starts = [s.start for s in self.segments]
        if (
            ends[:-1] != starts
            or ends[-1] != num_layers
            or any(s.start >= s.stop for s in self.segments)
        ):
            msg = (
                f"segments {self} must cover layers 0 to {num_layers} in order without gaps: "
                "make the plan for the actual number of layers"
            )
            raise ConfigError(msg)

    def __str__(self) -> str:
        """Return text such as `(0 1 2 3) (4 5 6 7) 8 9`: recomputed segments in parentheses."""
        texts = []
        for start, stop, recomputed in self.segments:
            text = " ".join(map(str, range(start, stop)))
            texts.append(f"({text})" if recomputed else text)
        return " ".join(texts) or "no layers"


def equal_segments(num_layers: int, num_segments: int) -> RecomputePlan:
    """Return segments of nearly equal length; all but the last are recomputed.

    The last segment's backward comes first, so recomputing it would cost time and save no memory.

    Cost: peak about (k - 1) + n / k outputs of equal layers; n - n / k layers run again.

    Raises:
        ConfigError: There are more segments than layers, or none.
    """
    if not 1 <= num_segments <= max(num_layers, 1):
        msg = (
            f"number of segments for {num_layers} layers must be from 1 to "
            f"{max(num_layers, 1)}, got {num_segments}"
        )
        raise ConfigError(msg)
    cuts = [num_layers * i // num_segments for i in range(num_segments + 1)]
    return RecomputePlan(
        tuple(
            Segment(start, stop, recomputed=stop < num_layers)
            for start, stop in pairwise(cuts)
            if start < stop
        )
    )


def sqrt_segments(num_layers: int) -> RecomputePlan:
    """Return about sqrt(n) segments, the best number for equal layers.

    Cost: peak 2 sqrt(n) - 1 outputs (n a square); n - sqrt(n) layers run again.

    Source: Chen et al. (2016), section 3.
    """
    return equal_segments(num_layers, max(1, math.isqrt(num_layers)))


def by_budget(
    layers: Sequence[LayerCost], budget_bytes: int, *, grain_bytes: int = 1
) -> RecomputePlan:
    """Return the plan that recomputes the least time with a peak of at most `budget_bytes`.

    A dynamic programme over prefixes. F(i) holds the pairs (bytes kept with the input of layer i,
    extra seconds) of all fitting plans for the layers before i, without pairs that another pair
    dominates. With M the budget:

        F(0) = {(0, 0)}
        keep layer i:             (b, t) of F(i)  ->  (b + s_i, t) of F(i+1)
                                  if b + s_i <= M
        recompute layers i..j-1:  (b, t) of F(i)  ->  (b + o_(j-1), t + t_i + .. + t_(j-1)) of F(j)
                                  if b + s_i + .. + s_(j-1) <= M

    The answer is the least t in F(n). It is exact because later segments depend on earlier ones
    only by b and t.

    Args:
        layers: Costs of the layers; see `measure`.
        budget_bytes: Bytes to keep for backward, not counting gradients, parameters and
            temporaries.
        grain_bytes: Multiple to which sizes are rounded up. Coarser is faster; the plan still keeps
            within the budget.

    Cost: O(n^2 p) steps, p pairs per prefix: no more than budget / grain, in practice far fewer.

    Raises:
        ConfigError: No plan fits; the message contains the least budget.
    """
    grain = max(1, grain_bytes)
    saved = [-(-layer.saved_bytes // grain) for layer in layers]
    outputs = [-(-layer.output_bytes // grain) for layer in layers]
    limit = budget_bytes // grain
    n = len(layers)
    reached: list[dict[int, _Prefix]] = [{} for _ in range(n + 1)]  # by kept bytes
    reached[0][0] = _Prefix(0, 0.0, Segment(0, 0, recomputed=False), None)
    for i in range(n):
        for prefix in _undominated(reached[i].values()):
            needed, extra_s = prefix.kept + saved[i], prefix.extra_s
            if needed <= limit:
                keep = Segment(i, i + 1, recomputed=False)
                _offer(reached[i + 1], _Prefix(needed, extra_s, keep, prefix))
            for j in range(i, n):
                extra_s += layers[j].forward_s
                if needed > limit:
                    break
                again = Segment(i, j + 1, recomputed=True)
                _offer(reached[j + 1], _Prefix(prefix.kept + outputs[j], extra_s, again, prefix))
                needed += saved[j + 1] if j + 1 < n else 0
    if not reached[n]:
        msg = (
            f"budget of {budget_bytes} bytes (in grains of {grain}) is too small for these {n} "
            f"layers, which need at least {least_budget(layers)}: pass a larger budget, or divide "
            "the model into more layers"
        )
        raise ConfigError(msg)
    return _plan_of(min(reached[n].values(), key=lambda prefix: (prefix.extra_s, prefix.kept)))


def least_budget(layers: Sequence[LayerCost]) -> int:
    """Return the smallest peak, in bytes, of any plan without nested segments.

    Cost: O(n^2 log(bytes)), by bisection; the least kept bytes of each prefix decide whether a
    budget suffices.
    """
    top = RecomputePlan((Segment(0, len(layers), recomputed=False),)).peak_bytes(layers)
    low, high = -1, top  # invariant: low is too small, high suffices
    while high - low > 1:
        middle = (low + high) // 2
        if _suffices(layers, middle):
            high = middle
        else:
            low = middle
    return high


class _Prefix(NamedTuple):
    """Plan for the first layers: its cost, its last segment, and the plan that it extends."""

    kept: int
    extra_s: float
    last: Segment
    before: _Prefix | None


def _offer(reached: dict[int, _Prefix], prefix: _Prefix) -> None:
    rival = reached.get(prefix.kept)
    if rival is None or prefix.extra_s < rival.extra_s:
        reached[prefix.kept] = prefix


def _undominated(prefixes: Iterable[_Prefix]) -> list[_Prefix]:
    """Return the prefixes that no other prefix dominates in kept bytes and extra seconds."""
    best: list[_Prefix] = []
    for prefix in sorted(prefixes, key=lambda p: (p.kept, p.extra_s)):
        if not best or prefix.extra_s < best[-1].extra_s:
            best.append(prefix)
    return best


def _plan_of(prefix: _Prefix) -> RecomputePlan:
    segments: list[Segment] = []
    while prefix.before is not None:
        last = prefix.last
        if segments and not last.recomputed and not segments[-1].recomputed:
            segments[-1] = Segment(last.start, segments[-1].stop, recomputed=False)
        else:
            segments.append(last)
        prefix = prefix.before
    return RecomputePlan(tuple(reversed(segments)))


def _suffices(layers: Sequence[LayerCost], budget: int) -> bool:
    """Return whether any plan fits into `budget`.

    Seconds do not matter, so the least kept bytes of each prefix are enough.
    """
    n = len(layers)
    least = [0, *[math.inf] * n]
    for i in range(n):
        needed = least[i]
        for j in range(i, n):
            needed += layers[j].saved_bytes
            if needed > budget:
                break
            kept = least[i] + layers[j].output_bytes
            least[j + 1] = min(least[j + 1], needed if j == i else kept, kept)
    return least[n] < math.inf

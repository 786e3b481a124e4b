"""Measures what each layer of a model costs, on real inputs and in the order of training.

    for each number of rows, until the time is over:
        layer 0: forward, backward, backward in two parts -> layer 1: ... -> layer n

A backward to the weights is the whole one less that to the inputs. In a pipeline that splits its
backwards, the two parts take longer than the whole; this is measured, too. The mean of the middle
80 % of rounds counts; the first does not. Of layers that are alike (class, settings, shapes of
parameters and inputs, operations, bytes) the first is measured. Two numbers of rows give a constant
and a cost per row.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from braid.comm import Group
from braid.comm.autograd.layer_costs import PeakBytes, seconds_of
from braid.comm.autograd.nested import flatten, tensors_in
from braid.errors import ConfigError
from braid.parallel.expert_parallel import expert_modules
from braid.parallel.pipeline.layer_runs import Skips, as_they_were, bytes_of_layer, run_all
from braid.parallel.pipeline.microbatches import num_rows
from braid.parallel.pipeline.split_backward import SplitBackward
from braid.plan.lone_rank import LoneRank
from braid.plan.profiling.profile import LayerProfile, PerRows, Profile, fitted
from braid.runtime.clock import Clock, MonotonicClock

__all__ = ["profile_layers"]

LEAST_ROUNDS = 3  # after the first one
LOSS = "loss"  # kind of the loss, beside the kinds of layers
OUTER = 0.1  # share of times at either end that does not count


class _Sizes(NamedTuple):
    saved_bytes: int
    output_bytes: int
    flops: int
    reduces: int
    reduced_bytes: int
    workspace_bytes: int
    kv_bytes: int


class _Times(NamedTuple):
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    split_s: float = 0.0


def profile_layers(
    named: Sequence[tuple[str, nn.Module]],
    sample: Callable[[int], Any],
    *,
    model: str,
    rows: Sequence[int] = (2, 8),
    seconds: float = 2.0,
    ranks: LoneRank | None = None,
    group: Group | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    slowdown: Callable[[Any, float], float] = lambda _x, _alone_s: 1.0,
    clock: Clock | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> Profile:
    """Measure the time and memory of a list of layers.

    Args:
        named: Layers with their names; each takes the output of the previous one.
        sample: Function of a number of rows that returns an input of the first layer.
        model: Name of the model.
        rows: Numbers of rows to measure with; at least two different ones.
        seconds: Time to measure for, after the first rounds.
        ranks: Group over which the layers are sharded; None for whole layers.
        group: All ranks that measure, if layers have collectives; all run the same number of
            rounds.
        loss: Loss of the last layer's output; its time is added to the last layer's. None to leave
            it out.
        slowdown: Function that returns the layers' time in training, relative to their time alone;
            called with an input, and the sum of their times for it.
        clock: Clock for the times.
        progress: Called with the finished share of the measurement, from 0 to 1.

    Raises:
        ConfigError: `rows` has less than two different numbers, or a layer fails.
    """
    if len(set(rows)) < 2 or min(rows) < 1:
        msg = f"rows must be at least two different positive numbers, got {list(rows)}"
        raise ConfigError(msg)
    clock = clock or MonotonicClock()
    layers = [layer for _, layer in named]
    sizes: list[list[_Sizes]] = []
    times: list[list[_Times]] = []
    spread = 0.0
    for number, count in enumerate(rows):
        x = sample(count)
        assert num_rows(x) == count, "a sample has the requested number of rows"
        kinds: list[object] = []
        own_sizes: list[_Sizes] = []
        rounds: dict[object, list[_Times]] = defaultdict(list)
        with as_they_were(layers, x):
            run_all(named, x, None, _sized(own_sizes, kinds, ranks))
            start_ns, limit_s = clock.now_ns(), seconds / len(rows)
            num_rounds = 1 << 30
            for turn in itertools.count():
                run_all(named, x, None, _timed(rounds, kinds, loss, turn, clock))
                spent_s = (clock.now_ns() - start_ns) / 1e9
                progress((number + min(1.0, spent_s / max(limit_s, 1e-9))) / len(rows))
                if group is not None and turn == 1:
                    round_count = torch.tensor(LEAST_ROUNDS + int(2 * limit_s / spent_s))
                    num_rounds = int(group.broadcast(round_count, 0))
                if turn >= num_rounds or (
                    group is None and turn >= LEAST_ROUNDS and spent_s >= limit_s
                ):
                    break
            typical = [_typical(rounds[kind]) for kind in kinds]
            if loss is not None:
                typical[-1] = _Times(
                    *map(sum, zip(typical[-1], _typical(rounds[LOSS]), strict=True))
                )
            ratio = slowdown(x, math.fsum(sum(t) - t.split_s for t in typical))
        sizes.append(own_sizes)
        times.append([_Times(*(ratio * seconds for seconds in t)) for t in typical])
        turns = zip(*rounds.values(), strict=True)  # one time of each kind of layer
        spread = max(spread, _spread([sum(map(sum, turn)) for turn in turns]))
    numbers = {p: n for n, p in enumerate(dict.fromkeys(p for m in layers for p in m.parameters()))}
    return Profile(
        model=model,
        device=_device(layers),
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        rows=tuple(rows),
        layers=tuple(
            _layer(name, layer, rows, [s[i] for s in sizes], [t[i] for t in times], numbers)
            for i, (name, layer) in enumerate(named)
        ),
        spread=spread,
    )


def _layer(
    name: str,
    layer: nn.Module,
    rows: Sequence[int],
    sizes: Sequence[_Sizes],
    times: Sequence[_Times],
    numbers: dict[nn.Parameter, int],
) -> LayerProfile:
    params = list(dict.fromkeys(layer.parameters()))

    def fit(measured: Sequence[NamedTuple], field: str) -> PerRows:
        return fitted(rows, [float(getattr(one, field)) for one in measured])

    return LayerProfile(
        name=name,
        kind=type(layer).__name__,
        forward_s=fit(times, "forward_s"),
        input_grad_s=fit(times, "input_grad_s"),
        weight_grad_s=fit(times, "weight_grad_s"),
        split_s=fit(times, "split_s"),
        saved_bytes=fit(sizes, "saved_bytes"),
        output_bytes=fit(sizes, "output_bytes"),
        param_bytes=sum(p.nbytes for p in params),
        flops_per_row=fit(sizes, "flops").per_row,
        params=tuple(numbers[p] for p in params),
        reduces=sizes[0].reduces,
        reduced_bytes=fit(sizes, "reduced_bytes"),
        workspace_bytes=fit(sizes, "workspace_bytes"),
        kv_bytes=fit(sizes, "kv_bytes"),
        has_experts=bool(expert_modules(layer)),
    )


def _typical(rounds: Sequence[_Times]) -> _Times:
    """Return means without the shortest and longest times: a step adds up many of them."""
    return _Times(*(statistics.fmean(_middle(values)) for values in zip(*rounds, strict=True)))


def _spread(seconds: Sequence[float]) -> float:
    """Return half of the range of the middle 80 % of times, relative to their mean."""
    kept = _middle(seconds)
    mean_s = statistics.fmean(kept) if kept else 0.0
    return (kept[-1] - kept[0]) / 2 / mean_s if mean_s else 0.0


def _middle(values: Sequence[float]) -> Sequence[float]:
    cut = int(OUTER * len(values))
    return sorted(values)[cut : len(values) - cut]


def _sized(
    sizes: list[_Sizes], kinds: list[object], ranks: LoneRank | None
) -> Callable[[nn.Module, Any, Skips], Any]:
    def run(layer: nn.Module, x: Any, skips: Skips) -> Any:
        if ranks is not None:
            ranks.reduced.clear()
        with FlopCounterMode(display=False) as counter, _KeyBytes() as keys:
            output, saved_bytes, output_bytes = bytes_of_layer(layer, x, skips)
        reduced = [] if ranks is None else list(ranks.reduced)
        workspace_bytes = 0 if skips else max(0, _peak_bytes(layer, x) - saved_bytes)
        flops = counter.get_total_flops()
        sizes.append(
            _Sizes(
                saved_bytes,
                output_bytes,
                flops,
                len(reduced),
                sum(reduced),
                workspace_bytes,
                keys.nbytes,
            )
        )
        kinds.append((_kind(layer, x), sizes[-1]))
        return output

    return run


class _KeyBytes(TorchFunctionMode):
    """Function mode that counts the bytes of the keys and values of attention.

    Attributes:
        nbytes: Bytes in all calls of torch's scaled_dot_product_attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and count keys and values if it is attention."""
        if func is functional.scaled_dot_product_attention:
            named = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
            self.nbytes += named["key"].nbytes + named["value"].nbytes
        return func(*args, **(kwargs or {}))


def _peak_bytes(layer: nn.Module, x: Any) -> int:
    """Return the most bytes of a forward and its backward that are alive at a time."""
    with PeakBytes() as noted:
        outputs = [t for t in tensors_in(layer(x)) if t.requires_grad]
        inputs = [t for t in (*tensors_in(x), *layer.parameters()) if t.requires_grad]
        if outputs and inputs:
            grads = [torch.ones_like(t) for t in outputs]
            torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    return int(noted.live.peak_bytes)


def _kind(layer: nn.Module, x: Any) -> object:
    """Return what layers have in common that take the same time."""
    params = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in layer.parameters())
    inputs = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in flatten(x)[1])
    return type(layer), repr(layer), params, inputs


def _timed(
    rounds: dict[object, list[_Times]],
    kinds: Sequence[object],
    loss: Callable[[Any], torch.Tensor] | None,
    turn: int,
    clock: Clock,
) -> Callable[[nn.Module, Any, Skips], Any]:
    remaining = list(kinds)

    def run(layer: nn.Module, x: Any, skips: Skips) -> Any:
        is_alike = remaining[0] in kinds[: len(kinds) - len(remaining)]
        kind, before = remaining.pop(0), set(skips)
        devices = {t.device for t in (*tensors_in(x), *layer.parameters())}
        output, forward_s = seconds_of(lambda: layer(x), devices, clock)
        if loss is not None and turn and not remaining:
            logits = output.detach().requires_grad_()
            value, loss_s = seconds_of(lambda: loss(logits), devices, clock)
            grad_s = seconds_of(lambda: torch.autograd.grad(value, logits), devices, clock)[1]
            rounds[LOSS].append(_Times(loss_s, grad_s, 0.0))
        if is_alike and turn:  # one of each kind is enough
            return output
        made = [output, *(skips[key] for key in skips if key not in before)]
        ends = list({id(t): t for t in tensors_in(made) if t.requires_grad}.values())
        inputs = [t for t in tensors_in(x) if t.requires_grad]
        grads = [torch.ones_like(t) for t in ends]

        def whole() -> None:
            if ends:
                torch.autograd.backward(ends, grads, retain_graph=True)

        backward_s = seconds_of(whole, devices, clock)[1]
        input_s = split_s = 0.0
        if ends and inputs:
            parts = SplitBackward(ends, inputs, [p for p in layer.parameters() if p.requires_grad])
            input_s = seconds_of(lambda: parts.to_inputs(grads), devices, clock)[1]
            split_s = input_s + seconds_of(parts.to_weights, devices, clock)[1] - backward_s
            # one part of a small layer takes longer than its whole backward
            input_s = min(input_s, backward_s)
        if turn:  # the first one warms up
            weight_s = backward_s - input_s
            rounds[kind].append(_Times(forward_s, input_s, weight_s, max(0.0, split_s)))
        return output

    return run


def _device(layers: Sequence[nn.Module]) -> str:
    param = next((p for layer in layers for p in layer.parameters()), None)
    if param is None or param.device.type == "cpu":
        return "cpu"
    return torch.cuda.get_device_name(param.device)

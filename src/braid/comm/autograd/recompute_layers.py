"""Recomputation of a model's layers, in models of any class.

    recompute_layers(model, "memory")       about sqrt(n) of n layers keep their input, nothing else
    recompute_layers(model, "speed")        and all layers keep matrix products and convolutions
    recompute_layers(model, ["blocks.3"])   keeps the outputs of these layers

The layers are the children of the model's nn.Sequential and nn.ModuleList. A plan divides them into
segments, and the model may call them with any arguments and do anything between the calls:

    model       h = blocks[0](x, mask)     h = blocks[1](h, mask)     h = h + y    h = blocks[2](h)
    kept             x, mask                (h is an output)                            h

A segment records the calls of its layers. An argument that is the unchanged output of the layer
before it is not kept, since the recomputation computes it again; other arguments are kept. So the
gradients are right whatever the model does, and a chain of layers keeps one tensor per segment.

Source: T. Salimans, Y. Bulatov, "Saving memory using gradient-checkpointing" (OpenAI, 2018), for
the strategies; Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from braid.comm.autograd.nested import flatten, unflatten
from braid.comm.autograd.phony import phony
from braid.comm.autograd.recompute import CPU, CheckpointedCall, KeptTensors
from braid.comm.autograd.recompute_plan import RecomputePlan, Segment, equal_segments, sqrt_segments
from braid.comm.autograd.recompute_policy import (
    MATMULS,
    RecomputePolicy,
    check_policy,
    contexts_of,
)
from braid.comm.autograd.rng_and_autocast import RngAndAutocast, generators_of
from braid.errors import ConfigError
from braid.runtime.torch_internals import forward_hooks, own_modules, version_of

__all__ = ["LayerForward", "recompute_layers"]

LISTS = nn.Sequential | nn.ModuleList


def recompute_layers(
    model: nn.Module,
    strategy: str | int | Sequence[str] | RecomputePlan = "memory",
    *,
    policy: RecomputePolicy | None = None,
) -> RecomputedLayers:
    """Change `model` so that backward computes some of its layers again, to save memory.

    Gradients keep their bits, with dropout too, and BatchNorms count each forward once. Parameters
    and their names do not change, so the function can be called before or after DDP or FSDP wraps
    the model, and before or after a checkpoint is loaded.

    Args:
        model: Model with its layers in an nn.Sequential or nn.ModuleList, or in several of them.
        strategy: `memory`: about sqrt(n) segments; `speed`: the same, and the results of matrix
            products, convolutions and attention are kept, so that only cheap operators run again;
            a list of the names of layers with kept outputs; a number of segments; or a plan, for
            example of `by_budget`.
        policy: Policy of results that are kept in all layers; see `checkpoint`.

    Returns:
        Handle with the layers, the plan, and `remove()`.

    Raises:
        ConfigError: The model has no layers, its layers are recomputed already, or the strategy is
            none of these.

    Cost: at most one more forward of the layers. Memory of n equal layers that save only their
    output: 2 sqrt(n) - 1 outputs for `memory`.
    Source: see the module.
    """
    layers = dict(_layers_of(model, ""))
    if not layers:
        msg = (
            f"{type(model).__name__} has no layers in an nn.Sequential or nn.ModuleList: call "
            "braid.comm.autograd.checkpoint on its parts"
        )
        raise ConfigError(msg)
    plan = _plan_of(strategy, list(layers))
    if policy is None and strategy == "speed":
        policy = MATMULS
    if policy is not None:
        check_policy(policy)
    return RecomputedLayers(layers, plan, policy)


def _layers_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of the outermost lists of a model, with their names."""
    for name, child in own_modules(module).items():
        if child is None:
            continue
        if isinstance(module, LISTS) and not isinstance(child, nn.ModuleList):
            yield prefix + name, child
        else:
            yield from _layers_of(child, f"{prefix}{name}.")


def _plan_of(strategy: object, names: list[str]) -> RecomputePlan:
    """Return the plan of a strategy for layers with these names."""
    if isinstance(strategy, RecomputePlan):
        strategy.check(len(names))
        return strategy
    if strategy in ("memory", "speed"):
        return sqrt_segments(len(names))
    if isinstance(strategy, int) and not isinstance(strategy, bool):
        return equal_segments(len(names), strategy)
    if isinstance(strategy, str) or not isinstance(strategy, Sequence):
        msg = (
            'strategy must be "memory", "speed", a list of names of layers, a number of segments '
            f"or a RecomputePlan, got {strategy!r}"
        )
        raise ConfigError(msg)
    unknown = [name for name in strategy if name not in names]
    if unknown:
        msg = (
            f"the model has no layers {', '.join(map(repr, unknown))}: the outputs of these layers "
            f"can be kept: {', '.join(names)}"
        )
        raise ConfigError(msg)
    ends = sorted({names.index(name) + 1 for name in strategy} | {len(names)})
    starts = [0, *ends]
    return RecomputePlan(
        tuple(
            Segment(start, stop, recomputed=stop < len(names))
            for start, stop in zip(starts, ends, strict=False)
        )
    )


class RecomputedLayers:
    """Layers of a model that are computed again in backward; see `recompute_layers`.

    Args:
        layers: Layers by name.
        plan: Segments of the layers.
        policy: Policy of results that are kept.

    Attributes:
        names: Names of the layers.
        plan: Segments of the layers.

    Raises:
        ConfigError: A layer is recomputed already.
    """

    def __init__(
        self, layers: dict[str, nn.Module], plan: RecomputePlan, policy: RecomputePolicy | None
    ) -> None:
        taken = [name for name, layer in layers.items() if isinstance(layer.forward, LayerForward)]
        if taken:
            msg = (
                f"layers {', '.join(taken)} are recomputed already: call remove() of the earlier "
                "result first"
            )
            raise ConfigError(msg)
        self.names = tuple(layers)
        self.plan = plan
        self.policy = policy
        self._segment_of = {
            index: number
            for number, segment in enumerate(plan.segments)
            for index in range(segment.start, segment.stop)
            if segment.recomputed
        }
        self._forwards = []
        self._open: dict[int, _OpenSegment] = {}  # by thread
        for index, layer in enumerate(layers.values()):
            if isinstance(layer.forward, LayerForward):
                continue  # this layer occurs twice
            self._forwards.append(LayerForward(self, index, layer))
            layer.forward = self._forwards[-1]

    def remove(self) -> None:
        """Undo `recompute_layers`; graphs that exist can still run backward."""
        for forward in self._forwards:
            forward.remove()
        self._forwards.clear()
        self._open.clear()

    def call(self, forward: LayerForward, args: Any, kwargs: Any) -> Any:
        """Run the forward of a layer, and save at most its inputs for backward."""
        again = _AGAIN.get()
        if again is not None and again.owner is self:
            return again.run_again(forward, args, kwargs)
        number = self._segment_of.get(forward.index, -1)
        if number < 0 or not torch.is_grad_enabled():
            return forward.plain(*args, **kwargs)
        thread = threading.get_ident()
        segment = self._open.pop(thread, None)
        if segment is None or not segment.precedes(number, forward.index):
            segment = _OpenSegment(self, number)
        result = segment.run(forward, args, kwargs)
        if forward.index + 1 < self.plan.segments[number].stop:
            self._open[thread] = segment
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}

    def __repr__(self) -> str:
        return f"RecomputedLayers({self.plan})"


class LayerForward:
    """Replacement of a layer's forward; copies of the layer get a copy.

    Args:
        owner: Layers of the model.
        index: Number of the layer.
        layer: The layer.

    Attributes:
        replaced: Attribute `forward` of the layer before; None for the method of its class.
    """

    def __init__(self, owner: RecomputedLayers, index: int, layer: nn.Module) -> None:
        self.owner, self.index, self.layer = owner, index, layer
        self.replaced = vars(layer).get("forward")  # not a method, which pickle finds by name

    @property
    def plain(self) -> Callable[..., Any]:
        """Forward of the layer without recomputation."""
        return self.replaced or partial(type(self.layer).forward, self.layer)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Function with the signature of the forward."""
        return self.plain

    def with_copies(self, copy_of: Callable[[Any], Any]) -> LayerForward:
        """Return the forward of a replica; `copy_of` returns the replica's copy of an attribute."""
        twin = copy.copy(self)
        twin.layer, twin.replaced = copy_of(self.layer), copy_of(self.replaced)
        return twin

    def remove(self) -> None:
        """Undo the replacement."""
        if self.replaced is None:
            del self.layer.forward
        else:
            self.layer.forward = self.replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer."""
        return self.owner.call(self, args, kwargs)


class _RecordedCall(NamedTuple):
    """Call of a layer.

    Attributes:
        forward: Forward of the layer.
        tree: Arguments with placeholders instead of tensors.
        places: For each tensor its place among the outputs of the previous call; -1 if it is kept.
        requires_grad: Whether each tensor requires a gradient.
        kept: Tensor with a grad_fn that saves the other tensors.
        state: Random generators and autocast.
        loading: Context of the recomputation, with the kept results of operators.
    """

    forward: LayerForward
    tree: Any
    places: list[int]
    requires_grad: list[bool]
    kept: torch.Tensor
    state: RngAndAutocast
    loading: AbstractContextManager[Any]


class _OpenSegment(CheckpointedCall):
    """Calls of consecutive layers in one forward, which run again together."""

    def __init__(self, owner: RecomputedLayers, number: int) -> None:
        self.owner, self._number = owner, number
        self._calls: list[_RecordedCall] = []
        # outputs of the last call with their counts of in-place changes
        self._outputs: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._outputs_again: list[torch.Tensor] = []
        state = RngAndAutocast([])  # each call has its state
        super().__init__(_nothing, ((), {}), (), state, None, early_stop=True)

    def precedes(self, number: int, index: int) -> bool:
        """Return whether a layer of a segment comes after the last call."""
        return (number, index) == (self._number, self._calls[-1].forward.index + 1)

    def run(self, forward: LayerForward, args: Any, kwargs: Any) -> Any:
        """Run a layer for the first time."""
        tree, tensors = flatten((args, kwargs))
        places = [self._place_of(x) for x in tensors]
        outside = [x.detach() for x, place in zip(tensors, places, strict=True) if place < 0]
        kept = KeptTensors.apply(phony(CPU, True), *outside)  # type: ignore[no-untyped-call]
        requires_grad = [x.requires_grad for x in tensors]
        policy = self.owner.policy
        saving, loading = (nullcontext(),) * 2 if policy is None else contexts_of(policy)
        state = RngAndAutocast(generators_of(tensors))
        self._calls.append(
            _RecordedCall(forward, tree, places, requires_grad, kept, state, loading)
        )
        self.early_stop &= not forward_hooks(forward.layer)  # they may have to end a call
        self.register_parameters(forward.layer)
        self.complete = False
        with saved_tensors_hooks(self.save, self.load), saving:
            result = forward.plain(*args, **kwargs)
        self.complete = True
        self._outputs = [(weakref.ref(x), version_of(x)) for x in flatten(result)[1]]
        return result

    def run_again(self, forward: LayerForward, args: Any, kwargs: Any) -> Any:
        """Run a layer for the second time, inside of `_call_again`."""
        call = next(call for call in self._calls if call.forward is forward)
        hooks = saved_tensors_hooks(self.save_again, _same)
        with _with_buffers(forward.layer), call.state.again(), hooks, call.loading:
            result = forward.plain(*args, **kwargs)
        self._outputs_again = flatten(result)[1]
        return result

    def _place_of(self, x: torch.Tensor) -> int:
        for place, (output, version) in enumerate(self._outputs):
            if output() is x and version_of(x) == version:
                return place
        return -1

    def _call_again(self) -> None:
        token = _AGAIN.set(self)
        try:
            for call in self._calls:
                outputs = self._outputs_again
                kept = iter(call.kept.grad_fn.saved_tensors)  # type: ignore[union-attr]
                tensors = [
                    next(kept).detach().requires_grad_(needs) if place < 0 else outputs[place]
                    for place, needs in zip(call.places, call.requires_grad, strict=True)
                ]
                args, kwargs = unflatten(call.tree, tensors)
                with saved_tensors_hooks(_same, _same):  # hooks of the layer are not recorded
                    call.forward.layer(*args, **kwargs)
        finally:
            self._outputs_again = []
            _AGAIN.reset(token)


_AGAIN: ContextVar[_OpenSegment | None] = ContextVar("braid_segment_again", default=None)


def _nothing() -> None:
    """Stand for the function of a segment, which calls layers."""


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@contextmanager
def _with_buffers(module: nn.Module) -> Iterator[None]:
    """Return a context that restores buffers at its end, such as running means."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)

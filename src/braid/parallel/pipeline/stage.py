"""One stage: its layers, and its state of each micro-batch between forward and backward.

Values between stages are any containers of tensors. Inputs are detached from the graph of the
previous stage; backward continues from their gradients there, on any rank. Skip connections are
additional inputs and outputs, each connected to another stage.

A forward that will be recomputed saves only its inputs: it runs with grad mode, to find the outputs
that require a gradient, and drops each tensor that autograd would save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from braid.comm.autograd import checkpoint
from braid.comm.autograd.nested import map_tensors, tensors_in
from braid.comm.autograd.recompute_policy import RecomputePolicy, contexts_of
from braid.comm.autograd.rng_and_autocast import RngAndAutocast, generators_of
from braid.errors import ConfigError, InternalError
from braid.parallel.gradients.weight_versions import WeightVersion, WeightVersions
from braid.parallel.graph import GraphSegment
from braid.parallel.pipeline.recomputing import CHECKPOINTING, RECOMPUTING
from braid.parallel.pipeline.skip import SkipKey, use_skips
from braid.parallel.pipeline.split_backward import SplitBackward
from braid.runtime.seeding import Draws
from braid.runtime.torch_internals import own_buffers, version_of

__all__ = ["Edge", "Layer", "Stage", "StageError"]

Gradients = list["torch.Tensor"]


class Layer(NamedTuple):
    """Module of the model, with its name."""

    name: str
    module: nn.Module


class Edge(NamedTuple):
    """Skip connection between two stages.

    Attributes:
        key: Name of the connection.
        number: Number of the connection in the model, from 1.
        source: Stage that stashes.
        target: Stage that pops.
    """

    key: SkipKey
    number: int
    source: int
    target: int


class StageError(Exception):
    """Exception that a layer of a stage has raised.

    Attributes:
        layer: Name and type of the layer.
        error: The exception.
    """

    def __init__(self, layer: str, error: Exception) -> None:
        super().__init__(layer)
        self.layer = layer
        self.error = error


class _ForwardArguments(NamedTuple):
    """Arguments of a forward; with generators and buffers for recomputation."""

    weights: WeightVersion | None
    value: Any
    skips: Mapping[SkipKey, Any]
    draws: Draws | None
    generators: RngAndAutocast | None
    buffers: Mapping[tuple[nn.Module, str], torch.Tensor]
    kept: AbstractContextManager[Any] = nullcontext()  # of the recomputation, with kept results


class _Pass(NamedTuple):
    """Forward of a micro-batch that has no backward yet.

    Attributes:
        arguments: Arguments of the forward, for recomputation.
        inputs: Tensors that get a gradient, by edge; None is the value.
        outputs: Tensors that require a gradient, by edge; None is the value.
    """

    arguments: _ForwardArguments
    inputs: dict[Edge | None, Gradients]
    outputs: dict[Edge | None, Gradients]


class Stage:
    """Layers of one pipeline stage, and the state of their running forwards.

    Args:
        index: Number of the stage.
        layers: Layers of the stage, in order.
        edges: Skip connections of the model that begin or end at this stage.
        every: Number of layers per checkpoint, which are recomputed in backward; 0 to save all
            tensors.
        policy: Policy of results that are kept and not computed again; see
            `braid.comm.autograd.recompute_policy`.
        versions: Versions of the weights, for asynchronous pipelines; None for one version.
        around: Function that gets the run of all layers and their input, and returns the output of
            the run; None to call the layers only.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[Layer],
        edges: Sequence[Edge] = (),
        *,
        every: int = 0,
        policy: RecomputePolicy | None = None,
        versions: WeightVersions | None = None,
        around: Callable[[Callable[[Any], Any], Any], Any] | None = None,
    ) -> None:
        self.index = index
        self.layers = tuple(layers)
        self.stashes = tuple(edge for edge in edges if edge.source == index)
        self.pops = tuple(edge for edge in edges if edge.target == index)
        self._every, self._policy = every, policy
        self._versions = versions
        self._around = around
        self._changes_input = _begins_in_place(self.layers)
        self._passes: dict[int, _Pass] = {}
        self._split: dict[int, SplitBackward] = {}  # backwards without gradients of weights yet
        self._changing: list[tuple[nn.Module, str]] = []  # buffers that a forward changes
        self._has_noted = False  # whether `_changing` is known
        # tensors that a layer uses instead of its parameters, by the names of layer and parameter
        self.replaced: dict[str, dict[str, torch.Tensor]] = {}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the layers, without duplicates."""
        yield from dict.fromkeys(p for layer in self.layers for p in layer.module.parameters())

    def forward(
        self,
        microbatch: int,
        value: Any,
        *,
        keeps: bool,
        skips: Mapping[Edge, Any] | None = None,
        draws: Draws | None = None,
        drops: bool = False,
        version: int = -1,
    ) -> tuple[Any, dict[Edge, Any]]:
        """Run the layers on a micro-batch.

        Args:
            microbatch: Number of the micro-batch.
            value: Output of the previous stage, or a part of the batch.
            keeps: Whether a backward follows, so that tensors must be saved.
            skips: Tensors that earlier stages have stashed for this one.
            draws: Random numbers of the micro-batch; None for torch's generators.
            drops: Whether to save nothing, because `recompute` follows.
            version: Version of the weights; negative for the layers' current weights.

        Returns:
            Output of the stage, and tensors that it has stashed for later stages.

        Raises:
            StageError: A layer raises an exception.
        """
        popped = {edge.key: map_tensors(x, _cut_off) for edge, x in (skips or {}).items()}
        value = map_tensors(value, _cut_off)
        generators = RngAndAutocast(generators_of(list(tensors_in(value)))) if drops else None
        weights = self._versions.use(version) if self._versions and version >= 0 else None
        keeping: AbstractContextManager[Any] = nullcontext()
        arguments = _ForwardArguments(weights, value, popped, draws, generators, {})
        if drops and self._policy is not None:
            keeping, kept = contexts_of(self._policy)
            arguments = arguments._replace(kept=kept)
        again = drops or (keeps and self._every)
        if again:
            arguments = arguments._replace(buffers=self._copies_of_buffers())
        inputs = [*tensors_in((arguments.value, popped))] if again else []
        versions = [version_of(x) for x in inputs]
        noting = self._noting_buffers() if again else nullcontext()
        dropping = _dropping() if drops else nullcontext()
        with torch.set_grad_enabled(keeps), noting, dropping, keeping:
            value, stashed = self._run(arguments)
        if versions != [version_of(x) for x in inputs]:
            msg = (
                f"stage {self.index} changes its input in place, so its forward cannot be "
                'recomputed: make its first layer return a new tensor, or use recompute="never"'
            )
            raise ConfigError(msg)
        if keeps and not drops:
            self._passes[microbatch] = self._pass_of(arguments, value, stashed)
        if drops:  # only the inputs are kept
            self._passes[microbatch] = _Pass(arguments, {}, {})
            value, stashed = (map_tensors(x, _cut_off) for x in (value, stashed))
        return value, stashed

    def recompute(self, microbatch: int) -> Any:
        """Run the layers again, with the same random numbers, and save tensors for backward.

        Buffers, such as running means, keep their values from after the first forward.

        Returns:
            Output of the stage.
        """
        arguments = self._passes[microbatch].arguments
        assert arguments.generators is not None, "its forward has dropped what it saved"
        again = self._recomputing(arguments)
        with torch.enable_grad(), again, arguments.generators.again(), arguments.kept:
            value, stashed = self._run(arguments)
        self._passes[microbatch] = self._pass_of(arguments, value, stashed)
        return value

    def replace_outputs(self, microbatch: int, value: Any) -> None:
        """Replace the outputs of a micro-batch by other tensors, such as a loss."""
        forward_pass = self._passes[microbatch]
        self._passes[microbatch] = forward_pass._replace(outputs={None: _with_grad(value)})

    def backward(
        self, microbatch: int, grads: Mapping[Edge | None, Sequence[torch.Tensor]]
    ) -> dict[Edge | None, Gradients]:
        """Run the backward of a micro-batch, and return the gradients of its inputs.

        An unused input gets a gradient of zeros.

        Args:
            microbatch: Number of the micro-batch.
            grads: Gradients of the outputs that require one, in order, by skip connection; None for
                the outputs to the next stage.
        """
        arguments, inputs, by_edge = self._passes.pop(microbatch)
        if outputs := _flat(by_edge):
            torch.autograd.backward(outputs, [grad for edge in by_edge for grad in grads[edge]])
        if arguments.weights is not None:
            arguments.weights.add_gradients()
        return {
            edge: [torch.zeros_like(x) if x.grad is None else x.grad for x in some]
            for edge, some in inputs.items()
        }

    def backward_to_inputs(
        self, microbatch: int, grads: Mapping[Edge | None, Sequence[torch.Tensor]]
    ) -> dict[Edge | None, Gradients]:
        """Return the gradients of the inputs; `backward_to_weights` computes the weights'.

        For the arguments see `backward`.
        """
        _, inputs, outputs = self._passes.pop(microbatch)
        replaced = (p for params in self.replaced.values() for p in params.values())
        params = [p for p in (*self.parameters(), *replaced) if p.requires_grad]
        split = self._split[microbatch] = SplitBackward(_flat(outputs), _flat(inputs), params)
        input_grads = iter(split.to_inputs([grad for edge in outputs for grad in grads[edge]]))
        return {edge: list(islice(input_grads, len(some))) for edge, some in inputs.items()}

    def backward_to_weights(self, microbatch: int) -> None:
        """Add the gradients of the parameters for a micro-batch."""
        self._split.pop(microbatch).to_weights()

    def outputs(self, microbatch: int, edge: Edge | None = None) -> Gradients:
        """Return the outputs, or tensors stashed for `edge`, that require a gradient."""
        return self._passes[microbatch].outputs[edge]

    def clear(self) -> None:
        """Drop the state of all running forwards, after a failure."""
        self._passes.clear()
        self._split.clear()

    def _run(self, arguments: _ForwardArguments) -> tuple[Any, dict[Edge, Any]]:
        skips = dict(arguments.skips)
        value = arguments.value
        if self._changes_input:  # a copy, because backward and R still need the input
            value = map_tensors(value, torch.clone)

        def through_all(value: Any) -> Any:
            for layers in self._blocks():
                if self._every and torch.is_grad_enabled():
                    value = self._checkpointed(layers, value, arguments, skips)
                else:
                    value = _through(layers, value, arguments, self.replaced)
            return value

        with use_skips(skips):
            around = self._around
            value = through_all(value) if around is None else around(through_all, value)
        return value, {edge: skips[edge.key] for edge in self.stashes}

    def _checkpointed(
        self,
        layers: Sequence[Layer],
        value: Any,
        arguments: _ForwardArguments,
        skips: dict[SkipKey, Any],
    ) -> Any:
        def block(x: Any) -> Any:
            if _begins_in_place(layers):  # the input is needed again
                x = map_tensors(x, torch.clone)
            return _through(layers, x, arguments, self.replaced)

        @contextmanager
        def around(again: bool) -> Iterator[None]:
            with self._recomputing(arguments) if again else nullcontext(), use_skips(skips):
                yield

        return checkpoint(block, value, around=around, policy=self._policy)

    def _blocks(self) -> Iterator[tuple[Layer, ...]]:
        size = self._every or max(1, len(self.layers))
        for first in range(0, len(self.layers), size):
            yield self.layers[first : first + size]

    @contextmanager
    def _recomputing(self, arguments: _ForwardArguments) -> Iterator[None]:
        """Return a context with the buffers of the first forward; changes are discarded."""
        token = RECOMPUTING.set(True)
        values = {
            place: arguments.buffers[place]
            for place in self._changing
            if place in arguments.buffers
        }
        try:
            with _replaced(values):
                yield
        finally:
            RECOMPUTING.reset(token)

    def _pass_of(
        self, arguments: _ForwardArguments, value: Any, stashed: Mapping[Edge, Any]
    ) -> _Pass:
        inputs: dict[Edge | None, Gradients] = {None: _with_grad(arguments.value)}
        for edge in self.pops:
            inputs[edge] = _with_grad(arguments.skips[edge.key])
        outputs: dict[Edge | None, Gradients] = {None: _with_grad(value)}
        for edge in self.stashes:
            outputs[edge] = _with_grad(stashed[edge])
        return _Pass(arguments, inputs, outputs)

    def _copies_of_buffers(self) -> dict[tuple[nn.Module, str], torch.Tensor]:
        """Return copies of the buffers that forwards change; of all before the first forward."""
        known = set(self._changing) if self._has_noted else None
        return {
            (module, name): buffer.detach().clone()
            for module, name, buffer in self._buffers()
            if known is None or (module, name) in known
        }

    @contextmanager
    def _noting_buffers(self) -> Iterator[None]:
        """Return a context that records which buffers change.

        If any buffer of a module changes, all are recorded, because torch does not count changes of
        running means.
        """
        before = {(m, name): (b, version_of(b)) for m, name, b in self._buffers()}
        yield
        self._has_noted = True
        changed: set[nn.Module] = set()
        for module, name, buffer in self._buffers():
            known = before.get((module, name))
            if known is None or known[0] is not buffer or known[1] != version_of(buffer):
                changed.add(module)
        for module, name, _ in self._buffers():
            if module in changed and (module, name) not in self._changing:
                self._changing.append((module, name))

    def _buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        for layer in self.layers:
            for module in layer.module.modules():
                for name, buffer in own_buffers(module).items():
                    if buffer is not None:
                        yield module, name, buffer


def _begins_in_place(layers: Sequence[Layer]) -> bool:
    """Return whether a layer up to the first that creates a new tensor works in place."""
    for layer in layers:
        if any(getattr(module, "inplace", False) for module in layer.module.modules()):
            return True
        if not isinstance(layer.module, nn.Identity | nn.Dropout):
            return False
    return False


def _through(
    layers: Sequence[Layer], value: Any, arguments: _ForwardArguments, replaced: Mapping[str, Any]
) -> Any:
    """Run layers in sequence, each with separate random numbers."""
    usual = _call if arguments.weights is None else arguments.weights.call
    for layer in layers:
        try:
            params = replaced.get(layer.name)
            call = usual if params is None else partial(_call_with, params)
            around = _around(arguments.draws if layer.module.training else None)
            if isinstance(layer.module, GraphSegment):
                value = call(layer.module, value, around=around)
            else:
                with around(layer.name):
                    value = call(layer.module, value)
        except Exception as exc:
            raise StageError(f"{layer.name} ({type(layer.module).__name__})", exc) from exc
    return value


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _call_with(
    params: dict[str, torch.Tensor], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    return functional_call(module, params, args, kwargs, tie_weights=False)


def _around(draws: Draws | None) -> Callable[[str], AbstractContextManager[object]]:
    return (lambda _name: nullcontext()) if draws is None else draws.layer


@contextmanager
def _dropping() -> Iterator[None]:
    """Return a context in which autograd saves nothing."""
    token = CHECKPOINTING.set(True)
    try:
        with saved_tensors_hooks(lambda _x: None, _refuse):
            yield
    finally:
        CHECKPOINTING.reset(token)


def _refuse(_nothing: None) -> torch.Tensor:
    msg = (
        "the schedule runs backward before recompute, so saved tensors are missing: move "
        "recompute before backward"
    )
    raise InternalError(msg)


@contextmanager
def _replaced(values: Mapping[tuple[nn.Module, str], torch.Tensor]) -> Iterator[None]:
    """Return a context in which modules have copies of other buffers."""
    kept = {(module, name): own_buffers(module)[name] for module, name in values}
    for (module, name), value in values.items():
        own_buffers(module)[name] = value.clone()
    try:
        yield
    finally:
        for (module, name), buffer in kept.items():
            own_buffers(module)[name] = buffer


def _flat(by_edge: Mapping[Edge | None, Gradients]) -> Gradients:
    return [x for some in by_edge.values() for x in some]


def _with_grad(value: Any) -> Gradients:
    """Return the tensors of a value that require a gradient, without duplicates."""
    return list({id(x): x for x in tensors_in(value) if x.requires_grad}.values())


def _cut_off(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_(x.requires_grad)

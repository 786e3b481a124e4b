"""One stage: some layers, and what it keeps of each micro-batch between forward and backward.

A boundary between stages carries any containers of tensors. Inputs are cut off from the graph of
the previous stage; backward continues from their gradients there, on whichever rank it is. Skip
connections are further inputs and outputs, each with a stage of its own at the other end.

A forward that is to be recomputed saves nothing but its inputs: it runs with grad mode, so that it
is known which outputs need a gradient, and drops each tensor that autograd would save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from braid.comm.autograd import checkpoint
from braid.comm.autograd.nested import map_tensors, tensors_in
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
    """A module of the model, with its name there."""

    name: str
    module: nn.Module


class Edge(NamedTuple):
    """A skip connection between two stages.

    Attributes:
        key: Its name.
        number: Its number among those of the model, from 1.
        source: Stage that stashes.
        target: Stage that pops.
    """

    key: SkipKey
    number: int
    source: int
    target: int


class StageError(Exception):
    """An exception in a layer.

    Attributes:
        layer: Name and type of the layer.
        error: The exception.
    """

    def __init__(self, layer: str, error: Exception) -> None:
        super().__init__(layer)
        self.layer = layer
        self.error = error


class _Given(NamedTuple):
    """Everything that a forward depends on; generators and buffers for running it again."""

    weights: WeightVersion | None
    value: Any
    skips: Mapping[SkipKey, Any]
    draws: Draws | None
    generators: RngAndAutocast | None
    buffers: Mapping[tuple[nn.Module, str], torch.Tensor]


class _Pass(NamedTuple):
    """One forward that has no backward yet.

    Attributes:
        given: Its arguments, for recomputation.
        inputs: Tensors that get a gradient: of the value, then of each skip connection.
        outputs: Tensors whose gradient comes: of the value, then of each skip connection.
        num_inputs: Numbers of inputs, by edge; the first is of the value.
        num_outputs: Numbers of outputs, alike.
    """

    given: _Given
    inputs: Gradients
    outputs: Gradients
    num_inputs: dict[Edge | None, int]
    num_outputs: dict[Edge | None, int]


class Stage:
    """The layers of one stage.

    Args:
        index: Number of the stage.
        layers: Its layers, in order.
        edges: Skip connections of the model that begin or end here.
        every: Layers between two boundaries that are kept, if what is between them is recomputed
            in backward; 0 to keep everything.
        versions: Versions of the weights, for programs that name them.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[Layer],
        edges: Sequence[Edge] = (),
        *,
        every: int = 0,
        versions: WeightVersions | None = None,
    ) -> None:
        self.index = index
        self.layers = tuple(layers)
        self.stashes = tuple(edge for edge in edges if edge.source == index)
        self.pops = tuple(edge for edge in edges if edge.target == index)
        self._every = every
        self._versions = versions
        self._changes_input = _begins_in_place(self.layers)
        self._passes: dict[int, _Pass] = {}
        self._split: dict[int, SplitBackward] = {}  # whose weights are still to come
        self._changing: list[tuple[nn.Module, str]] = []  # buffers that a forward changes
        self._has_noted = False  # which these are

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the layers, each once."""
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
            keeps: Whether a backward follows.
            skips: Tensors that earlier stages have stashed for this one.
            draws: Random numbers of the micro-batch; those of torch's generators when None.
            drops: Whether nothing is saved, since `recompute` follows.
            version: Version of the weights; those that layers have when negative.

        Returns:
            Output of the stage, and what it has stashed for later ones.

        Raises:
            StageError: A layer raises an exception.
        """
        popped = {edge.key: map_tensors(x, _cut_off) for edge, x in (skips or {}).items()}
        value = map_tensors(value, _cut_off)
        generators = RngAndAutocast(generators_of(list(tensors_in(value)))) if drops else None
        weights = self._versions.use(version) if self._versions and version >= 0 else None
        given = _Given(weights, value, popped, draws, generators, {})
        again = drops or (keeps and self._every)
        if again:
            given = given._replace(buffers=self._copies_of_buffers())
        versions = [version_of(x) for x in tensors_in((given.value, popped))]
        noting = self._noting_buffers() if again else nullcontext()
        with torch.set_grad_enabled(keeps), noting, _dropping(drops=drops):
            value, stashed = self._run(given)
        if again and versions != [version_of(x) for x in tensors_in((given.value, popped))]:
            msg = (
                f"stage {self.index} changes its input in place, so it cannot be computed again: "
                'let its first layer make a new tensor, or use recompute="never"'
            )
            raise ConfigError(msg)
        if keeps and not drops:
            self._passes[microbatch] = self._pass_of(given, value, stashed)
        if drops:  # nothing but the inputs is kept
            self._passes[microbatch] = _Pass(given, [], [], {}, {})
            value, stashed = (map_tensors(x, _cut_off) for x in (value, stashed))
        return value, stashed

    def recompute(self, microbatch: int) -> Any:
        """Run the layers again, with the same random numbers, and save what backward needs.

        Buffers, such as running means, stay as the first forward left them.

        Returns:
            Output of the stage.
        """
        given = self._passes[microbatch].given
        assert given.generators is not None, "its forward has dropped what it saved"
        with torch.enable_grad(), self._recomputing(given), given.generators.again():
            value, stashed = self._run(given)
        self._passes[microbatch] = self._pass_of(given, value, stashed)
        return value

    def replace_outputs(self, microbatch: int, value: Any) -> None:
        """Let the backward of a micro-batch begin at other tensors, such as a loss."""
        own = self._passes[microbatch]
        outputs = _with_grad(value)
        self._passes[microbatch] = own._replace(outputs=outputs, num_outputs={None: len(outputs)})

    def backward(
        self, microbatch: int, grads: Mapping[Edge | None, Sequence[torch.Tensor]]
    ) -> dict[Edge | None, Gradients]:
        """Run the backward of a micro-batch, and return the gradients of its inputs.

        An input that the stage did not use has a gradient of zeros.

        Args:
            microbatch: Number of the micro-batch.
            grads: Gradients of the outputs that require one, in their order, by edge.
        """
        own = self._passes.pop(microbatch)
        if own.outputs:
            torch.autograd.backward(own.outputs, _in_order(own.num_outputs, grads))
        if own.given.weights is not None:
            own.given.weights.add_gradients()
        input_grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in own.inputs]
        return _by_edge(own.num_inputs, input_grads)

    def backward_to_inputs(
        self, microbatch: int, grads: Mapping[Edge | None, Sequence[torch.Tensor]]
    ) -> dict[Edge | None, Gradients]:
        """Return the gradients of a micro-batch's inputs; `backward_to_weights` does the rest."""
        own = self._passes.pop(microbatch)
        params = [p for p in self.parameters() if p.requires_grad]
        split = self._split[microbatch] = SplitBackward(own.outputs, own.inputs, params)
        return _by_edge(own.num_inputs, split.to_inputs(_in_order(own.num_outputs, grads)))

    def backward_to_weights(self, microbatch: int) -> None:
        """Add the gradients of the parameters for a micro-batch."""
        self._split.pop(microbatch).to_weights()

    def outputs(self, microbatch: int, edge: Edge | None = None) -> Gradients:
        """Return the outputs of a micro-batch that need a gradient, or what `edge` carries."""
        own = self._passes[microbatch]
        return _by_edge(own.num_outputs, own.outputs)[edge]

    def clear(self) -> None:
        """Forget all forwards, after a failure."""
        self._passes.clear()
        self._split.clear()

    def _run(self, given: _Given) -> tuple[Any, dict[Edge, Any]]:
        skips = dict(given.skips)
        value = given.value
        if self._changes_input:  # a copy, since backward begins at the input, and R needs it again
            value = map_tensors(value, torch.clone)
        with use_skips(skips):
            for layers in self._blocks():
                if self._every and torch.is_grad_enabled():
                    value = self._checkpointed(layers, value, given, skips)
                else:
                    value = _through(layers, value, given)
        return value, {edge: skips[edge.key] for edge in self.stashes}

    def _checkpointed(
        self, layers: Sequence[Layer], value: Any, given: _Given, skips: dict[SkipKey, Any]
    ) -> Any:
        def block(x: Any) -> Any:
            if _begins_in_place(layers):  # what the block is given is needed again
                x = map_tensors(x, torch.clone)
            return _through(layers, x, given)

        @contextmanager
        def around(again: bool) -> Iterator[None]:
            with self._recomputing(given) if again else nullcontext(), use_skips(skips):
                yield

        return checkpoint(block, value, around=around)

    def _blocks(self) -> Iterator[tuple[Layer, ...]]:
        layers = iter(self.layers)
        size = self._every or len(self.layers)
        while block := tuple(islice(layers, size)):
            yield block

    @contextmanager
    def _recomputing(self, given: _Given) -> Iterator[None]:
        """Let forwards see the buffers of the first time, and leave them as they are."""
        token = RECOMPUTING.set(True)
        values = {place: given.buffers[place] for place in self._changing if place in given.buffers}
        try:
            with _replaced(values):
                yield
        finally:
            RECOMPUTING.reset(token)

    def _pass_of(self, given: _Given, value: Any, stashed: Mapping[Edge, Any]) -> _Pass:
        inputs: dict[Edge | None, Gradients] = {None: _with_grad(given.value)}
        for edge in self.pops:
            inputs[edge] = _with_grad(given.skips[edge.key])
        outputs: dict[Edge | None, Gradients] = {None: _with_grad(value)}
        for edge in self.stashes:
            outputs[edge] = _with_grad(stashed[edge])
        return _Pass(
            given,
            [x for some in inputs.values() for x in some],
            [x for some in outputs.values() for x in some],
            {edge: len(some) for edge, some in inputs.items()},
            {edge: len(some) for edge, some in outputs.items()},
        )

    def _copies_of_buffers(self) -> dict[tuple[nn.Module, str], torch.Tensor]:
        """Return the buffers that forwards change, as they are; all of them before the first."""
        known = set(self._changing) if self._has_noted else None
        return {
            (module, name): buffer.detach().clone()
            for module, name, buffer in self._buffers()
            if known is None or (module, name) in known
        }

    @contextmanager
    def _noting_buffers(self) -> Iterator[None]:
        """Note the buffers that change inside of the context.

        All those of a module whose buffers change: torch does not count changes of running means.
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
    """Whether some layer up to the first that makes a tensor of its own works in place."""
    for layer in layers:
        if any(getattr(module, "inplace", False) for module in layer.module.modules()):
            return True
        if not isinstance(layer.module, nn.Identity | nn.Dropout):
            return False
    return False


def _through(layers: Sequence[Layer], value: Any, given: _Given) -> Any:
    """Run layers one after the other, each with random numbers of its own."""
    call = _call if given.weights is None else given.weights.call
    for layer in layers:
        try:
            around = _around(given.draws if layer.module.training else None)
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


def _around(draws: Draws | None) -> Callable[[str], AbstractContextManager[None]]:
    return (lambda _name: nullcontext()) if draws is None else draws.layer


@contextmanager
def _dropping(*, drops: bool) -> Iterator[None]:
    """Let autograd save nothing inside of the context, if `drops`."""
    if not drops:
        yield
        return
    token = CHECKPOINTING.set(True)
    try:
        with saved_tensors_hooks(lambda _x: None, _refuse):
            yield
    finally:
        CHECKPOINTING.reset(token)


def _refuse(_nothing: None) -> torch.Tensor:
    msg = "the backward of a forward whose saved tensors were dropped: recompute comes first"
    raise InternalError(msg)


@contextmanager
def _replaced(values: Mapping[tuple[nn.Module, str], torch.Tensor]) -> Iterator[None]:
    """Let modules have copies of other buffers inside of the context."""
    kept = {(module, name): own_buffers(module)[name] for module, name in values}
    for (module, name), value in values.items():
        own_buffers(module)[name] = value.clone()
    try:
        yield
    finally:
        for (module, name), buffer in kept.items():
            own_buffers(module)[name] = buffer


def _in_order(
    counts: Mapping[Edge | None, int], grads: Mapping[Edge | None, Sequence[torch.Tensor]]
) -> Gradients:
    return [grad for edge in counts for grad in grads[edge]]


def _by_edge(counts: Mapping[Edge | None, int], tensors: Gradients) -> dict[Edge | None, Gradients]:
    rest = iter(tensors)
    return {edge: list(islice(rest, count)) for edge, count in counts.items()}


def _with_grad(value: Any) -> Gradients:
    """Return the tensors of a value that need a gradient, each once."""
    return list({id(x): x for x in tensors_in(value) if x.requires_grad}.values())


def _cut_off(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_(x.requires_grad)

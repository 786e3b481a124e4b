"""Parts of a captured model as modules, which take and return the values that cross its cuts.

The first segment takes the batch: one tensor, or a tuple of the captured tensors. The last segment
returns the model's result. Between segments, a dictionary of values is passed on with the number of
rows. In a pipeline it holds the values that the next segment uses. A value goes directly from the
segment that computes it to the first segment that uses it, and from there to the next one, as a
skip connection past the segments between them.

    segment 0 ── x ──▶ segment 1 ── x ──▶ segment 2 ── x, mask ──▶ segment 3
        └──────────────── mask ──────────────▲

Parameters and buffers have their names in the model, also if the model uses them directly between
its modules: empty modules replace their owners. So the `state_dict` of a segment is a subset of
the model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import nn

from braid.comm.autograd import checkpoint
from braid.comm.autograd.nested import flatten, unflatten
from braid.errors import ConfigError
from braid.parallel.graph.captured import CapturedGraph, GraphNode, check_cuts
from braid.parallel.graph.parts import Owner, add_module, add_tensor, owner_at
from braid.parallel.graph.skips import Namespace, SkipKey, current_skips
from braid.parallel.graph.variables import Situation, resolved
from braid.runtime.torch_internals import (
    own_buffers,
    own_modules,
    own_parameters,
    transient_buffers,
)

__all__ = ["GraphNodes", "GraphSegment", "last_uses", "segments", "share_modules"]

Around = Callable[[str], AbstractContextManager[None]]


def segments(
    graph: CapturedGraph, num_parts: int, cuts: Sequence[int] | None = None
) -> list[GraphSegment]:
    """Split a captured model into a list of modules.

    Args:
        graph: The model.
        num_parts: Number of segments.
        cuts: Positions of the nodes at which segments begin; None to balance parameters.

    Raises:
        ConfigError: The model cannot be cut at these positions.
    """
    cuts = graph.cuts(num_parts) if cuts is None else list(cuts)
    check_cuts(graph, cuts)
    namespace = Namespace()
    return [GraphSegment(graph, cuts, index, namespace) for index in range(len(cuts))]


class GraphNodes(nn.Module):
    """Some nodes of a graph, with their modules and tensors under their names in the model.

    Args:
        graph: The model.
        positions: Positions of the nodes, ascending.
        results: Numbers of further values to read, such as results of the model.
    """

    def __init__(
        self, graph: CapturedGraph, positions: Sequence[int], results: Iterable[int] = ()
    ) -> None:
        super().__init__()
        # without the modules of other segments, which would be kept alive
        self._graph = dataclasses.replace(graph, nodes=(), modules={}, tensors={})
        labels = graph.labels()
        self._nodes = tuple(graph.nodes[position] for position in positions)
        self._labels = tuple(labels[position] for position in positions)
        self._whole: tuple[nn.Module, ...] = ()  # in a tuple, so it is not registered as a child
        for node in self._nodes:
            if node.kind == "module":
                add_module(self, str(node.target), graph.modules[str(node.target)])
        used = {value for node in self._nodes for value in node.inputs} | set(results)
        # neither parameters nor buffers, so not in `state_dict`
        self._tensors: dict[int, torch.Tensor] = {}
        for value in sorted(used & graph.tensors.keys()):
            if value in graph.names:
                name = graph.names[value]
                transient = name in graph.transient
                add_tensor(self, name, graph.tensors[value], is_transient=transient)
            else:
                self._tensors[value] = graph.tensors[value]
        self.training = graph.is_training

    @property
    def training(self) -> bool:
        """Whether the segment, or the module that shares its modules, is in training mode."""
        return self._whole[0].training if self._whole else self._is_training

    @training.setter
    def training(self, mode: bool) -> None:
        self._is_training = mode

    @property
    def unnamed(self) -> dict[int, torch.Tensor]:
        """Tensors of the model that are neither parameters nor buffers, by number of the value."""
        return self._tensors

    def tensor(self, value: int) -> torch.Tensor:
        """Return the current tensor of a value that is a parameter, buffer or constant."""
        if value in self._tensors:
            return self._tensors[value]
        *path, leaf = self._graph.names[value].split(".")
        owner = owner_at(self, path)
        tensor = own_parameters(owner).get(leaf, own_buffers(owner).get(leaf))
        assert tensor is not None
        return tensor

    def run(
        self,
        known: dict[int, torch.Tensor],
        now: Situation,
        dead: Sequence[Sequence[int]],
        *,
        first: int = 0,
        around: Around | None = None,
    ) -> None:
        """Run consecutive nodes.

        Args:
            known: Values by number; results are added, and values that no later node needs are
                removed.
            now: Current rows, mode and device, on which arguments of calls depend.
            dead: Values to remove after each node; its length is the number of nodes to run.
            first: Index of the first node.
            around: Function that returns the context in which a module of a given name runs.

        Raises:
            ConfigError: The model is in training mode but was captured in evaluation mode, or vice
                versa, and its calls depend on the mode.
        """
        self._check_mode()
        end = first + len(dead)
        triples = zip(self._nodes[first:end], self._labels[first:end], dead, strict=True)
        for modes, calls in groupby(triples, lambda triple: triple[0].modes):
            with modes.active():
                for node, label, numbers in calls:
                    self._run(node, known, now, label, around or (lambda _: nullcontext()))
                    for number in numbers:
                        known.pop(number, None)

    def _check_mode(self) -> None:
        if self._graph.other_mode and self.training != self._graph.is_training:
            modes = ["evaluation", "training"]
            msg = (
                f"the model was captured in {modes[self._graph.is_training]}, and in "
                f"{modes[self.training]} {self._graph.other_mode}: capture it again in that mode"
            )
            raise ConfigError(msg)

    def _run(
        self,
        node: GraphNode,
        known: dict[int, torch.Tensor],
        now: Situation,
        label: str,
        around: Around,
    ) -> None:
        inputs = [known[v] if v in known else self.tensor(v) for v in node.inputs]
        args, kwargs = unflatten(resolved(node.tree, now), inputs)
        if isinstance(node.target, str):
            module = owner_at(self, node.target.split("."))
            if node.is_checkpointed:
                result = checkpoint(module, *args, around=lambda again: around(label), **kwargs)  # noqa: ARG005
            else:
                with around(label):
                    result = module(*args, **kwargs)
        else:
            with around(label):
                result = node.target(*args, **kwargs)
        _, made = flatten(result)
        if len(made) != len(node.outputs):
            msg = (
                f"{node} at {node.where} returned {len(node.outputs)} tensors when it was "
                f"captured, but now {len(made)}: capture the model again"
            )
            raise ConfigError(msg)
        known.update(zip(node.outputs, made, strict=True))
        for old, new in node.writes:
            if old in known:
                known[new] = known[old]
            elif old in self._graph.names or old in self._tensors:
                known[new] = self.tensor(old)


class GraphSegment(GraphNodes):
    """Nodes of a graph between two cuts.

    Args:
        graph: The model.
        cuts: Positions of the nodes at which segments begin.
        index: Index of this segment.
        namespace: Namespace of the values that skip segments, for all segments of the model.
    """

    def __init__(
        self, graph: CapturedGraph, cuts: Sequence[int], index: int, namespace: Namespace
    ) -> None:
        begin, end = [*cuts, len(graph.nodes)][index : index + 2]
        is_last = end == len(graph.nodes)
        super().__init__(graph, range(begin, end), graph.results if is_last else ())
        self._index, self._is_last = index, is_last
        self._leaves = graph.crossing(end)
        hops = graph.hops(cuts)
        # A value with a hop past a neighbour is stashed here and popped by the segment that uses
        # it, so it does not travel through the stages between them.
        self._stashes = {
            _key(namespace, v, to): v for v, at, to in hops if at == index and to > index + 1
        }
        self._pops = {
            _key(namespace, v, to): v for v, at, to in hops if to == index and at < index - 1
        }
        self._neighbours = {v for v, at, to in hops if (at, to) == (index, index + 1)}
        self._dead = last_uses(
            self._nodes, {*self._leaves, *self._stashes.values(), *graph.results}
        )

    def stashable(self) -> Iterator[SkipKey]:
        """Yield the keys of values that go to segments after the next one."""
        yield from self._stashes

    def poppable(self) -> Iterator[SkipKey]:
        """Yield the keys of values that come from segments before the previous one."""
        yield from self._pops

    def forward(self, value: Any, *, around: Around | None = None) -> Any:
        """Run the nodes of the segment.

        Args:
            value: The batch, or the result of the previous segment.
            around: Function that returns the context in which a module of a given name runs.

        Raises:
            ConfigError: The batch has another number of tensors than the captured one; or see
                `run`.
        """
        if self._index:
            rows, known = value["rows"], dict(value["values"])
        else:
            known = dict(enumerate(self._inputs(value)))
            rows = known[self._graph.rows_of].shape[0]
        skips = current_skips()
        if skips is not None:
            known.update({value: skips[key] for key, value in self._pops.items()})
        devices = (x.device for x in known.values() if x.device.type != "cpu")
        now = Situation(rows, self.training, next(devices, torch.device("cpu")))
        self.run(known, now, self._dead, around=around)
        if self._is_last:
            results = [known[v] if v in known else self.tensor(v) for v in self._graph.results]
            return unflatten(resolved(self._graph.result_tree, now), results)
        leaves: Any = self._leaves
        if skips is not None:
            skips.update({key: known[value] for key, value in self._stashes.items()})
            leaves = self._neighbours
        return {"rows": rows, "values": {v: known[v] for v in sorted(leaves) if v in known}}

    def _inputs(self, value: Any) -> list[torch.Tensor]:
        _, inputs = flatten(value)
        if len(inputs) != self._graph.num_inputs:
            msg = (
                f"the model was captured with {self._graph.num_inputs} input tensors, got "
                f"{len(inputs)}: pass the same inputs as the example"
            )
            raise ConfigError(msg)
        return inputs


def last_uses(nodes: Sequence[GraphNode], kept: Iterable[int]) -> list[list[int]]:
    """Return, for each node, the values that no later node uses, except for `kept` values."""
    # From the end: the first use that is seen is the last one. Values are freed there, so a segment
    # keeps no more alive than the model's own local variables would.
    kept = set(kept)
    dead: list[list[int]] = []
    for node in reversed(nodes):
        used = {*node.inputs, *node.made, *(old for old, _ in node.writes)}
        dead.append(sorted(used - kept))
        kept |= used
    return dead[::-1]


def _key(namespace: Namespace, value: int, target: int) -> SkipKey:
    return SkipKey(namespace, f"value {value} for part {target}")


def share_modules(whole: nn.Module, segment: GraphSegment) -> None:
    """Add a segment's modules and tensors to the module `whole`, and share them with it.

    Args:
        whole: Module of all segments of a rank.
        segment: Segment; afterwards it uses the modules, parameters and buffers of `whole`.
    """
    # The same dicts, not copies: `whole.to(...)` and a replaced parameter then change the segment.
    _merge(whole, segment)
    for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        setattr(segment, name, getattr(whole, name))
    whole.training = segment.training
    segment._whole = (whole,)  # noqa: SLF001 - its continuation


def _merge(whole: nn.Module, part: nn.Module) -> None:
    for name, inner in own_modules(part).items():
        existing = own_modules(whole).get(name)
        if isinstance(existing, Owner) and isinstance(inner, Owner):
            _merge(existing, inner)
        elif existing is None or isinstance(existing, Owner):  # an empty Owner is replaced
            own_modules(whole)[name] = inner
    own_parameters(whole).update(own_parameters(part))
    own_buffers(whole).update(own_buffers(part))
    transient_buffers(whole).update(transient_buffers(part))

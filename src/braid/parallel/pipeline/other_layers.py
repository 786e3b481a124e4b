"""Layers of a pipeline's model that other ranks train, while a program still has the whole model.

Problem: every rank makes the whole model, and trains its stages only. The other layers keep their
first values, so a call of the whole model, or its `state_dict`, would mix trained and old values.

Idea: after the first step, modules of other stages refuse calls, and warn in `state_dict`. They are
released if the model becomes whole, or if another pipeline takes it.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from braid.comm.autograd.nested import tensors_in
from braid.errors import ConfigError
from braid.parallel.pipeline.stage import Layer

__all__ = ["OtherLayers", "warn_of_penalty"]

MARK = "braid_other_layers"
PENALTY = (
    "the loss uses all {} parameters of this rank beside the output, like a penalty on weights: "
    "parameters on other ranks of the pipeline are not in it. Use weight_decay of the optimizer, "
    "or add the gradient of the penalty to .grad on each rank after pipeline.step"
)


class OtherLayers:
    """Modules that other ranks train, which refuse to be used once their values are old.

    Args:
        parts: Layers of each stage.
        placement: Ranks that train each stage.
        rank: This rank.

    Attributes:
        are_old: Whether other ranks have trained them.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Layer]],
        placement: Sequence[Collection[int]],
        rank: int,
    ) -> None:
        self.are_old = self._has_warned = False
        self._handles: list[RemovableHandle] = []
        ranks: defaultdict[nn.Module, set[int]] = defaultdict(set)
        for part, of_stage in zip(parts, placement, strict=True):
            for module in chain.from_iterable(layer.module.modules() for layer in part):
                ranks[module].update(of_stage)
        for module, trainers in ranks.items():
            earlier = module.__dict__.pop(MARK, None)
            if earlier is not None:
                earlier.release()
            if rank in trainers or not any(True for _ in module.parameters(recurse=False)):
                continue
            refuse = partial(_refuse, self, min(trainers))
            self._handles.append(module.register_forward_pre_hook(refuse, prepend=True))
            every: Any = module  # torch's method has no types
            self._handles.append(every.register_state_dict_pre_hook(partial(_warn, self)))
            module.__dict__[MARK] = self

    def __deepcopy__(self, _memo: object) -> OtherLayers:
        """Return the object itself, since a copy of old layers is old as well."""
        return self

    def release(self) -> None:
        """Allow every use of the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def is_first_use(self) -> bool:
        """Return whether old values are about to be read for the first time."""
        before, self._has_warned = self._has_warned, self._has_warned or self.are_old
        return self._has_warned and not before


def _refuse(others: OtherLayers, rank: int, module: nn.Module, _args: object) -> None:
    if others.are_old:
        msg = (
            f"the layer {module} is trained by rank {rank} of the pipeline, and has old values on "
            "this rank: call evaluate or predict of the engine instead of the model, or make "
            "the model whole by make_whole() of HybridParallel"
        )
        raise ConfigError(msg)


def _warn(others: OtherLayers, _module: nn.Module, _prefix: str, keep_vars: bool) -> None:
    if not keep_vars and others.is_first_use():  # braid's own calls need the names only
        text = (
            "state_dict() of a model on pipeline stages has trained values only for the layers of "
            "this rank's stage, and old values for all others: call make_whole() of "
            "HybridParallel before it, or save a checkpoint by braid.save"
        )
        warnings.warn(text, UserWarning, stacklevel=4)


def warn_of_penalty(loss: torch.Tensor, output: Any, params: Iterable[nn.Parameter]) -> None:
    """Warn if a loss uses all parameters of this rank, since it cannot use those of other ranks.

    Args:
        loss: Loss of a micro-batch.
        output: Output of the last stage.
        params: Parameters of this rank.
    """
    trained = {param for param in params if param.requires_grad}
    ends = {x.grad_fn for x in tensors_in(output)}
    nodes, used, seen = [loss.grad_fn], set(), set(ends)
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        used.add(getattr(node, "variable", None))
        nodes += [following for following, _ in node.next_functions]
    if len(trained) > 1 and trained <= used:
        warnings.warn(PENALTY.format(len(trained)), UserWarning, stacklevel=2)

"""Layers of a pipeline's model that other ranks train, while a program still has the whole model.

Problem: every rank makes the whole model, and trains its stages only. The other layers keep their
first values, so a call of the whole model, or its `state_dict`, would mix trained and old values.

Idea: after the first step, layers of other stages warn of their old values, once, and name them in
their state dicts, which ranks that train these layers refuse. They no longer do if the model
becomes whole, or if another pipeline takes it.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from braid.errors import ConfigError
from braid.parallel.gradients.state_parts import has_own, warn_in_state_dict
from braid.parallel.pipeline.stage import Layer

__all__ = ["OtherLayers"]

OLD = (
    "{} of a model on pipeline stages uses old values of the layers that other ranks train, such "
    "as {!r}, unless the program has loaded newer ones: call evaluate() of the engine instead, "
    "make the model whole by make_whole() of HybridParallel, or save a checkpoint by braid.save"
)
MADE_BY = "braid_made_by"  # entry of a state dict's metadata, for old values
_OF_MODULES: WeakKeyDictionary[nn.Module, OtherLayers] = WeakKeyDictionary()


class OtherLayers:
    """Layers that other ranks train, which warn when their old values are used.

    Args:
        parts: Layers of each stage.
        placement: Ranks that train each stage.
        rank: This rank.

    Attributes:
        are_old: Whether other ranks have trained them.
        place: This rank in the pipeline, such as "pipeline rank 0 of 2".
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Layer]],
        placement: Sequence[Collection[int]],
        rank: int,
    ) -> None:
        self.are_old = self._has_warned = False
        size = len({rank for ranks in placement for rank in ranks})
        self.place = f"pipeline rank {rank} of {size}"
        self._handles: list[RemovableHandle] = []
        ranks: defaultdict[nn.Module, set[int]] = defaultdict(set)
        names: dict[nn.Module, str] = {}
        released: list[OtherLayers] = []
        for part, of_stage in zip(parts, placement, strict=True):
            for layer, module in chain.from_iterable(
                ((layer, module) for module in layer.module.modules()) for layer in part
            ):
                ranks[module].update(of_stage)
                names[module] = layer.name
        stale = ""
        for module, trainers in ranks.items():
            earlier = _OF_MODULES.pop(module, None)
            if earlier is not None:
                stale = stale or (names[module] if earlier.are_old and rank in trainers else "")
                released.append(earlier)
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            hooked: Any = module  # torch's methods have no types
            if rank in trainers:
                self._handles.append(hooked.register_load_state_dict_pre_hook(_refuse_old))
                continue
            name_old = partial(_name_old, self)
            self._handles.append(hooked.register_state_dict_post_hook(name_old))
            before = partial(_before_forward, self, names[module])
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            text = partial(_warning_in_state, self, names[module])
            self._handles.append(warn_in_state_dict(module, text))
            _OF_MODULES[module] = self
        if stale:
            warnings.warn(OLD.format("a second pipeline", stale), UserWarning, stacklevel=4)
        for earlier in released:
            earlier.release()

    def __deepcopy__(self, _memo: object) -> OtherLayers:
        """Return the object itself, since averages of old weights are old as well."""
        return self

    def release(self) -> None:
        """Allow every use of the layers, also of their copies."""
        self.are_old = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def warning(self, name: str, use: str) -> str:
        """Return a warning once if the layers have old values; else nothing."""
        is_first = self.are_old and not self._has_warned
        self._has_warned = self._has_warned or is_first
        return OLD.format(use, name) if is_first else ""


def _name_old(
    others: OtherLayers, module: nn.Module, _state: object, _prefix: str, metadata: dict[str, Any]
) -> None:
    if others.are_old and _is_trained(module):
        metadata[MADE_BY] = others.place


def _refuse_old(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: dict[str, Any], *_: object
) -> None:
    if (place := metadata.get(MADE_BY)) and has_own(module, state, prefix):
        msg = (
            f"this state dict has old values of {prefix.rstrip('.')}, since {place} made it, which "
            "does not train this layer: save and load a separate file on each rank, or save a "
            "checkpoint by braid.save, which any ranks can load"
        )
        raise ConfigError(msg)


def _before_forward(others: OtherLayers, name: str, module: nn.Module, _args: object) -> None:
    if _is_trained(module) and (text := others.warning(name, "a call")):
        warnings.warn(text, UserWarning, stacklevel=3)


def _warning_in_state(others: OtherLayers, name: str, module: nn.Module) -> str:
    return others.warning(name, "state_dict()") if _is_trained(module) else ""


def _is_trained(module: nn.Module) -> bool:
    return any(param.requires_grad for param in module.parameters(recurse=False))

"""Adaptation of models of transformers, which create masks and shift labels themselves.

Masks: transformers creates a mask if positions are not consecutive, as in a rank's two chunks. It
does not if it gets a mask of four dims. So it gets a marker with four dims, which a hook removes
before the modules that call attention. These then request causal attention by its name.

Losses: a causal language model shifts labels by one position and takes the mean. Both need the
whole sequence: labels are shifted before they are split, and the loss is the mean over all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from braid.comm import Group
from braid.comm.autograd import all_reduce
from braid.errors import ConfigError
from braid.parallel.context_parallel.loss import mean_over_sequence, shifted_labels

__all__ = ["Transformers", "is_transformers"]


def is_transformers(model: nn.Module) -> bool:
    """Return whether the class of a model is from transformers, or a subclass of one."""
    return any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)


class Transformers:
    """Adapter that makes masks and losses of a Hugging Face model work on sharded sequences.

    Args:
        model: The model.
        group: Ranks that share the sequences.

    Attributes:
        handles: Registered hooks.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model = model
        self._group = group
        self._marker = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._unmark, with_kwargs=True)
            for module in model.modules()
            if _is_leaf_of_modules(module)
        ]
        loss = getattr(model, "loss_function", None)
        self._shifts = loss is not None and "shift_labels" in inspect.signature(loss).parameters
        self._own_loss = model.__dict__.get("_loss_function")
        if self._shifts:
            cast("Any", model).loss_function = self._loss

    def remove(self) -> None:
        """Restore the model's loss function."""
        if not self._shifts:
            return
        if self._own_loss is None:
            self._model.__dict__.pop("_loss_function", None)
        else:
            cast("Any", self._model).loss_function = self._own_loss

    def prepare(self, values: MutableMapping[str, Any], length: int) -> None:
        """Replace the mask and the labels among a forward's arguments, before sequences are split.

        Args:
            values: Arguments by name.
            length: Length of the whole sequences.

        Raises:
            ConfigError: Some layers do not attend to all positions, the mask excludes positions, or
                the loss is not a causal model's.
        """
        _check_layers(self._model, length)
        mask = values.get("attention_mask")
        if mask is not None and not (mask.dim() == 2 and bool(mask.all())):
            msg = (
                f"an attention_mask of shape {list(mask.shape)} that leaves positions out is not "
                "supported: put padding behind the sequences, where causal attention does not use "
                "it, give it the label -100, and leave attention_mask out"
            )
            raise ConfigError(msg)
        if "attention_mask" in inspect.signature(self._model.forward).parameters:
            values["attention_mask"] = self._marker
        if values.get("labels") is None:
            return
        if not self._shifts:
            msg = (
                f"the loss of {type(self._model).__name__} is not supported: leave labels out, and "
                "compute it from the logits with mean_over_sequence"
            )
            raise ConfigError(msg)
        values["labels"] = shifted_labels(values["labels"])

    def _unmark(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Remove the marker from the arguments of a module."""
        marker = self._marker
        unmarked = tuple(None if x is marker else x for x in args)
        return unmarked, {name: None if x is marker else x for name, x in kwargs.items()}

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,  # noqa: ARG002 - transformers' signature
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        **_options: Any,
    ) -> torch.Tensor:
        """Return the mean loss over whole sequences; labels are shifted already."""
        losses = functional.cross_entropy(
            _classes_second(logits), labels, ignore_index=ignore_index, reduction="none"
        )
        if num_items_in_batch is None:
            return mean_over_sequence(self._group, losses, labels != ignore_index)
        return all_reduce(self._group, losses.sum()) / num_items_in_batch


def _check_layers(model: nn.Module, length: int) -> None:
    """Raise ConfigError for layers that attend to a window of positions, or mix positions."""
    config: Any = getattr(model, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) or getattr(
        config, "attention_chunk_size", None
    )
    is_short = window is None or length <= window
    if is_short:
        kinds -= {"sliding_attention", "chunked_attention"}
    others = sorted(kinds - {"full_attention"})
    if not others and (is_short or kinds):
        return
    layers = f"layers of {', '.join(others)}" if others else "attention"
    within = "" if is_short else f" within windows of {window} of {length} positions"
    msg = (
        f"{type(model).__name__} has {layers}{within}, which is not supported: use full or "
        "causal attention"
    )
    raise ConfigError(msg)


def _classes_second(logits: torch.Tensor) -> torch.Tensor:
    """Return logits in float32 at least, as (B, V, s)."""
    wide = logits.float() if logits.dtype in {torch.float16, torch.bfloat16} else logits
    return wide.movedim(-1, 1)


def _is_leaf_of_modules(module: nn.Module) -> bool:
    """Return whether all children of a module have no children, as in attention layers."""
    children = list(module.children())
    return bool(children) and all(next(child.children(), None) is None for child in children)

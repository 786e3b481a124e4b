"""`context_parallel`: runs a model on sharded sequences without changing its code.

    context_parallel(model, group)             # on all ranks, with the same model
    loss = model(input_ids=ids, labels=ids).loss     # the same whole batch on all ranks
    loss.backward()                            # then average gradients over the group

The inputs are split before the model's forward. During the forward, calls of torch's
scaled_dot_product_attention are computed over all ranks' positions. Results for each position, such
as logits, cover this rank's positions (`gather_sequence` joins them).

Attention is replaced by a torch function mode, which each module with children enters. So modules
that are recomputed in backward (torch.utils.checkpoint) use it as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from braid.comm import Group
from braid.errors import ConfigError, raise_all
from braid.parallel.context_parallel.heads import all_to_all_attention
from braid.parallel.context_parallel.ring import ring_attention
from braid.parallel.context_parallel.sequence import position_ids, split_sequence
from braid.parallel.context_parallel.transformers import Transformers, is_transformers
from braid.parallel.gradients.same_batches import SameBatches
from braid.runtime.torch_internals import forward_pre_hooks

__all__ = ["ContextParallel", "context_parallel"]

WAYS = {"ring": ring_attention, "all_to_all": all_to_all_attention}
# dim of positions of arguments, with the names that models of transformers use
INPUTS = dict.fromkeys(
    ("input_ids", "inputs_embeds", "token_type_ids", "labels", "position_ids"), 1
)


def context_parallel(
    model: nn.Module,
    group: Group,
    *,
    attention: str = "ring",
    inputs: Mapping[str, int] | None = None,
) -> ContextParallel:
    """Make a model run on sequences that are sharded over ranks, in place.

    Args:
        model: Model, equal on all ranks, with torch's scaled_dot_product_attention.
        group: Ranks that share the sequences; all call the model with the same whole batch.
        attention: Algorithm: ring or all_to_all.
        inputs: Sequence dim of each argument of the model's forward that has one, such as
            `{"tokens": 1}`; None for the names that models of Hugging Face use; `{}` for a layer
            with inputs that are sharded already. If a model uses positions in any other way, add an
            argument `position_ids` to its forward, which is filled in.

    Apart from attention, the model must compute each position independently: convolutions along a
    sequence and recurrences are not supported.

    Returns:
        A handle with a method `remove` that restores the model; also a context manager.

    Raises:
        ConfigError: The algorithm is unknown, forward has none of the arguments in `inputs`, or the
            model's sequences are sharded already.
            Later, in forward: a length that cannot be divided, a mask other than causal, dropout of
            attention, or a model that does not call torch's attention.

    Cost: attention and the loss of models of transformers send messages; some calls compare inputs.
    """
    problems = []
    if not isinstance(group, Group):
        kind = type(group).__name__  # type: ignore[unreachable]
        problems.append(
            f'group must be a braid.Group, such as braid.mesh("cp=2")["cp"], got {kind}'
        )
    if any(map(_is_divided, model.modules())):
        problems.append(
            f"sequences of {type(model).__name__} are sharded already: call remove() of the handle "
            "first"
        )
    if attention not in WAYS:
        problems.append(f"attention must be {' or '.join(WAYS)}, got {attention!r}")
    names = list(inspect.signature(model.forward).parameters)
    wanted = INPUTS if inputs is None else inputs
    unknown = [name for name in wanted if name not in names]
    is_layer = inputs is not None and not inputs
    has_none = not set(wanted) - {*unknown, "position_ids"} and not is_layer
    if has_none or (inputs is not None and unknown):
        problems.append(
            f"forward of {type(model).__name__} has no argument {', '.join(unknown)}: pass the dim "
            f"of positions of its arguments ({', '.join(names)}) as inputs, such as "
            "inputs={'tokens': 1}"
        )
    raise_all(problems)
    return ContextParallel(model, group, WAYS[attention], wanted)


def _is_divided(module: nn.Module) -> bool:
    hooks = forward_pre_hooks(module).values()
    return any(isinstance(getattr(hook, "__self__", None), ContextParallel) for hook in hooks)


class ContextParallel(AbstractContextManager["ContextParallel"]):
    """Handle of a model that runs on sharded sequences; `context_parallel` creates it.

    Args:
        model: The model.
        group: Ranks that share the sequences.
        attention: Function that computes attention over ranks.
        inputs: Sequence dim of arguments of the model's forward, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        attention: Callable[..., torch.Tensor],
        inputs: Mapping[str, int],
    ) -> None:
        self._group = group
        self._inputs = inputs
        self._signature = inspect.signature(model.forward)
        self._modes: list[_AttentionMode] = []
        self._attention = attention
        self._comparison = SameBatches()
        self._num_calls = 0
        self._adapter = Transformers(model, group) if is_transformers(model) else None
        # hooks in this order: a leave follows each enter, also after an exception
        self._handles = [
            hook
            for module in model.modules()
            if module is model or next(module.children(), None) is not None
            for hook in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]
        if inputs:
            self._handles.append(model.register_forward_pre_hook(self._split, with_kwargs=True))
            self._handles.append(model.register_forward_hook(self._check_calls))
        if self._adapter is not None:
            self._handles += self._adapter.handles

    def remove(self) -> None:
        """Undo the sharding of sequences: restore the forward of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._adapter is not None:
            self._adapter.remove()

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def _enter(self, _module: nn.Module, _args: object) -> None:
        if not self._modes:
            mode = _AttentionMode(self)
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._modes.append(mode)
        else:
            self._modes.append(self._modes[-1])

    def _leave(self, _module: nn.Module, _args: object, _output: object) -> None:
        if self._modes:
            mode = self._modes.pop()
            if not self._modes:
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _split(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Split the inputs, and pass this rank's positions to the model."""
        self._num_calls = 0
        bound = self._signature.bind(*args, **kwargs)
        values, size, rank = bound.arguments, self._group.size, self._group.rank
        present = {n: dim for n, dim in self._inputs.items() if values.get(n) is not None}
        if not set(present) - {"position_ids"}:
            msg = (
                f"{type(model).__name__} was called without a sequence to shard: pass one of "
                f"{', '.join(self._inputs)}"
            )
            raise ConfigError(msg)
        if self._comparison.is_due():
            inputs = [values[name] for name in present]
            self._comparison.require(self._group, "inputs", inputs)
        lengths = {name: values[name].shape[dim] for name, dim in present.items()}
        if len(set(lengths.values())) > 1:
            msg = (
                f"inputs have sequences of different lengths: {lengths}: pass inputs of one length"
            )
            raise ConfigError(msg)
        (length,) = set(lengths.values())
        if self._adapter is not None:
            self._adapter.prepare(values, length)
        for name, dim in present.items():
            if values.get(name) is not None:
                values[name] = split_sequence(size, rank, values[name], dim)
        if "position_ids" in self._signature.parameters and values.get("position_ids") is None:
            first = values[next(iter(present))]
            positions = position_ids(size, rank, length, device=first.device)
            values["position_ids"] = positions.unsqueeze(0)
        return bound.args, bound.kwargs

    def _check_calls(self, model: nn.Module, _args: object, _output: object) -> None:
        if not self._num_calls:
            msg = (
                f"{type(model).__name__} has not called torch's scaled_dot_product_attention, so "
                "attention did not cover other ranks: use attention that calls it "
                '(attn_implementation="sdpa" for models of transformers)'
            )
            raise ConfigError(msg)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Run a call of torch's scaled_dot_product_attention over all ranks' positions.

        Raises:
            ConfigError: The call has a mask other than causal, or dropout.
        """
        self._num_calls += 1
        problems = []
        if attn_mask is not None:
            problems.append(
                f"a mask of shape {list(attn_mask.shape)} is not supported, only causal "
                "attention (is_causal=True) and attention without a mask: leave the mask out"
            )
        if dropout_p:
            problems.append(
                f"dropout of attention is not supported, got {dropout_p}: set dropout_p to 0"
            )
        if key.shape[1] != query.shape[1] and not options.get("enable_gqa"):
            problems.append(
                f"{query.shape[1]} heads of queries and {key.shape[1]} of keys differ in number: "
                "pass enable_gqa=True"
            )
        raise_all(problems)
        scale = options.get("scale")
        return self._attention(self._group, query, key, value, causal=is_causal, scale=scale)


class _AttentionMode(TorchFunctionMode):
    """Function mode that replaces scaled_dot_product_attention only."""

    def __init__(self, owner: ContextParallel) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._owner.attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

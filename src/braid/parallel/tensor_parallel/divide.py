r"""`parallelize`: divide the layers of a model over the ranks of a group, in place.

    model = LlamaForCausalLM(config)                       # equal on all ranks
    braid.parallelize(model, group)                        # a family that is known needs no plan
    braid.parallelize(model, group, {r"\.up$": "column", r"\.down$": "row"})

    division = braid.parallelize(model, group, inputs=batch)  # any model, by its graph
    print(division.explain())

Every rank runs the whole model's forward on the same batch. Modules stay the same objects under the
same names, with a part of their parameters; the other parameters are whole and equal on all ranks,
and so are their gradients. A parameter that modules share has one slicing.

Without `inputs` the divided layers are replaced, and all other code of the model runs as it is.
With them the graph of the model is captured, and collectives are inserted where its values need
them: it needs no plan, drops the elements that one process drops, and can divide sequences and
losses.

Source: M. Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.gradients.exact_norm import clip_counted_
from braid.parallel.tensor_parallel.agreement import check_call
from braid.parallel.tensor_parallel.by_modules import divide_by_modules
from braid.parallel.tensor_parallel.insertion import (
    Division,
    InsertionOptions,
    Strategy,
    divide_by_graph,
    strategies_in,
)
from braid.parallel.tensor_parallel.resolve import LayerKind, resolve
from braid.parallel.tensor_parallel.slices import Slicing
from braid.parallel.tensor_parallel.whole import slicing_of
from braid.programs.layout import Layout

__all__ = ["clip_grad_norm_", "parallelize"]


def parallelize(
    model: nn.Module,
    group: Group,
    plan: Mapping[str, str | Layout | Strategy] | None = None,
    *,
    inputs: Any = None,
    sequence_parallel: bool = False,
    strict: bool = False,
    gather_outputs: bool = True,
) -> Division:
    """Divide the layers of a model over the ranks of a group, in place.

    Args:
        model: Model, equal on all ranks.
        group: Ranks that share it.
        plan: Regular expression of a module's name -> kind (see `plans`), layout of its weight, or
            with `inputs` the numbers of parts of its operator's inputs (see `Shard`); tried before
            the built-in plan of the model's family. `{}` for nothing of one's own.
        inputs: Example of the model's inputs, to divide it by its graph: a tensor, a tuple by
            position, or a mapping by name. Other lengths may follow. Forward then runs the graph:
            hooks of modules inside are not called.
        sequence_parallel: Whether values between divided layers are split along dim 1; needs
            `inputs`.
        strict: Whether an operation that no rule divides is an error, instead of a warning.
        gather_outputs: Whether outputs of the model are whole on each rank, such as logits; a loss
            always is.

    Returns:
        Kind of each module that was divided, by name; `explain()` shows what is sent.

    Raises:
        ConfigError: No plan is known, an expression fits no module, a size cannot be divided, or a
            shared parameter is divided in two ways. The message has all problems that can be known
            before anything is changed.
    """
    options = InsertionOptions(sequence_parallel, strict, gather_outputs)
    check_call(model, group, plan, inputs, options)
    if inputs is None:
        kinds = resolve(model, plan, group.size, by_graph=False)
        divide_by_modules(model, group, kinds)
        return Division(kinds)
    if strategies := strategies_in(model, plan):
        division = divide_by_graph(model, group, None, inputs, options, strategies)
        return Division(dict.fromkeys(strategies, "annotated"), division.rows)
    kinds = resolve(model, plan, group.size, by_graph=True)
    division = divide_by_graph(model, group, _slicings(model, kinds) or None, inputs, options)
    if kinds:
        return Division(kinds, division.rows)
    return Division(_kinds_by_graph(model, division.slicings), division.rows, division.whole)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, group: Group) -> torch.Tensor:
    """Scale gradients so that their 2-norm over all ranks is at most `max_norm`.

    Divided parameters count on all ranks, whole ones once.

    Returns:
        The norm before scaling, on all ranks.

    Cost: an all_reduce of 8 bytes.
    """
    grads = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    counted = ((grad, slicing_of(param) is not None or not group.rank) for param, grad in grads)
    return clip_counted_(counted, max_norm, [group])


def _slicings(model: nn.Module, kinds: Mapping[str, LayerKind]) -> dict[str, Slicing]:
    """Return how the parameters of planned modules are divided, by name."""
    slicings = {}
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        slicings[f"{name}.weight"] = kind.slicing(module)
        if kind.name in {"column", "head"} and getattr(module, "bias", None) is not None:
            slicings[f"{name}.bias"] = Slicing(0, kind.number)
    return slicings


def _kinds_by_graph(model: nn.Module, slicings: Mapping[str, Slicing]) -> dict[str, LayerKind]:
    """Return the kinds of modules whose weights the graph's pass has divided."""
    return {
        name: LayerKind.from_slicing(model.get_submodule(name), slicing)
        for name, _, attribute in (param.rpartition(".") for param in slicings)
        if attribute == "weight" and (slicing := slicings[f"{name}.weight"])
    }

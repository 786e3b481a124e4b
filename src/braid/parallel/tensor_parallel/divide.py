r"""`parallelize`: shards the layers of a model over the ranks of a group, in place.

    model = LlamaForCausalLM(config)                       # equal on all ranks
    braid.parallelize(model, group)                        # a known family needs no plan
    braid.parallelize(model, group, {r"\.up$": "column", r"\.down$": "row"})

    division = braid.parallelize(model, group, inputs=batch)  # any model, by its graph
    print(division.explain())

Every rank runs the whole model's forward on the same batch. Modules stay the same objects with the
same names, with a shard of some parameters; the other parameters and their gradients are whole and
equal on all ranks. A parameter that modules share has one slicing.

Shards of different models have matching shapes, and training them only gives bad results. So ranks
compare their arguments: parameters by name, shape and bits, plans, options and shapes of inputs.

Without `inputs` the sharded layers are replaced, and all other code of the model runs unchanged.
With `inputs` the graph of the model is captured, and collectives are inserted where its values need
them: this needs no plan, drops the same elements as one process, and can shard sequences and
losses.

Source: M. Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.errors import ConfigError, raise_all
from braid.parallel.gradients import ParamTable
from braid.parallel.gradients.exact_norm import clip_counted_
from braid.parallel.gradients.hashing import compare_values
from braid.parallel.gradients.state_parts import note_parts
from braid.parallel.tensor_parallel.by_modules import divide_by_modules
from braid.parallel.tensor_parallel.compared_calls import compare_calls
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
from braid.runtime.torch_internals import pytree

__all__ = ["clip_grad_norm_", "parallelize"]

SAME_START = (
    "give all ranks the same values before parallelize: call torch.manual_seed with one number "
    "before the model is made, or load one checkpoint"
)


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
    """Shard the layers of a model over the ranks of a group, in place.

    Args:
        model: Model, equal on all ranks.
        group: Ranks that share the model.
        plan: Regular expression of a module's name -> kind (see `plans`), layout of its weight, or,
            with `inputs`, numbers of parts of its operator's inputs (see `Shard`); these come
            before the built-in plan of the model's family. Pass `{}` to use only the built-in plan.
        inputs: Example of the model's inputs, to shard it by its graph: a tensor, a tuple by
            position, or a mapping by name. Later lengths may differ. Forward then runs the graph:
            hooks of inner modules are not called.
        sequence_parallel: Whether values between sharded layers are split along dim 1; needs
            `inputs`.
        strict: Whether an operation that no rule can shard raises an error, instead of a warning.
        gather_outputs: Whether outputs of the model, such as logits, are gathered on each rank;
            losses always are.

    Returns:
        Kind of each sharded module, by name; `explain()` shows its collectives.

    Raises:
        ConfigError: No plan is known, an expression matches no module, a size cannot be divided, or
            a shared parameter is sharded in two ways. The message has all problems that are known
            before anything is changed.
    """
    options = InsertionOptions(sequence_parallel, strict, gather_outputs)
    _check_call(model, group, plan, inputs, options)
    division = _divide(model, group, plan, inputs, options)
    if group.size > 1:
        note_parts(model)
        compare_calls(model, group)
    return division


def _divide(
    model: nn.Module,
    group: Group,
    plan: Mapping[str, str | Layout | Strategy] | None,
    inputs: Any,
    options: InsertionOptions,
) -> Division:
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

    Sharded parameters count on all ranks, all other parameters once.

    Returns:
        The norm before scaling, on all ranks.

    Cost: an all_reduce of 8 bytes.
    """
    grads = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    counted = ((grad, slicing_of(param) is not None or not group.rank) for param, grad in grads)
    return clip_counted_(counted, max_norm, [group])


def _slicings(model: nn.Module, kinds: Mapping[str, LayerKind]) -> dict[str, Slicing]:
    """Return the slicings of the parameters of planned modules, by name."""
    slicings = {}
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        slicings[f"{name}.weight"] = kind.slicing(module)
        if kind.name in {"column", "head"} and getattr(module, "bias", None) is not None:
            slicings[f"{name}.bias"] = Slicing(0, kind.number)
    return slicings


def _kinds_by_graph(model: nn.Module, slicings: Mapping[str, Slicing]) -> dict[str, LayerKind]:
    """Return the kinds of modules with weights that the graph's pass has sharded."""
    return {
        name: LayerKind.from_slicing(model.get_submodule(name), slicing)
        for name, _, attribute in (param.rpartition(".") for param in slicings)
        if attribute == "weight" and (slicing := slicings[f"{name}.weight"])
    }


def _check_call(model: Any, group: Any, plan: Any, inputs: Any, options: Any) -> None:
    """Raise unless all ranks request the same sharding of the same model; a collective.

    Raises:
        ConfigError: An argument has another type, or the model is sharded already.
        MismatchError: Models, plans, options or shapes of inputs differ between ranks; raised on
            every rank, with the differences.

    Cost: a pass over the parameters, and one all_gather of 8 bytes per parameter.
    """
    problems = []
    if not isinstance(model, nn.Module):
        problems.append(
            f"model must be a torch.nn.Module, got {type(model).__name__}: pass the module itself"
        )
    if not isinstance(group, Group):
        problems.append(
            f'group must be a braid.Group, such as braid.mesh("dp=2,tp=2")["tp"], got '
            f"{type(group).__name__}"
        )
    if plan is not None and not isinstance(plan, Mapping):
        problems.append(
            "plan must be a dict of regular expressions to kinds such as {'up$': 'column'}, got "
            f"{type(plan).__name__}"
        )
    if inputs is None and options != type(options)():
        problems.append(
            "sequence_parallel, strict and gather_outputs work only with inputs: pass a batch as "
            "inputs="
        )
    raise_all(problems)
    if any(slicing_of(param) is not None for param in model.parameters()):
        msg = "the model is already sharded: call undivide(model, group) first"
        raise ConfigError(msg)
    shapes = pytree.tree_map(_text, dict(inputs) if isinstance(inputs, Mapping) else inputs)
    table = ParamTable.of(model)
    table.compare(group, {"plan": plan, "inputs": shapes, "options": options})
    filled = [record for record in table if not record.param.is_meta]
    compare_values(group, filled, "when the model is divided", SAME_START)


def _text(leaf: object) -> object:
    """Return the part of an input that ranks compare."""
    if isinstance(leaf, torch.Tensor):
        return list(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__

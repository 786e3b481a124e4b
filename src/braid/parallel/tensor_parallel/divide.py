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

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.gradients.exact_norm import clip_counted_
from braid.parallel.tensor_parallel.agreement import check_call
from braid.parallel.tensor_parallel.embedding import VocabParallelEmbedding
from braid.parallel.tensor_parallel.insertion import (
    Division,
    InsertionOptions,
    Strategy,
    check_expressions,
    divide_by_graph,
    strategies_in,
)
from braid.parallel.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    slice_param,
)
from braid.parallel.tensor_parallel.plans import KINDS, check_heads, family_of
from braid.parallel.tensor_parallel.slices import Slicing
from braid.parallel.tensor_parallel.transposed import divide_transposed, is_transposed
from braid.parallel.tensor_parallel.whole import note_change, slicing_of
from braid.programs.layout import Layout

__all__ = ["clip_grad_norm_", "parallelize"]

SIZES = ("in_features", "out_features", "nf")  # of a layer, which change with it
MATRIX = 2  # dims
KIND = re.compile(rf"({'|'.join(KINDS)})|(column|slice):\d+")


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
    strategies = strategies_in(model, plan) if inputs is not None else {}
    if strategies:
        division = divide_by_graph(model, group, None, inputs, options, strategies)
        return Division(dict.fromkeys(strategies, "annotated"), division.rows)
    family = family_of(model)
    if plan is None and family is None:
        if inputs is not None:
            division = divide_by_graph(model, group, None, inputs, options)
            return Division(
                _kinds_by_graph(model, division.slicings), division.rows, division.whole
            )
        msg = (
            f"there is no built-in plan for {type(model).__name__}: pass inputs=, a batch, to find "
            r"one from its graph, or give one, such as {r'\.up$': 'column', r'\.down$': 'row'}"
        )
        raise ConfigError(msg)
    own = {
        expression: _kind_of_value(value, group.size) for expression, value in (plan or {}).items()
    }
    kinds = dict(_kinds_of(model, own, dict(family.plan) if family is not None else {}))
    if not kinds:
        msg = f"no layer of {type(model).__name__} fits the plan: name them in a plan of your own"
        raise ConfigError(msg)
    if family is not None:
        check_heads(model, family, group.size)
    _check(model, kinds, group.size, by_graph=inputs is not None)
    if inputs is not None:
        division = divide_by_graph(model, group, _slicings(model, kinds), inputs, options)
        return Division(kinds, division.rows)
    _check_pairs(kinds)
    columns = Counter(name.rpartition(".")[0] for name, kind in kinds.items() if kind == "column")
    for name, kind in kinds.items():
        shares = kind == "column" and columns[name.rpartition(".")[0]] > 1
        module = model.get_submodule(name)
        for attribute in ("__class__", *(a for a in SIZES if hasattr(module, a))):
            note_change(model, module, attribute)
        _divide(module, kind, name, group, shares_input=shares)
    if family is not None:
        _divide_counts(model, family.counts, kinds, group.size)
    return Division(kinds)


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


def _kinds_of(
    model: nn.Module, own: dict[str, str], known: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the modules that plans name, with their kinds."""
    unknown = sorted({kind for kind in own.values() if not KIND.fullmatch(kind)})
    names = [name for name, _ in model.named_modules()]
    problems = [f"{kind!r} is no kind: use {', '.join(KINDS)}, or column:N" for kind in unknown]
    problems += check_expressions(own, names)
    decided: set[str] = set()
    for name in names if not problems else ():
        for expression, kind in (*own.items(), *known.items()):
            if re.search(expression, name):
                decided.add(expression)
                if kind != "whole":
                    yield name, kind
                break
    if not problems:
        problems = [
            f"{expression!r} fits only modules for which an expression before it decides: put it "
            "in front"
            for expression in own
            if expression not in decided
        ]
    if problems:
        raise ConfigError("; ".join(problems))


def _check(model: nn.Module, kinds: Mapping[str, str], size: int, *, by_graph: bool) -> None:
    """Raise ConfigError with everything that cannot be divided, before anything is changed."""
    problems = []
    plans: dict[nn.Parameter, tuple[str, Slicing]] = {}
    for name, text in kinds.items():
        module = model.get_submodule(name)
        kind, number = _read(text)
        if not isinstance(getattr(module, "weight", None), nn.Parameter):
            problems.append(f"{name} ({type(module).__name__}) has no weight to divide")
            continue
        weight = cast("nn.Parameter", module.weight)
        dim = number if kind == "slice" else _dim_of(module, kind)
        if (problem := _unfit(module, kind, dim, weight, by_graph=by_graph)) is not None:
            problems.append(f"{name} {problem}")
            continue
        slicing = Slicing(dim, number if kind == "column" else 1)
        try:
            slicing.check(name, weight.shape[dim], size)
        except ConfigError as exc:
            problems.append(str(exc))
        other, known = plans.setdefault(weight, (name, slicing))
        if known != slicing:
            problems.append(f"{name} and {other} share a weight and divide it in two ways")
    problems += [
        f"{name} shares the weight of {plans[param][0]}, which is divided: name it in the plan, "
        "too, such as 'head' for a last layer that shares an embedding's rows"
        for name, module in (model.named_modules() if not by_graph else ())
        for param in module.parameters(recurse=False)
        if param in plans and name not in kinds
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def _unfit(
    module: nn.Module, kind: str, dim: int, weight: torch.Tensor, *, by_graph: bool
) -> str | None:
    """Return why a kind does not fit a module."""
    if dim >= weight.dim():
        return f"has a weight of {weight.dim()} dims, and dim {dim} was to be divided"
    if by_graph or kind == "slice":
        return None
    embedding, linear = isinstance(module, nn.Embedding), isinstance(module, nn.Linear)
    if embedding if kind == "vocab" else linear or is_transposed(module):
        return None
    fits = "vocab or slice:1" if embedding else "column, row or head" if linear else "whole"
    advice = "" if embedding or linear else ", or pass inputs=, a batch, to divide it by its graph"
    return f"({type(module).__name__}) cannot be divided as {kind!r}: use {fits}{advice}"


def _slicings(model: nn.Module, kinds: Mapping[str, str]) -> dict[str, Slicing]:
    """Return how the parameters of planned modules are divided, by name."""
    slicings = {}
    for name, text in kinds.items():
        module = model.get_submodule(name)
        kind, number = _read(text)
        dim = number if kind == "slice" else _dim_of(module, kind)
        blocks = number if kind == "column" else 1
        slicings[f"{name}.weight"] = Slicing(dim, blocks)
        if kind in {"column", "head"} and getattr(module, "bias", None) is not None:
            slicings[f"{name}.bias"] = Slicing(0, blocks)
    return slicings


def _kinds_by_graph(model: nn.Module, slicings: Mapping[str, Slicing]) -> dict[str, str]:
    """Return the kinds of modules whose weights were divided."""
    kinds = {}
    for param, slicing in slicings.items():
        name, _, attribute = param.rpartition(".")
        module = model.get_submodule(name)
        if attribute != "weight":
            continue
        if isinstance(module, nn.Embedding):
            kinds[name] = "vocab" if slicing.dim == 0 else f"slice:{slicing.dim}"
        else:
            kind = "column" if slicing.dim == _dim_of(module, "column") else "row"
            kinds[name] = f"{kind}:{slicing.blocks}" if slicing.blocks > 1 else kind
    return kinds


def _kind_of_value(value: str | Layout | Strategy, size: int) -> str:
    """Return the kind that a value of a plan means; a layout is that of a weight [out, in]."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Layout | tuple | list):
        msg = f"a plan has kinds ({', '.join(KINDS)}) or layouts by expression, got {value!r}"
        raise ConfigError(msg)
    if not isinstance(value, Layout):
        msg = f"{value} is an annotation of an operator, which needs inputs=: a batch to capture"
        raise ConfigError(msg)
    split = [dim for dim, axes in enumerate(value.dims) if axes]
    if len(split) != 1 or value.partial or len(value.dims) != MATRIX:
        msg = f"a layout of a weight splits one of its two dims, got {value}"
        raise ConfigError(msg)
    parts = math.prod(value.mesh.axes[axis] for axis in value.dims[split[0]])
    if parts != size:
        msg = f"the layout {value} of a weight has {parts} parts, and the group {size} ranks"
        raise ConfigError(msg)
    if split[0] == 1:
        return "row"
    blocks = value.blocks[0] if value.blocks else 1
    return f"column:{blocks}" if blocks > 1 else "column"


def _check_pairs(kinds: Mapping[str, str]) -> None:
    """Raise ConfigError if parts of outputs go to no layer that takes them."""
    columns = [name for name, kind in kinds.items() if kind.startswith("column")]
    if columns and "row" not in kinds.values():
        msg = (
            f"{', '.join(columns)} would hand on a part of the outputs, and no layer of the plan "
            "takes it: name a 'row' layer behind, or use 'head', which gathers"
        )
        raise ConfigError(msg)


def _dim_of(module: nn.Module, kind: str) -> int:
    """Return the dim of a weight that is divided."""
    by_outputs = kind in {"column", "head"}
    if is_transposed(module):  # [in, out]
        return 1 if by_outputs else 0
    return 0 if by_outputs or kind == "vocab" else 1


def _read(text: str) -> tuple[str, int]:
    """Return kind and number of an entry of a plan; the number is 1 if there is none."""
    kind, _, number = text.partition(":")
    return kind, int(number) if number else 1


def _divide(module: nn.Module, text: str, name: str, group: Group, *, shares_input: bool) -> None:
    kind, number = _read(text)
    if kind == "slice":
        slice_param(cast("nn.Parameter", module.weight), Slicing(number), group)
    elif is_transposed(module):
        divide_transposed(module, kind, number, group)
    elif kind == "vocab":
        VocabParallelEmbedding.shard(cast("nn.Embedding", module), group, name=name)
    elif kind == "row":
        RowParallelLinear.shard(cast("nn.Linear", module), group, name=name)
    else:
        ColumnParallelLinear.shard(
            cast("nn.Linear", module),
            group,
            gather_output=kind == "head",
            blocks=number,
            shares_input=shares_input,
            name=name,
        )


def _divide_counts(
    model: nn.Module, counts: Mapping[str, tuple[str, ...]], kinds: Mapping[str, str], size: int
) -> None:
    """Divide numbers of heads and widths in modules around divided layers."""
    for name, module in model.named_modules():
        for expression, names in counts.items():
            inside = any(divided.startswith(f"{name}.") for divided in kinds)
            if re.search(expression, name) and inside:
                for attribute in names:
                    if isinstance(value := getattr(module, attribute, None), int):
                        note_change(model, module, attribute)
                        setattr(module, attribute, value // size)

"""Sharding by modules: layers are replaced by sharded ones, in place; other code is unchanged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import cast

from torch import nn

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.tensor_parallel.embedding import VocabParallelEmbedding
from braid.parallel.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    slice_param,
)
from braid.parallel.tensor_parallel.plans import family_of
from braid.parallel.tensor_parallel.resolve import LayerKind
from braid.parallel.tensor_parallel.transposed import divide_transposed, is_transposed
from braid.parallel.tensor_parallel.whole import note_change

__all__ = ["divide_by_modules"]

SIZES = ("in_features", "out_features", "nf")  # sizes of a layer that change with its weight


def divide_by_modules(model: nn.Module, group: Group, kinds: Mapping[str, LayerKind]) -> None:
    """Shard the layers of a model; see `parallelize`.

    Args:
        model: Model, equal on all ranks.
        group: Ranks that share the model.
        kinds: Kind of sharding of each layer, by the layer's name.

    Raises:
        ConfigError: Sharded outputs reach no layer that accepts them.
    """
    names = [kind.name for kind in kinds.values()]
    if "column" in names and "row" not in names:
        columns = ", ".join(name for name, kind in kinds.items() if kind.name == "column")
        msg = (
            f"the outputs of {columns} stay sharded, but no 'row' layer of the plan consumes them: "
            "add one after it, or use 'head', which gathers"
        )
        raise ConfigError(msg)
    beside = Counter(
        name.rpartition(".")[0] for name, k in kinds.items() if k == LayerKind("column")
    )
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        for attribute in ("__class__", *(a for a in SIZES if hasattr(module, a))):
            note_change(model, module, attribute)
        shares = kind == LayerKind("column") and beside[name.rpartition(".")[0]] > 1
        _divide(module, kind, name, group, shares_input=shares)
    if (family := family_of(model)) is not None:
        _divide_counts(model, family.counts, kinds, group.size)


def _divide(
    module: nn.Module, kind: LayerKind, name: str, group: Group, *, shares_input: bool
) -> None:
    if kind.name == "slice":
        slice_param(cast("nn.Parameter", module.weight), kind.slicing(module), group)
    elif is_transposed(module):
        divide_transposed(module, kind.name, kind.number, group)
    elif kind.name == "vocab":
        VocabParallelEmbedding.shard(cast("nn.Embedding", module), group, name=name)
    elif kind.name == "row":
        RowParallelLinear.shard(cast("nn.Linear", module), group, name=name)
    else:
        ColumnParallelLinear.shard(
            cast("nn.Linear", module),
            group,
            gather_output=kind.name == "head",
            blocks=kind.number,
            shares_input=shares_input,
            name=name,
        )


def _divide_counts(
    model: nn.Module,
    counts: Mapping[str, tuple[str, ...]],
    kinds: Mapping[str, LayerKind],
    size: int,
) -> None:
    """Divide numbers of heads and widths in modules that contain sharded layers."""
    for name, module in model.named_modules():
        for expression, names in counts.items():
            inside = any(divided.startswith(f"{name}.") for divided in kinds)
            if re.search(expression, name) and inside:
                for attribute in names:
                    if isinstance(value := getattr(module, attribute, None), int):
                        note_change(model, module, attribute)
                        setattr(module, attribute, value // size)

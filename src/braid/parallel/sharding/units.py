"""Units: modules with parameters that are gathered together, and the parameters of each.

By default the elements of a model's outermost ModuleLists are units, such as the blocks of a
transformer. All other parameters belong to the root, which stays gathered from the first to the
last layer. A parameter that several units share belongs to the innermost unit around all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from braid.errors import ConfigError, raise_all
from braid.parallel.gradients import ParamRecord, ParamTable
from braid.types import first_few

__all__ = ["UnitSpec", "check_params", "check_shapes", "default_units", "divide_into_units"]

MARK = "braid_sharding"  # attribute of sharded modules


@dataclass(slots=True)
class UnitSpec:
    """Description of a unit: a module with parameters that are gathered together.

    Attributes:
        name: Name of the module in the model; empty for the root.
        module: The module.
        depth: Number of units that enclose it.
        records: Parameters of the unit, in the order of the model.
    """

    name: str
    module: nn.Module
    depth: int
    records: list[ParamRecord] = field(default_factory=list)


def default_units(model: nn.Module) -> list[nn.Module]:
    """Return the default units: all elements with parameters of the outermost ModuleLists."""
    units: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                units.update(dict.fromkeys(m for m in child if any(True for _ in m.parameters())))
            else:
                visit(child)

    visit(model)
    return list(units)


def divide_into_units(
    model: nn.Module, modules: Iterable[nn.Module], table: ParamTable
) -> list[UnitSpec]:
    """Assign each parameter to a unit.

    Args:
        model: The root unit.
        modules: Modules that are units, in addition to the root.
        table: Parameters to assign.

    Returns:
        The root, then the other units in the order of the model; units without parameters are
        omitted.

    Raises:
        ConfigError: A module is not part of the model.
    """
    wanted = {id(module): module for module in modules if module is not model}
    names = {id(module): name for name, module in model.named_modules()}
    strangers = [type(m).__name__ for key, m in wanted.items() if key not in names]
    if strangers:
        msg = (
            f"units {first_few(strangers)} are not modules of {type(model).__name__}: pass modules "
            "of the model, such as model.blocks"
        )
        raise ConfigError(msg)
    named = sorted((names[key], module) for key, module in wanted.items())
    order = {id(module): i for i, module in enumerate(model.modules())}
    named.sort(key=lambda pair: order[id(pair[1])])
    specs = {"": UnitSpec("", model, 0)}
    for name, module in named:
        specs[name] = UnitSpec(name, module, len(_around(name, specs)))
    for record in table:
        chains = [_around(name, specs) for name in record.names]
        common = [name for name in chains[0] if all(name in chain for chain in chains)]
        specs[common[-1]].records.append(record)
    return [spec for name, spec in specs.items() if spec.records or not name]


def _around(name: str, specs: dict[str, UnitSpec]) -> list[str]:
    """Return the units that enclose a module or parameter, outermost first."""
    parts = name.split(".")
    prefixes = [".".join(parts[:i]) for i in range(len(parts))]
    return [prefix for prefix in dict.fromkeys(prefixes) if prefix in specs]


def check_shapes(model: nn.Module) -> None:
    """Check that all parameters have a shape.

    Raises:
        ConfigError: Parameters of lazy modules have no shape.
    """
    kind = nn.parameter.UninitializedParameter
    lazy = [name for name, param in model.named_parameters() if isinstance(param, kind)]
    if lazy:
        msg = f"{first_few(lazy)} have no shape yet: run the model once before sharding"
        raise ConfigError(msg)


def check_params(model: nn.Module, table: ParamTable) -> None:
    """Check that parameters can be sharded over ranks.

    Raises:
        ConfigError: Some parameters cannot be sharded; the message has all problems.
    """
    problems = []
    marked = [name or type(model).__name__ for name, m in model.named_modules() if MARK in vars(m)]
    marked = marked or [name for name, param in model.named_parameters() if MARK in vars(param)]
    if marked:
        problems.append(
            f"{first_few(marked)} is already sharded: shard a model only once, at its root"
        )
    if not any(record.param.requires_grad for record in table):
        problems.append(
            f"none of the {len(table)} parameters requires a gradient: there is nothing to train, "
            "use the model as it is"
        )
    places: dict[str, list[str]] = {}
    for record in table:
        places.setdefault(str(record.param.device), []).append(record.name)
    if len(places) > 1:
        where = "; ".join(f"{first_few(names)} on {place}" for place, names in places.items())
        problems.append(
            f"parameters are on several devices ({where}): move the model to one device"
        )
    checks = (
        ("are not contiguous in memory: call .contiguous()", lambda p: not p.is_contiguous()),
        (
            "are on the device meta, without values: call to_empty() and set them",
            lambda p: p.is_meta,
        ),
        (
            "are not floating-point numbers: register them as buffers",
            lambda p: not (p.is_floating_point() or p.is_complex()),
        ),
    )
    for text, is_wrong in checks:
        names = [r.name for r in table if is_wrong(r.param)]
        if names:
            problems.append(f"{first_few(names)} {text}")
    sparse = [record.name for record in table if record.sparse]
    if sparse:
        problems.append(
            f"{first_few(sparse)} have sparse gradients: pass sparse=False to the embedding"
        )
    raise_all(problems)

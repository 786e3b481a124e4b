"""Conversion of a model to files: stages, a module of all stages, and a training program.

    stage0.py stage1.py ...      the stages, as `source` writes them
    fused.py                     all stages in sequence: the whole model
    train.py                     trains the stages on the ranks of a mesh
    data_parallel.json           meshes for it: replicas of the whole model,
    model_parallel.json              a stage on each rank,
    hybrid_parallel.json             and both
    README.md                    how to run each of them

The stages are run before they are written: their result must equal the model's, bit by bit.

Source: the runtime's configuration files of D. Narayanan et al., PipeDream, SOSP 2019.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.comm.autograd.nested import flatten, tensors_in
from braid.errors import ConfigError
from braid.parallel.graph.captured import CapturedGraph
from braid.parallel.graph.conversion_files import FUSED, README, TRAIN
from braid.parallel.graph.eager_capture import capture, kept_as_it_was
from braid.parallel.graph.source import stage_source

__all__ = ["Conversion", "Made", "convert", "load_model"]

NUM_REPLICAS = 2  # in the files; any number works


class Made(NamedTuple):
    """Model with example arguments, returned by a user's function, and the function's name.

    Attributes:
        model: The model.
        args: Positional arguments.
        kwargs: Keyword arguments.
        module: Name of the function's module.
        function: Name of the function.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str
    function: str


class Conversion(NamedTuple):
    """Result of a conversion: Python files of the stages of a captured model.

    Attributes:
        files: Text of each file, by name.
        cuts: Positions of the nodes at which stages begin.
        graph: The captured model.
    """

    files: Mapping[str, str]
    cuts: tuple[int, ...]
    graph: CapturedGraph


def load_model(target: str) -> Made:
    """Call a function that returns a model and example arguments.

    Args:
        target: The function, as `module:function`.

    Raises:
        ConfigError: The function does not exist, or does not return a model and arguments.
    """
    module, colon, name = target.partition(":")
    if not colon or not module or not name.isidentifier():
        msg = f"a model is given as module:function, such as models.gpt:make, got {target!r}"
        raise ConfigError(msg)
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as exc:
        msg = f"{target}: {exc}; put the module into this directory or a directory in PYTHONPATH"
        raise ConfigError(msg) from exc
    if not callable(function):
        msg = f"{target}: the module {module} has no function {name}"
        raise ConfigError(msg)
    made = function()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        msg = f"{target} must return a model and its example arguments, got {type(made).__name__}"
        raise ConfigError(msg)
    model, example = made
    if isinstance(example, Mapping):
        return Made(model, (), dict(example), module, name)
    args = tuple(example) if isinstance(example, tuple | list) else (example,)
    return Made(model, args, {}, module, name)


def convert(
    made: Made, num_stages: int, out: Path, *, schedule: str = "1f1b", num_microbatches: int = 4
) -> Conversion:
    """Convert a model to pipeline stages, written as Python files into a directory.

    Args:
        made: The model.
        num_stages: Number of stages.
        out: Directory; created if it does not exist.
        schedule: Schedule of pipelines in the configurations.
        num_microbatches: Micro-batches in the configurations.

    Returns:
        The written files, and the graph with its cuts.

    Raises:
        ConfigError: The model cannot be captured, cut or written, or a file exists.
    """
    graph = capture(made.model, *made.args, **made.kwargs)
    cuts = tuple(graph.cuts(num_stages))
    about = f"{made.module}:{made.function}"
    files = {
        f"stage{i}.py": stage_source(made.model, graph, cuts, i, about) for i in range(num_stages)
    }
    _check(made, graph, [_class_of(text, i) for i, text in enumerate(files.values())])
    files |= _programs(made, num_stages, out, about)
    configs = _configs(num_stages, schedule, num_microbatches)
    files |= {name: json.dumps(config, indent=2) + "\n" for name, config in configs.items()}
    files["README.md"] = _readme(made, files, configs, out, about)
    existing = [name for name in files if (out / name).exists()]
    if existing:
        msg = (
            f"{out} already contains {', '.join(existing)}: choose another directory, or remove "
            "them"
        )
        raise ConfigError(msg)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (out / name).write_text(text)
    return Conversion(files, cuts, graph)


def _programs(made: Made, num_stages: int, out: Path, about: str) -> dict[str, str]:
    source = inspect.getsourcefile(sys.modules[made.module]) or "."
    top = Path(source).resolve().parents[made.module.count(".")]
    values = {
        "about": about,
        "module": made.module,
        "function": made.function,
        "num_stages": num_stages,
        "out": out,
        "above": os.path.relpath(top, out.resolve()),
        "imports": "\n".join(f"from stage{i} import Stage{i}" for i in range(num_stages)),
        "stages": ", ".join(f"Stage{i}(model)" for i in range(num_stages)),
    }
    return {"fused.py": FUSED.format(**values), "train.py": TRAIN.format(**values)}


def _configs(num_stages: int, schedule: str, num_microbatches: int) -> dict[str, dict[str, Any]]:
    one_per_rank, all_in_one = [1] * num_stages, [num_stages]
    meshes = {
        "data_parallel.json": (1, NUM_REPLICAS, all_in_one),
        "model_parallel.json": (num_stages, 1, one_per_rank),
        "hybrid_parallel.json": (num_stages, NUM_REPLICAS, one_per_rank),
    }
    return {
        name: {
            "mesh": {"pp": pp, "dp": dp},
            "balance": balance,
            "schedule": schedule,
            "microbatches": num_microbatches,
            "steps": 3,
        }
        for name, (pp, dp, balance) in meshes.items()
    }


def _readme(
    made: Made,
    files: Mapping[str, str],
    configs: Mapping[str, Mapping[str, Any]],
    out: Path,
    about: str,
) -> str:
    stages = [name for name in files if name.startswith("stage")]
    table = [f"| `{name}` | `{Path(name).stem.title()}(model)` |" for name in stages]
    commands = [
        f"| `{name}` | `braid run -n {config['mesh']['pp'] * config['mesh']['dp']} "
        f"{out}/train.py {out}/{name}` |"
        for name, config in configs.items()
    ]
    return README.format(
        about=about,
        num_stages=len(stages),
        module=made.module,
        function=made.function,
        table="\n".join(table),
        commands="\n".join(commands),
    )


def _class_of(text: str, index: int) -> Callable[[nn.Module], nn.Module]:
    """Return the class that the source text of a stage defines."""
    module = ModuleType(f"stage{index}")
    exec(compile(text, f"stage{index}.py", "exec"), vars(module))  # noqa: S102 - written above
    kind: Callable[[nn.Module], nn.Module] = vars(module)[f"Stage{index}"]
    return kind


def _check(made: Made, graph: CapturedGraph, kinds: list[Callable[[nn.Module], nn.Module]]) -> None:
    """Raise ConfigError unless the stages and the model have bitwise equal results."""
    model = made.model
    _, batch = flatten((made.args, made.kwargs))
    modes = [graph.is_training] if graph.other_mode else [True, False]
    for is_training in modes:
        results = []
        for whole in (True, False):
            with kept_as_it_was(model, batch), torch.enable_grad():
                model.train(is_training)
                if whole:
                    value = model(*made.args, **made.kwargs)
                else:
                    value = tuple(batch) if len(batch) > 1 else batch[0]
                    for kind in kinds:
                        value = kind(model)(value)
                results.append(value)
        one, other = (list(tensors_in(result)) for result in results)
        if len(one) != len(other) or not all(map(_same, one, other)):
            msg = (
                f"the stages of {made.module}:{made.function} return another result than the "
                "model, so nothing was written: remove random numbers drawn outside of torch and "
                "state kept between calls"
            )
            raise ConfigError(msg)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.allclose(one, other, 0, 0, equal_nan=True)

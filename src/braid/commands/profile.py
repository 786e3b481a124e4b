"""`braid profile`: what each layer of a model costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from braid.commands import NO_DEFAULT, Threads
from braid.commands.typed import check_place

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from torch import nn

    from braid.plan.profiling import Profile

__all__ = ["profile"]

HEAT = ((0.66, "red"), (0.33, "yellow"), (0.0, "green"))  # share of the slowest layer's time
Text = Annotated[str, tyro.conf.arg(metavar="TEXT", help_behavior_hint=NO_DEFAULT)]


def profile(
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:FUNCTION")] = "",
    *,
    model: Text = "",
    context: int = 128,
    rows: tuple[int, ...] = (2, 8),
    seconds: float = 4.0,
    threads: Threads = 1,
    out: str = "profile.json",
    graph: Text = "",
) -> int:
    """Measure the layers of a model: time of forward and backward, bytes, operations.

    FUNCTION returns the model and its example arguments, whose dim 0 are the rows: a tuple, or a
    dict of keyword arguments. The model is captured, and cut wherever it can be.

    Args:
        target: Module and function; or a file and function, such as train.py:make.
        model: A GPT of `braid train` in its place, such as gpt2-tiny or gpt2-medium.
        context: Bytes of a sequence, with --model.
        rows: Rows of the micro-batches to measure with; two or more numbers.
        seconds: Seconds to measure for, after first rounds.
        threads: Threads to measure with, as a rank has them.
        out: File for the profile.
        graph: File for PipeDream's graph of the largest micro-batch.
    """
    from pathlib import Path

    import torch
    from rich.console import Console
    from rich.progress import Progress

    from braid.errors import ConfigError
    from braid.plan.pipedream import format_graph
    from braid.plan.profiling import profile_layers

    if bool(target) == bool(model):
        msg = "give a model: MODULE:FUNCTION, or --model NAME"
        raise ConfigError(msg)
    for file in filter(None, (out, graph)):
        check_place(file)
    name, named, sample = _gpt(model, context) if model else _captured(target)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    console = Console()
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"measuring {len(named)} layers", total=1.0)
            measured = profile_layers(
                named,
                sample,
                model=name,
                rows=rows,
                seconds=seconds,
                progress=lambda share: bar.update(task, completed=share),
            )
    finally:
        torch.set_num_threads(before)
    measured.write(out)
    console.print(_table(measured))
    print(f"{out}: the profile; plan with braid plan pipedream {out} --machines 2")
    if graph:
        Path(graph).write_text(format_graph(measured.as_graph(max(rows))))
        print(f"{graph}: PipeDream's graph of {max(rows)} rows")
    return 0


Made = tuple[str, "list[tuple[str, nn.Module]]", Callable[[int], Any]]


def _gpt(model: str, context: int) -> Made:
    """Return the layers of a GPT that `braid train` knows, and its samples."""
    import torch

    from braid.errors import ConfigError
    from braid.train.config import MODELS
    from braid.train.gpt import GPT

    key = model if model in MODELS else model.removeprefix("gpt2-")
    if key not in MODELS:
        known = ", ".join(("gpt2-tiny", "gpt2-mini", "gpt2-small", *list(MODELS)[4:]))
        msg = f"--model must be one of {known}, got {model!r}"
        raise ConfigError(msg)
    layers = GPT(MODELS[key], context, tied=False).layers()
    generator = torch.Generator().manual_seed(0)

    def sample(rows: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, context), generator=generator)

    return key, [(str(i), layer) for i, layer in enumerate(layers)], sample


def _captured(target: str) -> Made:
    """Return a captured model as layers, as many as it can be cut into, and its samples."""
    import sys
    from pathlib import Path

    from braid.autograd.nested import map_tensors
    from braid.graph import capture, segments
    from braid.graph.conversion import load_model

    file, colon, function = target.partition(":")
    if file.endswith(".py"):
        sys.path.insert(0, str(Path(file).resolve().parent))
        target = f"{Path(file).stem}:{function if colon else 'make'}"
    elif "" not in sys.path:
        sys.path.insert(0, "")  # modules of this directory, as for `python -m`
    made = load_model(target)
    graph = capture(made.model, *made.args, **made.kwargs)
    refused = graph.refused_cuts()
    modules = [i for i, node in enumerate(graph.nodes) if node.kind == "module"]
    cuts = [0, *(i for i in modules[1:] if i not in refused)]
    labels = graph.labels()
    parts = segments(graph, len(cuts), cuts)
    given = made.args if not made.kwargs else (*made.args, made.kwargs)
    batch = given[0] if len(given) == 1 else given

    def sample(rows: int) -> Any:
        return map_tensors(batch, lambda x: _of_rows(x, rows))

    return target, [(labels[i], part) for i, part in zip(cuts, parts, strict=True)], sample


def _of_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return rows of an example, repeated if there are too few."""
    if not x.dim():
        return x
    times = -(-rows // max(1, len(x)))
    return x.repeat(times, *(1,) * (x.dim() - 1))[:rows]


def _table(profile: Profile) -> Table:
    """Return the profile of the largest micro-batch; slow layers are red."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text as Styled

    rows = max(profile.rows)
    threads = f"{profile.threads} thread{'s' * (profile.threads > 1)}"
    title = f"{profile.model} on {profile.device}, {threads}, {rows} rows: ms and MB"
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("layer", "class"):
        table.add_column(name, no_wrap=True)
    for name in ("forward", "inputs", "weights", "keeps", "output", "params", "FLOP/B"):
        table.add_column(name, justify="right", no_wrap=True)
    times = [layer.forward_s.of(rows) + layer.backward_s(rows) for layer in profile.layers]
    slowest = max(times, default=0.0) or 1.0
    for layer, seconds in zip(profile.layers, times, strict=True):
        style = next(color for share, color in HEAT if seconds >= share * slowest)
        costs = (layer.forward_s, layer.input_grad_s, layer.weight_grad_s)
        sizes = (layer.saved_bytes.of(rows), layer.output_bytes.of(rows), layer.param_bytes)
        table.add_row(
            layer.name,
            layer.kind,
            *(Styled(f"{1e3 * cost.of(rows):.2f}", style) for cost in costs),
            *(f"{nbytes / 1e6:.2f}" for nbytes in sizes),
            f"{layer.intensity(rows):.0f}",
        )
    return table

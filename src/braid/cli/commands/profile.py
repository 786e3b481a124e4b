"""`braid profile`: what each layer of a model costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from braid.cli.commands import NO_DEFAULT, NumRanks, Threads
from braid.cli.commands.typed import check_place

if TYPE_CHECKING:
    from rich.table import Table

    from braid.plan.profiling import Profile
    from braid.train.profile_worker import ProfileRequest

__all__ = ["profile"]

Text = Annotated[str, tyro.conf.arg(metavar="TEXT", help_behavior_hint=NO_DEFAULT)]


def profile(
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:FUNCTION")] = "",
    *,
    n: NumRanks = None,
    servers: bool = False,
    model: Text = "",
    context: int = 128,
    rows: tuple[int, ...] = (2, 8),
    seconds: float = 4.0,
    threads: Threads = 1,
    out: str = "profile.json",
    graph: Text = "",
    picture: Text = "",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> int:
    """Measure the layers of a model: time of forward and backward, bytes, operations.

    FUNCTION returns the model and its example arguments, whose dim 0 are the rows: a tuple, or a
    dict of keyword arguments. The model is captured, and cut wherever it can be.

    Args:
        target: Module and function; or a file and function, such as train.py:make.
        n: Number of ranks of this host that measure at once, for `braid plan --profile`; also their
            messages, collectives and optimizer (default: this process alone).
        servers: Measure a parameter server, too, with as many servers as the N workers.
        model: A GPT of `braid train` in its place, such as gpt2-tiny or gpt2-medium.
        context: Bytes of a sequence, with --model.
        rows: Rows of the micro-batches to measure with; two or more numbers.
        seconds: Seconds to measure for, after first rounds.
        threads: Threads to measure with, as a rank has them.
        out: File for the profile.
        graph: File for PipeDream's graph of the largest micro-batch.
        picture: File for a picture of the layers, coloured by their time.
        device: Device of --model, as for `braid train`. A model of your own stays where FUNCTION
            puts it.
        dtype: Dtype of the matrix products of --model: fp32, or bf16 by autocast.
    """
    from pathlib import Path

    from rich.console import Console

    from braid.errors import ConfigError
    from braid.plan.pipedream import format_graph
    from braid.plan.profiling.picture import profile_picture
    from braid.train.device import choose_device
    from braid.train.profile_worker import ProfileRequest
    from braid.train.profiling import profile_together

    if bool(target) == bool(model):
        msg = "give a model: MODULE:FUNCTION, or --model NAME"
        raise ConfigError(msg)
    if n is not None and n < 1:
        msg = f"-n must be at least 1, got {n}"
        raise ConfigError(msg)
    if servers and (n is None or n < 2):
        msg = "--servers measures workers together: add -n 2, or another number"
        raise ConfigError(msg)
    if target and (device, dtype) != ("auto", "fp32"):
        msg = f"--device and --dtype are of --model: choose both where {target} makes its model"
        raise ConfigError(msg)
    choose_device(device)
    for file in filter(None, (out, graph, picture)):
        check_place(file)
    console = Console()
    request = ProfileRequest(
        target=target,
        model=model,
        context=context,
        rows=rows,
        seconds=seconds,
        device=device,
        dtype=dtype,
    )
    if n is None:
        measured = _alone(request, threads)
    else:
        with Console(stderr=True).status(f"measuring on {n} ranks at once"):
            measured = profile_together(request, n, threads=threads, servers=servers)
    measured.write(out)
    console.print(_table(measured))
    command = f"pipedream {out} --machines 2" if n is None else f"--profile {out} --batch 16"
    print(f"{out}: the profile; plan with braid plan {command}")
    if graph:
        Path(graph).write_text(format_graph(measured.as_graph(max(rows))))
        print(f"{graph}: PipeDream's graph of {max(rows)} rows")
    if picture:
        Path(picture).write_text(profile_picture(measured, max(rows)))
        print(f"{picture}: the layers, coloured by their time")
    return 0


def _alone(request: ProfileRequest, threads: int | None) -> Profile:
    """Return what this process measures by itself."""
    import torch
    from msgspec.structs import replace
    from rich.console import Console
    from rich.progress import Progress

    from braid.plan.profiling import profile_layers
    from braid.train.device import choose_device
    from braid.train.models import layers_of

    place = choose_device(request.device)
    layers = layers_of(
        request.target,
        request.model,
        request.context,
        device=place.device,
        dtype=request.dtype,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"measuring {len(layers.named)} layers", total=1.0)
            measured = profile_layers(
                layers.named,
                layers.sample,
                model=layers.model,
                rows=request.rows,
                seconds=request.seconds,
                progress=lambda share: bar.update(task, completed=share),
            )
    finally:
        torch.set_num_threads(before)
    context = request.context if request.model else 0
    return replace(measured, context=context, dtype=request.dtype)


def _table(profile: Profile) -> Table:
    """Return the profile of the largest micro-batch; slow layers are red."""
    from rich.text import Text as Styled

    from braid.plan.profiling.picture import HEAT
    from braid.runtime.terminal_table import new_table

    rows = max(profile.rows)
    threads = f"{profile.threads} thread{'s' * (profile.threads > 1)}"
    place = f"{profile.device} in {profile.dtype}, {threads}"
    title = f"{profile.model} on {place}, {rows} rows: ms and MB"
    figures = ("forward", "inputs", "weights", "keeps", "output", "params", "FLOP/B")
    table = new_table(title, ("layer", "class"), figures)
    table.padding, table.show_edge, table.pad_edge = (0, 1, 0, 0), False, False  # 80 columns
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

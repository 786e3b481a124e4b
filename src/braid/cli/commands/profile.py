"""`braid profile`: measure the costs of each layer of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import tyro

from braid.cli.commands.typed import check_place
from braid.train.profile_request import ProfileRequest

if TYPE_CHECKING:
    from rich.table import Table

    from braid.plan.profiling import Profile

__all__ = ["profile"]


def profile(request: Annotated[ProfileRequest, tyro.conf.arg(name="")]) -> int:
    """Measure the layers of a model: time of forward and backward, bytes, operations.

    FUNCTION returns the model and its example arguments: a tuple, or a dict of keyword arguments,
    with the rows of a batch in dim 0. The model is captured, and cut into as small layers as
    possible.

    Args:
        request: Model to measure, sizes and files.
    """
    from pathlib import Path

    from rich.console import Console

    from braid.plan.pipedream import format_graph
    from braid.plan.profiling.picture import profile_picture
    from braid.train.device import choose_device
    from braid.train.profiling import profile_together

    choose_device(request.device)
    for file in filter(None, (request.out, request.graph, request.picture)):
        check_place(file)
    if request.num_ranks is None:
        measured, follow_up = _alone(request), f"pipedream {request.out} --machines 2"
    else:
        with Console(stderr=True).status(f"measuring on {request.num_ranks} ranks"):
            measured = profile_together(request)
        follow_up = f"--profile {request.out} --batch 16"
    measured.write(request.out)
    Console().print(_table(measured))
    print(f"{request.out}: the profile; plan with braid plan {follow_up}")
    rows = max(request.rows)
    if request.graph:
        Path(request.graph).write_text(format_graph(measured.as_graph(rows)))
        print(f"{request.graph}: PipeDream's graph of {rows} rows")
    if request.picture:
        Path(request.picture).write_text(profile_picture(measured, rows))
        print(f"{request.picture}: the layers, coloured by their time")
    return 0


def _alone(request: ProfileRequest) -> Profile:
    """Measure the layers in this process, without other ranks."""
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
    torch.set_num_threads(request.threads or before)
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"measuring {len(layers.named)} layers", total=1.0)
            measured = profile_layers(
                layers.named,
                layers.sample,
                model=layers.model,
                loss=layers.loss,
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

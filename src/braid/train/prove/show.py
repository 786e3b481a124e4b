"""Printing of a proof."""

from __future__ import annotations

from rich.console import Console

from braid.runtime.terminal_table import new_table
from braid.train.prove.proving import Proof

__all__ = ["show"]

MAX_NAMES = 5


def show(proof: Proof, console: Console | None = None) -> None:
    """Print the losses of both runs by step, and the verdict."""
    console = console or Console()
    heads = ("step", f"loss on {proof.ranks} ranks", "in one process", "parameters")
    grid = new_table(None, heads, ())
    for step, (parallel, alone) in enumerate(proof.losses, 1):
        same = step != proof.step
        grid.add_row(str(step), parallel, alone, "the same bits" if same else "[red]differ[/red]")
    console.print(grid)
    if proof.gap is not None:
        console.print(f"[bold red]wrong shares[/bold red]  {proof.gap}", soft_wrap=True)
        console.print(
            "         the ranks and one process run the same shares, so their bits are equal: "
            "shares must be equally large (or set model.set_loss_weight(len(share)) before their "
            "forward), cover the batch once (x[rank::size], not x[rank:]), come from a batch that "
            "does not depend on size, and the loss must be their mean",
            soft_wrap=True,
            markup=False,
        )
    if not proof.is_split:
        console.print(
            "[bold yellow]not split[/bold yellow]  every share is the whole batch, so each of the "
            f"{proof.ranks} ranks does the work of one process and nothing is gained",
            soft_wrap=True,
        )
        console.print(
            "         loss(model, rank, size, step) must use rank and size: forward x[rank::size] "
            "and y[rank::size], not x and y",
            soft_wrap=True,
            markup=False,
        )
    if proof.difference is None:
        verdict = "proved" if proof.gap is None else "equal bits"
        console.print(
            f"[bold]{verdict}[/bold]  {proof.steps} steps on {proof.ranks} ranks: all "
            f"{proof.num_params:,} parameters ({proof.numel:,} numbers) have the bits of one "
            "process after every step",
            soft_wrap=True,
        )
        return
    console.print(
        f"[bold red]differs[/bold red]  after step {proof.step}: {proof.difference}", soft_wrap=True
    )
    if proof.others:
        more = len(proof.others) - MAX_NAMES
        names = ", ".join(proof.others[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
        console.print(f"         also {names}", soft_wrap=True)
    if proof.difference.ranks:
        console.print(
            "         the ranks' parameters differ from each other: the module that wrap() returns "
            "must average all gradients, and only the optimizer may change parameters, in the "
            "same way on all ranks",
            soft_wrap=True,
        )
        return
    console.print(
        "         a few ulps mean another order of additions (a hook, a format, hosts), millions "
        "mean a mistake: a share that differs between the runs, state that only one run has, or a "
        "parameter that is not averaged",
        soft_wrap=True,
    )

"""`braid chaos`: a run under faults."""

from __future__ import annotations

from typing import Annotated

import tyro

from braid.cli.commands.torchrun_options import separate_command, translated
from braid.errors import ConfigError
from braid.launch.chaos.driver import ChaosOptions
from braid.runtime.option_types import shown_as

__all__ = ["chaos"]


def chaos(
    command: Annotated[
        tuple[str, ...], tyro.conf.Positional, shown_as("run|train [OPTIONS ...] [SCRIPT ...]")
    ] = (),
    *,
    options: Annotated[ChaosOptions, tyro.conf.arg(name="")] = ChaosOptions(),  # noqa: B008 - frozen
) -> int:
    """Strike the ranks of a run with faults, and write a page on how the run survived.

    The run uses braid.elastic, or is a braid train, with --min-ranks. Then it runs again without
    faults, and the weights are compared. Exit code 1 means that the run failed, lost finished
    steps, has other weights than without faults, or reported a wrong cause or no cause, or that no
    fault struck, or that the second run failed.

    Args:
        command: Command line of the run, as after braid.
        options: Faults.
    """
    from rich.console import Console

    from braid.launch.chaos.driver import run_chaos
    from braid.launch.chaos.page import print_chaos, write_chaos_page

    name, *arguments = command or ("nothing",)
    if name not in {"run", "train"}:
        msg = (
            f"braid chaos tests the commands run and train, got {name}: use for example braid "
            "chaos run -n 3 --min-ranks 2 train.py"
        )
        raise ConfigError(msg)
    if name == "run":
        arguments = separate_command(translated(arguments))
    ended = run_chaos(options, arguments, name)
    try:
        page = str(write_chaos_page(ended))
    except OSError as exc:
        page = f"cannot be written to {ended.run.path}: {exc.strerror}; free some space"
    print_chaos(ended, Console(), page)
    return 1 if ended.problems else 0

"""`braid checkpoint ...`: list, verify and export checkpoints."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from braid.errors import ConfigError
from braid.runtime.last_words import print_error
from braid.runtime.option_types import Ranks, shown_as

__all__ = ["checkpoint_export", "checkpoint_ls", "checkpoint_reshard", "checkpoint_verify"]


def checkpoint_ls(
    directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
) -> int:
    """List the checkpoints of a run.

    Args:
        directory: Directory of the run, or of its checkpoints.
    """
    from pathlib import Path

    from braid.checkpoint import ls

    if not Path(directory).is_dir():
        msg = (
            f"{directory} is not a directory of a run or of its checkpoints: pass the directory "
            "of a run of braid train"
        )
        raise ConfigError(msg)
    inner = Path(directory) / "checkpoints"
    checkpoints = ls(inner if inner.is_dir() else directory)
    for line in checkpoints:
        size = f"{line.num_tensors:>5} tensors {line.nbytes:>15,} bytes  {line.world_size} ranks"
        print(f"step {line.step:>9}  {line.problem or size}  {line.path}")
    if not checkpoints:
        print(f"no checkpoints in {directory}", file=sys.stderr)
    return 0 if checkpoints else 1


def checkpoint_verify(
    paths: Annotated[tyro.conf.Positional[tuple[str, ...]], shown_as("PATH [PATH ...]")] = (),
) -> int:
    """Check every file of checkpoints against its sha256.

    Args:
        paths: Checkpoints, such as runs/2026-01-01_abc/checkpoints/step-00000200, or runs, to
            check all of their checkpoints.
    """
    from pathlib import Path

    from braid.checkpoint import ls, verify
    from braid.errors import CheckpointError

    if not paths:
        msg = "no checkpoints to verify: name directories such as step-00000200"
        raise ConfigError(msg)
    checkpoints: list[str] = []
    for path in paths:
        inner = Path(path) / "checkpoints"
        checkpoints += [line.path for line in ls(inner if inner.is_dir() else path)] or [path]
    bad = 0
    for path in checkpoints:
        try:
            manifest = verify(path)
        except CheckpointError as exc:
            bad += 1
            print(f"{path}: {exc}")
        else:
            print(f"{path}: ok, step {manifest.step}, {len(manifest.files)} files, sha256 ok")
    return 1 if bad else 0


def checkpoint_export(
    where: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    form: Annotated[str, tyro.conf.arg(metavar="FORM")] = "safetensors",
) -> int:
    """Write the model of a checkpoint for other programs.

    Args:
        where: Checkpoint; or directory of checkpoints, or run, to use the last one.
        out: File to write, such as model.safetensors, or directory for dcp; it must not exist.
        form: safetensors, torch (for torch.load), or dcp (torch's distributed checkpoint).
    """
    from braid.checkpoint import export_model
    from braid.errors import CheckpointError

    try:
        count = export_model(where, out, form)
    except CheckpointError as exc:
        print_error("nothing was written", str(exc))
        return 1
    print(f"{out}: {count} tensors")
    return 0


def checkpoint_reshard(
    where: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIRECTORY")],
    n: Ranks = 1,
) -> int:
    """Rewrite a checkpoint with the files that another number of ranks would write.

    Resuming does not require this: any number of ranks can load a checkpoint. Use it to change the
    size of the files.

    Args:
        where: Checkpoint; or directory of checkpoints, or run, to use the last one.
        out: Directory of checkpoints to write to.
        n: Number of files.
    """
    from braid.checkpoint import reshard
    from braid.errors import CheckpointError

    try:
        path = reshard(where, out, n)
    except CheckpointError as exc:
        print_error("nothing was written", str(exc))
        return 1
    print(f"{path}: {n} files")
    return 0

"""Writes the model of a checkpoint as one safetensors file, which other programs read.

A checkpoint has one file per rank, in which tensors are cut at rows. Other programs expect a file
with whole tensors under the model's own names: `safetensors.torch.load_file`, then
`model.load_state_dict`, or `from_pretrained` of Hugging Face with the model's `config.json` beside
the file as `model.safetensors`.

A checkpoint holds tied tensors once. The file has them under each of their names, which costs their
bytes again: torch's `load_state_dict` demands every name, and Hugging Face accepts them. It refuses
files without the entry `format`, in which libraries tell each other whose tensors they are.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import torch

from braid.checkpoint.directory import CheckpointDirectory
from braid.checkpoint.loading import Checkpoint, verify
from braid.checkpoint.tensor_file import write_tensor_file
from braid.checkpoint.training_state import TIED
from braid.errors import CheckpointError

__all__ = ["export_model"]

ROOT = "model/"
METADATA = {"format": "pt"}


def export_model(where: str | os.PathLike[str], out: str | os.PathLike[str]) -> int:
    """Write the model's parameters and buffers to one file, and return the number of their names.

    Args:
        where: A checkpoint, or a directory of checkpoints, of which the last one is taken.
        out: File to write, such as `model.safetensors`; it must not exist.

    Raises:
        CheckpointError: The checkpoint is damaged or has no model, or the file cannot be written;
            then no part of it is left.

    Cost: one pass over the checkpoint to verify it, one over the model; the model is in memory.
    """
    path, target = Path(where), Path(out)
    if not path.is_dir():
        msg = f"there is no checkpoint, and no directory of checkpoints, at {path}"
        raise CheckpointError(msg)
    steps = CheckpointDirectory(path).steps()
    if steps:
        path = CheckpointDirectory(path).locate(steps[-1])
    checkpoint = Checkpoint(path, verify(path))
    names = [name for name in checkpoint.names() if name.startswith(ROOT)]
    if not names:
        msg = f"{path} has no model, but {len(checkpoint.names())} other tensors"
        raise CheckpointError(msg)
    tensors = {name.removeprefix(ROOT): checkpoint.read(name) for name in names}
    for name, stored in _tied(checkpoint).items():
        if stored in tensors:
            tensors.setdefault(name, tensors[stored])
    part = target.with_name(f"{target.name}.part")
    try:
        if target.exists():
            raise FileExistsError(errno.EEXIST, "the file exists; choose another name")
        part.unlink(missing_ok=True)
        write_tensor_file(part, dict(sorted(tensors.items(), key=_wide_first)), METADATA)
        part.replace(target)
    except OSError as exc:
        msg = f"cannot write {target}: {exc.strerror}"
        raise CheckpointError(msg) from exc
    finally:
        part.unlink(missing_ok=True)
    return len(tensors)


def _tied(checkpoint: Checkpoint) -> dict[str, str]:
    try:
        return msgspec.convert(checkpoint.manifest.state.get(TIED, {}), dict[str, str])
    except msgspec.ValidationError as exc:
        msg = f"state.{TIED} of {checkpoint.path} must have a name for each name: {exc}"
        raise CheckpointError(msg) from exc


def _wide_first(item: tuple[str, torch.Tensor]) -> tuple[int, str]:
    """Order by element size, so that every value is aligned."""
    name, tensor = item
    return -tensor.element_size(), name

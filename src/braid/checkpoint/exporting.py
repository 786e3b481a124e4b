"""Writes the model of a checkpoint as one file for other programs.

A checkpoint has one file per rank, in which tensors are split by rows. Other programs expect a file
with whole tensors under the names in the model's `state_dict`: `safetensors.torch.load_file`, then
`model.load_state_dict`, or `from_pretrained` of Hugging Face with the model's `config.json` beside
the file as `model.safetensors`.

A checkpoint has tied tensors once. The file has a copy under each of their names, because torch's
`load_state_dict` requires every name, and Hugging Face accepts copies. Hugging Face refuses files
without the metadata entry `format`, which names the library of the tensors.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from braid.checkpoint.loading import Checkpoint, open_last
from braid.checkpoint.tensor_file import write_tensor_file
from braid.checkpoint.training_state import TIED
from braid.errors import CheckpointError, ConfigError

__all__ = ["FORMS", "export_model", "model_tensors"]

ROOT = "model/"
METADATA = {"format": "pt"}


def export_model(
    where: str | os.PathLike[str], out: str | os.PathLike[str], form: str = "safetensors"
) -> int:
    """Write the model's parameters and buffers; return the number of names written.

    Args:
        where: A checkpoint, a directory of checkpoints, or a run; the last checkpoint is used.
        out: File to write, such as `model.safetensors`, or directory for `dcp`; must not exist.
        form: `safetensors`, `torch` (a state dict, for `torch.load`) or `dcp` (torch's distributed
            checkpoint, with the model under `model`).

    Raises:
        CheckpointError: The checkpoint is damaged or has no model, or the file cannot be written;
            no part of the file remains.
        ConfigError: `form` is unknown.

    Cost: one pass over the checkpoint to verify it, one over the model; the model is in memory.
    """
    if form not in FORMS:
        msg = f"form {form!r} is unknown: choose one of {', '.join(FORMS)}"
        raise ConfigError(msg)
    target = Path(out)
    tensors = model_tensors(open_last(where))
    part = target.with_name(f"{target.name}.part")
    try:
        if target.exists():
            raise FileExistsError(errno.EEXIST, "the file exists; choose another name")
        _remove(part)
        FORMS[form](part, tensors)
        part.replace(target)
    except OSError as exc:
        msg = f"cannot write {target}: {exc.strerror}"
        raise CheckpointError(msg) from exc
    finally:
        _remove(part)
    return len(tensors)


def model_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the model's tensors by name, with tied tensors under each name.

    Raises:
        CheckpointError: The checkpoint has no model.
    """
    names = [name for name in checkpoint.names() if name.startswith(ROOT)]
    if not names:
        msg = (
            f"{checkpoint.path} contains no model, only {len(checkpoint.names())} other tensors: "
            "pass a checkpoint that braid.save wrote with a model"
        )
        raise CheckpointError(msg)
    tensors = {name.removeprefix(ROOT): checkpoint.read(name) for name in names}
    for name, stored in _tied(checkpoint).items():
        if stored in tensors:
            tensors.setdefault(name, tensors[stored])
    return tensors


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_tensor_file(path, dict(sorted(tensors.items(), key=_wide_first)), METADATA)


def _write_dcp(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - slow

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about saving from one process
        save({"model": tensors}, checkpoint_id=path, no_dist=True)


FORMS: dict[str, Callable[[Path, dict[str, torch.Tensor]], None]] = {
    "safetensors": _write_safetensors,
    "torch": lambda path, tensors: torch.save(tensors, path),
    "dcp": _write_dcp,
}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _tied(checkpoint: Checkpoint) -> dict[str, str]:
    try:
        return msgspec.convert(checkpoint.manifest.state.get(TIED, {}), dict[str, str])
    except msgspec.ValidationError as exc:
        msg = f"state.{TIED} of {checkpoint.path} must map names to names: {exc}"
        raise CheckpointError(msg) from exc


def _wide_first(item: tuple[str, torch.Tensor]) -> tuple[int, str]:
    """Return a sort key with large elements first, which aligns every value."""
    name, tensor = item
    return -tensor.element_size(), name

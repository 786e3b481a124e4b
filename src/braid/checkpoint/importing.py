"""Reads the tensors of a model from the formats of other programs.

model.load_state_dict(read_model("model.safetensors"))

.safetensors                     a file, or a directory of Hugging Face with an index or without
.pt .pth .bin                    torch.save of a state dict, also inside of a larger dict
a directory with .metadata       torch's distributed checkpoint
a directory with manifest.json   a checkpoint of braid, or a directory of them
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from braid.checkpoint.exporting import model_tensors
from braid.checkpoint.loading import open_last
from braid.errors import CheckpointError

__all__ = ["read_model"]

TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}
ROOTS = ("model", "state_dict", "model_state_dict", "module")  # of a model in a larger dict
INDEX = "model.safetensors.index.json"


def read_model(source: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by name, on the CPU, for `load_state_dict`.

    Nothing is executed: files of torch are read with `weights_only=True`. The description of a
    distributed checkpoint of torch is a pickle, so read only those whose writer you trust.

    Args:
        source: File or directory in one of the formats above.

    Raises:
        CheckpointError: It is in none of them, damaged, or has no model.
    """
    path = Path(source)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix in TORCH_SUFFIXES:
            return _model_in(path, torch.load(path, map_location="cpu", weights_only=True))
        if (path / ".metadata").is_file():
            return _distributed(path)
        if (path / INDEX).is_file():
            index = json.loads((path / INDEX).read_text())
            return _joined([path / name for name in sorted(set(index["weight_map"].values()))])
        if files := sorted(path.glob("*.safetensors")) if not _is_own(path) else []:
            return _joined(files)
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, KeyError) as exc:
        msg = f"cannot read the model in {path}: {type(exc).__name__}: {exc}"
        raise CheckpointError(msg) from exc
    if not path.is_dir():
        known = ", ".join(sorted({".safetensors", *TORCH_SUFFIXES}))
        msg = f"{path} is no model that is known here: give a file ({known}) or a directory"
        raise CheckpointError(msg)
    return model_tensors(open_last(path))


def _is_own(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def _joined(files: list[Path]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


def _distributed(path: Path) -> dict[str, torch.Tensor]:
    """Return the model of torch's distributed checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: PLC0415 - slow

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.pt"
        dcp_to_torch_save(path, file)
        return _model_in(path, torch.load(file, map_location="cpu", weights_only=True))


def _model_in(path: Path, stored: Any) -> dict[str, torch.Tensor]:
    """Return the state dict in what was stored."""
    for root in ROOTS:
        if isinstance(stored, Mapping) and isinstance(stored.get(root), Mapping):
            stored = stored[root]
            break
    if not isinstance(stored, Mapping):
        msg = f"{path} has no state dict, but {type(stored).__name__}"
        raise CheckpointError(msg)
    tensors = {str(name): value for name, value in stored.items()}
    others = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if others or not tensors:
        what = f"{', '.join(others[:5])} besides tensors" if others else "no tensors"
        msg = (
            f"{path} has {what}: give the state dict of a model, alone or under {', '.join(ROOTS)}"
        )
        raise CheckpointError(msg)
    return tensors

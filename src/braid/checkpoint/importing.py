"""Reads the tensors of a model from files of braid, safetensors, torch and Hugging Face.

model.load_state_dict(read_model("model.safetensors"))

.safetensors                     a file, or a Hugging Face directory with or without an index
.pt .pth .bin                    torch.save of a state dict, or of a dict that contains it
a directory with manifest.json   a checkpoint of braid, or a directory of checkpoints
format="dcp"                     a directory of torch's distributed checkpoint
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from braid.checkpoint.exporting import model_tensors
from braid.checkpoint.loading import open_last
from braid.checkpoint.manifest import MAX_MANIFEST_BYTES
from braid.checkpoint.torch_distributed import METADATA_NAME, regular_file, stored_tensors
from braid.errors import CheckpointError, ConfigError

__all__ = ["read_model"]

TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}
ROOTS = (
    "model",
    "state_dict",
    "model_state_dict",
    "module",
)  # keys of the model's state dict in a larger dict
INDEX = "model.safetensors.index.json"


def read_model(
    source: str | os.PathLike[str],
    *,
    format: Literal["auto", "dcp"] = "auto",  # noqa: A002 - the usual name
) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by name, on the CPU, for `load_state_dict`.

    No code from a file is executed: torch files are read with `weights_only=True`, and the metadata
    of a distributed checkpoint is unpickled with an allow list of classes.

    Args:
        source: File or directory in one of the formats above.
        format: `dcp` for a distributed checkpoint of torch; `auto` detects any other format.

    Raises:
        CheckpointError: The source has another format, is damaged, or has no model.
        ConfigError: `format` is unknown.
    """
    path = Path(source)
    if format not in {"auto", "dcp"}:
        msg = f"format {format!r} is unknown: choose auto or dcp"
        raise ConfigError(msg)
    try:
        tensors = _distributed(path) if format == "dcp" else _read(path)
    except CheckpointError:
        raise
    except Exception as exc:  # readers raise any exception for a damaged file
        msg = f"cannot read the model in {path}: {type(exc).__name__}: {exc}"
        raise CheckpointError(msg) from exc
    if tensors is not None:
        return tensors
    if not path.is_dir():
        known = ", ".join(sorted({".safetensors", *TORCH_SUFFIXES}))
        msg = f"{path} is not a model in a known format: give a file ({known}) or a directory"
        raise CheckpointError(msg)
    if (path / METADATA_NAME).exists() and not _is_own(path):
        msg = f"{path} is a distributed checkpoint of torch: pass format='dcp'"
        raise CheckpointError(msg)
    return model_tensors(open_last(path))


def _read(path: Path) -> dict[str, torch.Tensor] | None:
    """Return the model in a file or directory of another program; None for other formats."""
    if path.suffix == ".safetensors":
        return load_file(regular_file(path.parent, path.name))
    if path.suffix in TORCH_SUFFIXES:
        file = regular_file(path.parent, path.name)
        return _model_in(path, torch.load(file, map_location="cpu", weights_only=True))
    if not path.is_dir():
        return None
    if (path / INDEX).exists():
        return _joined(path, _indexed(regular_file(path, INDEX)))
    if not _is_own(path) and (files := sorted(path.glob("*.safetensors"))):
        return _joined(path, [file.name for file in files])
    return None


def _indexed(path: Path) -> list[str]:
    """Return the file names in a Hugging Face index."""
    with path.open("rb") as file:
        raw = file.read(MAX_MANIFEST_BYTES)
    return sorted(set(json.loads(raw)["weight_map"].values()))


def _is_own(path: Path) -> bool:
    return (path / "manifest.json").exists()


def _joined(directory: Path, names: list[str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors |= load_file(regular_file(directory, name))
    return tensors


def _distributed(path: Path) -> dict[str, torch.Tensor]:
    """Return the model of torch's distributed checkpoint."""
    stored: dict[str, Any] = {}
    for keys, read in stored_tensors(path):
        inner = stored
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = read
    model = _state_dict_in(stored).items()
    return _only_tensors(path, {name: read() if callable(read) else read for name, read in model})


def _model_in(path: Path, stored: Any) -> dict[str, torch.Tensor]:
    """Return the state dict in an object read from a file."""
    model = _state_dict_in(stored)
    if not isinstance(model, Mapping):
        msg = f"{path} contains {type(model).__name__}: save model.state_dict() instead"
        raise CheckpointError(msg)
    return _only_tensors(path, model)


def _state_dict_in(stored: Any) -> Any:
    """Return the state dict inside a larger dict; return any other object unchanged."""
    for root in ROOTS:
        if isinstance(stored, Mapping) and isinstance(stored.get(root), Mapping):
            return stored[root]
    return stored


def _only_tensors(path: Path, model: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    tensors = {str(name): value for name, value in model.items()}
    others = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if others or not tensors:
        what = f"{', '.join(others[:5])} besides tensors" if others else "no tensors"
        msg = (
            f"{path} has {what}: give the state dict of a model, alone or under {', '.join(ROOTS)}"
        )
        raise CheckpointError(msg)
    return tensors

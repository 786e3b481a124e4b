"""Checkpoints of safetensors files and a manifest: complete, or absent."""

from __future__ import annotations

from braid.checkpoint.background import BackgroundSaver, Saving
from braid.checkpoint.exporting import export_model
from braid.checkpoint.importing import read_model
from braid.checkpoint.inspection import CheckpointComparison, Listed, compare, ls
from braid.checkpoint.loading import (
    Checkpoint,
    PartedCheckpoint,
    Parts,
    Skipped,
    load,
    open_last,
    read_manifest,
    verify,
)
from braid.checkpoint.manifest import FileEntry, Manifest, Origin, Piece, TensorEntry
from braid.checkpoint.plain_values import from_plain, to_plain
from braid.checkpoint.resharding import reshard
from braid.checkpoint.saving import OnSaved, save, save_alone
from braid.checkpoint.snapshot import ReplicatedSnapshot, Slice, Snapshot
from braid.checkpoint.training_state import restore_training, training_numbers, training_tensors

__all__ = [
    "BackgroundSaver",
    "Checkpoint",
    "CheckpointComparison",
    "FileEntry",
    "Listed",
    "Manifest",
    "OnSaved",
    "Origin",
    "PartedCheckpoint",
    "Parts",
    "Piece",
    "ReplicatedSnapshot",
    "Saving",
    "Skipped",
    "Slice",
    "Snapshot",
    "TensorEntry",
    "compare",
    "export_model",
    "from_plain",
    "load",
    "ls",
    "open_last",
    "read_manifest",
    "read_model",
    "reshard",
    "restore_training",
    "save",
    "save_alone",
    "to_plain",
    "training_numbers",
    "training_tensors",
    "verify",
]

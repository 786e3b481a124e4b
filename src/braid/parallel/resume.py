"""Saving and loading the state of a training loop, with one call each.

    start = braid.load("checkpoints", model=model, optimizer=optimizer)
    for step in range(start, num_steps):
        ...
        if step % 100 == 99:
            braid.save("checkpoints", model=model, optimizer=optimizer, step=step)

A checkpoint contains parameters and buffers by name, the optimizer's state by parameter name, any
other object with `state_dict()` (a learning rate scheduler, a gradient scaler, a sampler), and the
states of the global random number generators of every rank. For engines with sharded state, use the
parts in `braid.checkpoint`.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from braid import checkpoint
from braid.checkpoint import (
    BackgroundSaver,
    Checkpoint,
    PartedCheckpoint,
    ReplicatedSnapshot,
    Snapshot,
    restore_training,
    training_numbers,
    training_tensors,
)
from braid.checkpoint.agreed_buffers import agreed_buffers
from braid.checkpoint.directory import CheckpointDirectory
from braid.checkpoint.part_states import (
    PARTS,
    ExtraStates,
    PartStates,
    check_parts,
    load_parts,
    naming,
)
from braid.checkpoint.snapshot import OWN, JoinedSnapshot
from braid.comm import Group
from braid.context import membership, world
from braid.errors import ConfigError, StaleError
from braid.parallel.expert_parallel import is_of_experts
from braid.parallel.hybrid import HybridParallel
from braid.parallel.pipeline import Pipeline
from braid.parallel.pipeline.asynchronous import AsynchronousPipeline
from braid.parallel.sharding import (
    ShardedSnapshot,
    has_pieces,
    restore_sharded,
    sharded_numbers,
    sharding_of,
)
from braid.parallel.tensor_parallel import slicing_of
from braid.runtime.rendezvous import ControlClient, Loaded, Saved

__all__ = ["load", "save"]

LOG = logging.getLogger(__name__)

RANDOM = "random"  # states of a rank's random number generators
INNER = ("module", "_orig_mod")  # attributes of data parallel wrappers, and of torch.compile


def save(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | HybridParallel,
    optimizer: torch.optim.Optimizer | None = None,
    step: int,
    group: Group | None = None,
    keep: int = 3,
    saver: BackgroundSaver | None = None,
    **parts: Any,
) -> Path:
    """Save a training after a step; all ranks call it.

    Either the whole checkpoint exists or none of it: a crash at any moment, or a full disk, leaves
    earlier checkpoints unchanged.

    Args:
        directory: Directory of the checkpoints, on a file system that all ranks see.
        model: Model, which may be wrapped or compiled, the same on all ranks; or one on a mesh.
        optimizer: Its optimizer.
        step: Number of the step that was done last.
        group: Ranks that train together; all ranks when None.
        keep: Number of checkpoints to keep, including this one.
        saver: A `BackgroundSaver(group)` that writes while training continues; the returned path
            then does not exist yet, and a failure is raised by the next save or `saver.wait()`.
        parts: Further objects with `state_dict()`, such as `scheduler=scheduler`. A state that
            differs between ranks, as of a data loader, is saved for each rank.

    Returns:
        Path of the checkpoint, `directory/step-00000200`.

    Raises:
        ConfigError: An object has no `state_dict()`, or its state cannot be stored.
        CheckpointError: Saving failed, with the same message on every rank.

    Cost: one pass over the bytes; each rank writes its share.
    """
    group = world() if group is None else group
    _refuse_parts_of(model, group)
    _check_parts(parts, "state_dict", model)
    states = PartStates(ExtraStates.beside(parts, _inner(model)), group)
    is_pipelined = isinstance(model, HybridParallel) and model.groups["pp"].size > 1
    if is_pipelined and states.has_different_extras:
        msg = (
            "extra states of modules (get_extra_state) differ between the ranks of a pipeline, "
            "which have old ones of the layers that other ranks train: keep them in buffers"
        )
        raise ConfigError(msg)
    others = states.tensors
    others |= {f"{OWN}{RANDOM}/{name}": state for name, state in _random_states().items()}

    def notify_launcher(saved_step: int, path: Path, sha256_ok: bool) -> None:
        control = _launcher()
        if control is not None and group.rank == 0:
            control.send(Saved(saved_step, str(path), sha256_ok))

    snapshot: Snapshot
    if isinstance(model, HybridParallel):
        snapshot, numbers = model.checkpoint(optimizer, others)
    elif (sharding := sharding_of(plain := _unwrapped(model))) is not None:
        replicated = ReplicatedSnapshot(others, rank=group.rank, size=group.size)
        snapshot = JoinedSnapshot([ShardedSnapshot(sharding, optimizer), replicated])
        numbers = sharded_numbers(sharding, optimizer)
    else:
        tensors = training_tensors(plain, optimizer) | others
        if not hasattr(optimizer, "is_own"):  # otherwise each rank writes its buffers
            buffers = agreed_buffers(plain, [group])
            tensors |= {f"model/{name}": buffer for name, buffer in buffers.items()}
        snapshot = ReplicatedSnapshot(tensors, rank=group.rank, size=group.size)
        numbers = training_numbers(plain, optimizer)
    state = {**numbers, PARTS: states.values}
    snapshot = states.failed or snapshot
    if saver is not None:
        saver.save(directory, snapshot, step=step, state=state, keep=keep, on_saved=notify_launcher)
        return CheckpointDirectory(directory).final(step)
    return checkpoint.save(
        directory,
        snapshot,
        step=step,
        group=group,
        state=state,
        keep=keep,
        on_saved=notify_launcher,
    )


def load(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | HybridParallel,
    optimizer: torch.optim.Optimizer | None = None,
    group: Group | None = None,
    **parts: Any,
) -> int:
    """Load the last complete checkpoint; return the number of the next step.

    All ranks call it. If the directory has no checkpoint, nothing is changed and training starts at
    step 0. With `braid run --resume PATH`, that checkpoint is loaded instead.

    Args:
        directory: Directory of the checkpoints, or one checkpoint.
        model: Model into which parameters and buffers are loaded.
        optimizer: Optimizer into which its state is loaded.
        group: Ranks that train together; all ranks when None.
        parts: Further objects with `load_state_dict()`, under the names with which they were saved.
            If ranks had different states, and another number of ranks loads them, all get the state
            of rank 0, with a warning.

    Returns:
        The step after the one that was saved; 0 if there is no checkpoint.

    Raises:
        CheckpointError: The checkpoint belongs to another model, optimizer or other parts, or no
            checkpoint is complete. Raised on all ranks, before anything is changed, unless an
            object of `parts` raises while it loads its state.
        ConfigError: An object has no `load_state_dict()`.
    """
    group = world() if group is None else group
    _refuse_parts_of(model, group)
    if isinstance(model, HybridParallel) and model.sharding is not None:
        msg = (
            "the model is on a mesh with shard=, so it is already sharded: load into the "
            "model and its optimizer first, then make HybridParallel of it, whose attach() "
            "shards the optimizer's states"
        )
        raise ConfigError(msg)
    _check_parts(parts, "load_state_dict", model)
    wanted = _asked_for()
    named = wanted not in {"", "auto"} or Path(directory).name.startswith("step-")
    where = Path(wanted if wanted not in {"", "auto"} else directory)
    if wanted == str(where) and (where / "checkpoints").is_dir():  # a run's directory
        where /= "checkpoints"
    if not named and not group.objects.broadcast(where.is_dir() and bool(checkpoint.ls(where))):
        LOG.info("%s has no checkpoint yet: starting a new training", where)
        return 0
    loaded = checkpoint.load(where, group=group)
    parts = ExtraStates.beside(parts, _inner(model))
    check_parts(loaded, parts)
    for skipped in loaded.skipped if group.rank == 0 else ():
        LOG.warning("braid: skipped the unusable checkpoint %s: %s", skipped.path, skipped.reason)
    LOG.info("training continues after step %d of %s", loaded.manifest.step, loaded.path)
    if isinstance(model, HybridParallel):
        restore_training(PartedCheckpoint(loaded, model), model.model, optimizer)
    elif (sharding := sharding_of(_unwrapped(model))) is not None:
        restore_sharded(loaded, sharding, optimizer)
    else:
        restore_training(loaded, _unwrapped(model), optimizer)
    load_parts(loaded, parts)
    with naming(loaded, RANDOM):
        _restore_random(loaded)
    control = _launcher()
    if control is not None and group.rank == 0:
        step, path = loaded.manifest.step, str(loaded.path)
        control.send(Loaded(step, path, wanted or "auto"))
    return loaded.manifest.step + 1


def _inner(model: nn.Module | HybridParallel) -> nn.Module:
    return model.model if isinstance(model, HybridParallel) else _unwrapped(model)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module without wrappers, so that checkpoints do not depend on wrapping."""
    while True:
        children = dict(model.named_children())
        inner = next((children[name] for name in INNER if list(children) == [name]), None)
        own_tensors = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
        if inner is None or own_tensors:
            return model
        model = inner


def _refuse_parts_of(model: nn.Module | HybridParallel, group: Group) -> None:
    """Raise if ranks hold different parts of a model, since a part would be saved as all."""
    if isinstance(model, HybridParallel):
        return  # it saves and loads its own parts
    if any(is_of_experts(p) for p in model.parameters()):
        msg = (
            "the model's experts are sharded over ranks, and only this rank's experts would be "
            "saved: train it as braid.parallel.hybrid.HybridParallel(model, 'ep=2', group), "
            "which can be saved"
        )
        raise ConfigError(msg)
    if any(slicing_of(param) is not None for param in model.parameters()):
        msg = (
            "the model is sharded over ranks, and only this rank's shard would be saved or "
            "loaded: train it as braid.parallel.hybrid.HybridParallel(model, 'tp=2', group), "
            "which can be saved, or call braid.parallel.tensor_parallel.undivide(model, group) "
            "before, and parallelize afterwards"
        )
        raise ConfigError(msg)
    if isinstance(model, AsynchronousPipeline) and group.size > 1:
        msg = (
            "an AsynchronousPipeline has different layers on each rank: save and load "
            "pipeline.state_dict() and pipeline.optimizer in a separate file on each rank"
        )
        raise ConfigError(msg)
    if isinstance(model, Pipeline) and group.size > 1:
        msg = (
            "a Pipeline has different layers on each rank: train it as "
            "braid.parallel.hybrid.HybridParallel(model, 'pp=2', group), which can be saved, or "
            "save and load pipeline.state_dict() in a separate file on each rank"
        )
        raise ConfigError(msg)


def _check_parts(parts: Mapping[str, Any], method: str, model: nn.Module | HybridParallel) -> None:
    without = [name for name, part in parts.items() if not callable(getattr(part, method, None))]
    if without:
        msg = (
            f"{', '.join(without)} have no {method}(): pass objects such as a scheduler, a scaler "
            "or a sampler"
        )
        raise ConfigError(msg)
    in_pieces = [n for n, part in parts.items() if _has_pieces(part, model)]
    if in_pieces:
        msg = (
            f"{', '.join(in_pieces)}: each rank has different shards, which only the same number "
            "of ranks could load: pass one optimizer with several parameter groups as optimizer=, "
            "and save another sharded model in a separate call"
        )
        raise ConfigError(msg)


def _has_pieces(part: Any, model: nn.Module | HybridParallel) -> bool:
    """Return whether the state of a part has different tensors on different ranks."""
    if isinstance(part, torch.optim.Optimizer):
        return isinstance(model, HybridParallel) or has_pieces(part)
    return isinstance(part, nn.Module) and sharding_of(part) is not None


def _launcher() -> ControlClient | None:
    """Return the connection to braid's launcher; None without it, or for a user-made group."""
    try:
        return membership().control
    except StaleError:
        return None


def _asked_for() -> str:
    """Return the argument of `braid run --resume`; empty without it."""
    try:
        return membership().environment.resume
    except StaleError:
        return ""


def _random_states() -> dict[str, torch.Tensor]:
    """Return the states of Python's, numpy's and torch's global generators."""
    version, python, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "python": torch.tensor([version, *python], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), int(position), int(has_gauss)], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random(loaded: Checkpoint) -> None:
    """Restore this rank's generators; do nothing if another number of ranks saved them."""
    names = loaded.names()
    states: dict[str, torch.Tensor] = {
        name: loaded.read(f"{RANDOM}/{name}") for name in _kept(names)
    }
    if "torch" not in states:
        LOG.info(
            "%s was saved by another number of ranks, so the states of random generators are not "
            "restored",
            loaded.path,
        )
        return
    version, *python = states["python"].tolist()
    gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(python), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, np.uint32), position, has_gauss, states["numpy_gauss"].item())
    )
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _kept(names: Mapping[str, str]) -> Iterator[str]:
    for name in names:
        root, _, rest = name.partition("/")
        if root == RANDOM:
            yield rest

"""States of further objects of a training, such as schedulers, and extra states of modules.

Most objects have the same state on all ranks, and it is stored once:

    state: {"parts": {"scheduler": {"dict": {"last_epoch": 3, ...}}}}
    parts/NAME/...                            its tensors

A data loader or a metric may have another state on each rank. Ranks compare the states, and then
each one writes its own:

    state: {"parts": {"loader": {"of_ranks": true}}}
    own/part_states/NAME                      JSON of a rank's state, as bytes
    own/parts/NAME/...                        its tensors
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from braid.checkpoint.loading import Checkpoint
from braid.checkpoint.plain_values import from_plain, to_plain
from braid.checkpoint.snapshot import OWN, FailedSnapshot
from braid.checkpoint.stored_state import unloadable
from braid.comm import Group
from braid.errors import BraidError, CheckpointError, ConfigError
from braid.runtime.tensor_buffers import bytes_of, checksum
from braid.types import first_few

__all__ = ["PARTS", "ExtraStates", "PartStates", "check_parts", "load_parts", "naming"]

PARTS = "parts"
EXTRA = "extra states"  # name of the modules' extra states, which no object of a program has
STATES = "part_states"
OF_RANKS = {"of_ranks": True}


class ExtraStates:
    """Extra states of a model's modules, which `get_extra_state` returns, as one object."""

    def __init__(self, model: nn.Module) -> None:
        self._by_name: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    @property
    def names(self) -> list[str]:
        """Names of the modules."""
        return list(self._by_name)

    def state_dict(self) -> dict[str, Any]:
        """Return the extra states by the names of their modules."""
        return {name: module.get_extra_state() for name, module in self._by_name.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the extra states."""
        if state.keys() != self._by_name.keys():
            msg = f"the modules with extra states were {sorted(state)}, not {sorted(self._by_name)}"
            raise ValueError(msg)
        for name, module in self._by_name.items():
            module.set_extra_state(state[name])

    @classmethod
    def beside(cls, parts: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        """Return the objects with the model's extra states, if it has any, as a further object."""
        extra = cls(model)
        return {**parts, EXTRA: extra} if extra.names else dict(parts)


class PartStates:
    """States of objects, to be saved; the constructor is a collective.

    Args:
        parts: Objects with `state_dict()`, by name.
        group: The ranks.

    Attributes:
        values: Values for the manifest's `state`.
        tensors: Tensors of the states; names that begin with `own/` differ between ranks.
        failed: Snapshot that raises this rank's error; None without an error.

    Raises:
        ConfigError: Ranks have objects of different names, or no rank can store its states.
    """

    def __init__(self, parts: Mapping[str, Any], group: Group) -> None:
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.failed: FailedSnapshot | None = None
        error: Exception | None = None
        digests = dict.fromkeys(sorted(parts), 0)
        states: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
        try:
            for name, part in parts.items():
                tensors: dict[str, torch.Tensor] = {}
                states[name] = to_plain(part.state_dict(), f"{PARTS}/{name}", tensors), tensors
                digests[name] = _digest(*states[name])
        except Exception as exc:  # noqa: BLE001 - the other ranks wait in this save
            error = exc
        refuses = isinstance(error, BraidError)
        theirs = group.objects.all_gather((digests, error is not None, refuses))
        names = [", ".join(other) or "none" for other, _, _ in theirs]
        if len(set(names)) > 1:
            listed = "; ".join(f"{n} on rank {r}" for n, r in zip(names, group.ranks, strict=True))
            msg = f"ranks save different objects ({listed}): pass the same ones on each rank"
            raise ConfigError(msg)
        if error is not None and all(refused for _, _, refused in theirs):
            raise error
        self.failed = None if error is None else FailedSnapshot(error)
        if any(failed for _, failed, _ in theirs):  # one of the snapshots will raise
            return
        for name, (plain, tensors) in states.items():
            if all(other[name] == digests[name] for other, _, _ in theirs):
                self.values[name] = plain
                self.tensors |= tensors
                continue
            raw = bytearray(msgspec.json.encode(plain))
            self.values[name] = OF_RANKS
            self.tensors |= {OWN + full: tensor for full, tensor in tensors.items()}
            self.tensors[f"{OWN}{STATES}/{name}"] = torch.frombuffer(raw, dtype=torch.uint8)

    @property
    def has_different_extras(self) -> bool:
        """Whether extra states of modules differ between ranks."""
        return bool(self.values.get(EXTRA) == OF_RANKS)


def load_parts(loaded: Checkpoint, parts: Mapping[str, Any]) -> None:
    """Load the states of objects with `load_state_dict()`.

    If the ranks had different states, and another number of ranks loads them, all of these get the
    state of rank 0, with a warning.

    Raises:
        CheckpointError: The checkpoint has no state of an object, or the object raises an error.
    """
    kept = loaded.manifest.state.get(PARTS, {})
    for name, part in parts.items():
        source, plain = loaded, kept[name]
        with naming(loaded, f"{PARTS}.{name}"):
            if plain == OF_RANKS:
                if loaded.own_of is None:
                    source = Checkpoint(loaded.path, loaded.manifest, own_of=0)
                    text = (
                        f"{name} had different states on the ranks that saved {loaded.path}, and "
                        "another number of ranks loads it: all of them get the state of rank 0"
                    )
                    warnings.warn(text, UserWarning, stacklevel=3)
                raw = source.read(f"{STATES}/{name}")
                plain = msgspec.json.decode(bytes_of(raw))
            part.load_state_dict(from_plain(plain, source.read))


def check_parts(loaded: Checkpoint, parts: Mapping[str, Any]) -> None:
    """Check that a checkpoint has states of these objects.

    Raises:
        CheckpointError: It lacks one, or has extra states of modules and the model has none.
    """
    kept = loaded.manifest.state.get(PARTS, {})
    if not isinstance(kept, dict):
        raise unloadable(loaded.path, PARTS, f"Expected `object`, got {str(kept)[:80]}")
    if EXTRA in parts and EXTRA not in kept:
        names = first_few(parts[EXTRA].names)
        msg = (
            f"{loaded.path} has no extra states of modules, but {names} have get_extra_state(): "
            "load a model without it, or save the model again"
        )
        raise CheckpointError(msg)
    if missing := sorted(set(parts) - set(kept)):
        msg = (
            f"{loaded.path} has no state of {', '.join(missing)}, only of "
            f"{', '.join(sorted(kept)) or 'model and optimizer'}: load only objects that were "
            "saved"
        )
        raise CheckpointError(msg)
    if EXTRA in kept and EXTRA not in parts:
        msg = (
            f"{loaded.path} has extra states of modules (of get_extra_state), and this model has "
            "none: load the model that was saved"
        )
        raise CheckpointError(msg)


@contextlib.contextmanager
def naming(loaded: Checkpoint, field: str) -> Iterator[None]:
    """Turn any error during the loading of a field into a CheckpointError with its name."""
    try:
        yield
    except BraidError:
        raise
    except Exception as exc:
        raise unloadable(loaded.path, field, f"{type(exc).__name__}: {exc}") from exc


def _digest(plain: Any, tensors: Mapping[str, torch.Tensor]) -> int:
    digest = zlib.crc32(msgspec.json.encode(plain))
    for x in tensors.values():
        digest = zlib.crc32(f"{checksum(x)}{x.dtype}{list(x.shape)}".encode(), digest)
    return digest

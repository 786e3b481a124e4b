"""Broadcast of parameters, optimizer states and objects, and allgather of objects."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from braid.comm.tensors.plain_data import decode, encode
from braid.compat.horovod.common.exceptions import HorovodInternalError
from braid.compat.horovod.common.process_sets import ProcessSet, global_process_set
from braid.compat.horovod.torch.arguments import CallArguments, refused_on_all, root_of
from braid.compat.horovod.torch.differentiable import allgather, broadcast_
from braid.compat.horovod.torch.handles import synchronize
from braid.compat.horovod.torch.operations import broadcast_async_
from braid.errors import ConfigError, encodable
from braid.types import dtype_name, text_digest

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

PICKLE_SWITCH = "BRAID_HOROVOD_ALLOW_PICKLE"
Named = Mapping[str, Any] | Iterable[tuple[str, Any]]


def broadcast_parameters(
    params: Named, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copy the root's tensors to all ranks, in place.

    Args:
        params: A state dict, or named parameters; None values are skipped.
        root_rank: Global rank of the root.
        process_set: Ranks that take part.

    Raises:
        ConfigError: A value is not a tensor.
        HorovodInternalError: Names or shapes differ between ranks.
    """
    with refused_on_all("allgather", CallArguments(None, process_set)):
        named = _named(params)
        _is_root(root_rank, process_set)
    _compare([name for name, _ in named], process_set)
    handles = [
        broadcast_async_(tensor, root_rank, f"parameter.{name}", process_set)
        for name, tensor in named
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's optimizer state and options to all ranks, replacing theirs.

    As in Horovod, an optimizer without state first gets its initial state, and zero gradients.
    Parameters are not changed.

    Args:
        optimizer: Optimizer over the same parameters on all ranks.
        root_rank: Global rank of the root.
        model: Not needed.
        process_set: Ranks that take part.

    Raises:
        ConfigError: The optimizer is LBFGS, which does not keep its state by parameter.
    """
    del model
    with refused_on_all("broadcast", CallArguments("object.optimizer.size", process_set)):
        is_root = _is_root(root_rank, process_set)
        _check_optimizer(optimizer)
        if not optimizer.state:
            _make_state(optimizer)
    tensors: list[torch.Tensor] = []
    outline = _outline(optimizer.state_dict(), tensors) if is_root else None
    about = [(dtype_name(x.dtype), tuple(x.shape)) for x in tensors]
    outline, about = broadcast_object((outline, about), root_rank, "optimizer", process_set)
    if not is_root:
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in about]
    else:
        tensors = [tensor.cpu().contiguous() for tensor in tensors]
    for number, tensor in enumerate(tensors):
        broadcast_(tensor, root_rank, f"optimizer.{number}", process_set)
    if not is_root:
        optimizer.load_state_dict(_filled(outline, tensors))


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    allow_pickle: bool | None = None,
) -> Any:
    """Return the root's object on all ranks.

    None, numbers, text, bytes, lists, tuples, sets and dictionaries of these are sent as plain
    data. Other objects are pickled if that is allowed: everyone who can send to this job can then
    run code in it.

    Args:
        obj: Object on the root; ignored on other ranks.
        root_rank: Global rank of the root.
        name: Name that matches the operations of all ranks.
        process_set: Ranks that take part.
        allow_pickle: Whether pickling is allowed, on all ranks; when None, whether
            BRAID_HOROVOD_ALLOW_PICKLE is 1.

    Raises:
        ConfigError: The object is not plain, and pickling is not allowed.
        HorovodInternalError: The root could not send the object.
    """
    allowed = _allowed(allow_pickle)
    member = process_set.member
    base = member.name("object", name)
    with refused_on_all("broadcast", CallArguments(f"{base}.size", process_set)):
        is_root = _is_root(root_rank, process_set)
    data, error = _packed(obj, allowed) if is_root else (b"", None)
    size = torch.tensor([len(data) if error is None else -len(data)])
    broadcast_(size, root_rank, f"{base}.size", process_set)
    buffer = torch.empty(abs(int(size)), dtype=torch.uint8)
    if is_root:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    broadcast_(buffer, root_rank, f"{base}.data", process_set)
    if error is not None:
        raise error
    return obj if is_root else _unpacked(buffer, int(size) < 0, root_rank, allowed)


def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    allow_pickle: bool | None = None,
) -> list[Any]:
    """Return the objects of all ranks, in rank order; see `broadcast_object`."""
    allowed = _allowed(allow_pickle)
    member = process_set.member
    base = member.name("objects", name)
    data, error = _packed(obj, allowed)
    size = torch.tensor([len(data) if error is None else -len(data)])
    sizes = allgather(size, f"{base}.size", process_set).tolist()
    local = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    whole = allgather(local, f"{base}.data", process_set)
    if error is not None:
        raise error
    parts = torch.split(whole, [abs(size) for size in sizes])
    return [
        _unpacked(part, size < 0, rank, allowed)
        for part, size, rank in zip(parts, sizes, member.ranks, strict=True)
    ]


def _named(params: Named) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) pairs; None values are skipped.

    Raises:
        ConfigError: A value is not a tensor.
    """
    try:
        pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
        named = [(str(name), value) for name, value in pairs if value is not None]
    except (TypeError, ValueError) as error:
        msg = f"tensors must be a state dict, or pairs of name and tensor: {error}"
        raise ConfigError(msg) from error
    wrong = [
        f"{name!r} ({type(x).__name__})" for name, x in named if not isinstance(x, torch.Tensor)
    ]
    if wrong:
        msg = (
            "tensors must have names, as in state_dict() and named_parameters(), got "
            f"{', '.join(wrong[:5])}"
        )
        raise ConfigError(msg)
    return named


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer keeps its state by parameter.

    Raises:
        ConfigError: The optimizer is LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        msg = (
            "LBFGS does not store its state per parameter: use another optimizer, or broadcast "
            "its state with broadcast_object"
        )
        raise ConfigError(msg)


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Create an optimizer's state with a step that does not change parameters."""
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"] if p.requires_grad]
    values = [param.clone() for param in params]
    decays = [group.get("weight_decay") for group in groups]
    for param in params:
        zeros = torch.zeros_like(param)
        is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
        param.grad = zeros.to_sparse() if is_sparse else zeros
    for group, decay in zip(groups, decays, strict=True):
        if decay is not None:
            group["weight_decay"] = 0.0
    getattr(optimizer, "step_alone", optimizer.step)()
    for group, decay in zip(groups, decays, strict=True):
        if decay is not None:
            group["weight_decay"] = decay
    for param, value in zip(params, values, strict=True):
        param.copy_(value)
        steps = optimizer.state[param].get("step") if param in optimizer.state else None
        if isinstance(steps, torch.Tensor):
            steps.zero_()
        elif steps is not None:
            optimizer.state[param]["step"] = 0


def _is_root(root_rank: int, process_set: ProcessSet) -> bool:
    """Return whether this rank is the root; raise as `root_of` does."""
    return process_set.rank() == root_of(root_rank, process_set)


def _allowed(allow_pickle: bool | None) -> bool:
    return os.environ.get(PICKLE_SWITCH) == "1" if allow_pickle is None else allow_pickle


def _packed(obj: Any, allowed: bool) -> tuple[bytes, ConfigError | None]:
    """Return an object's bytes; or an error's text as bytes, and the error."""
    try:
        return encode(obj, allow_pickle=allowed), None
    except ConfigError as error:
        why = f"{error}; or set {PICKLE_SWITCH}=1 for all ranks"
        return why.encode(), ConfigError(why)
    except Exception as error:  # noqa: BLE001 - any error must reach the other ranks
        why = f"object of type {type(obj).__name__} cannot be sent: {type(error).__name__}: {error}"
        return encodable(why).encode(), ConfigError(why)


def _unpacked(data: torch.Tensor, failed: bool, rank: int, allowed: bool) -> Any:
    raw = data.numpy().tobytes()
    if failed:
        msg = f"rank {rank} could not send its object: {raw.decode()}"
        raise HorovodInternalError(msg)
    return decode(raw, allow_pickle=allowed)


def _compare(names: list[str], process_set: ProcessSet) -> None:
    """Refuse names that differ between ranks, since their operations would never match."""
    digests = allgather(torch.tensor([text_digest("\n".join(names))]), process_set=process_set)
    if len(set(digests.tolist())) == 1:
        return
    everybody = allgather_object(names, process_set=process_set)
    common = set.intersection(*map(set, everybody))
    own_names = [sorted(set(listed) - common)[:5] for listed in everybody]
    extra = [
        f"rank {rank} has {', '.join(map(repr, some)) or 'another order'}"
        for rank, some in zip(process_set.member.ranks, own_names, strict=True)
    ]
    msg = f"tensors must have the same names in the same order on all ranks, but {'; '.join(extra)}"
    raise HorovodInternalError(msg)


_TENSOR = "tensor number"


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the state with tensors replaced by numbers; append the tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        return {key: _outline(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_outline(item, tensors) for item in value)
    return value


def _filled(outline: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(outline, dict):
        if set(outline) == {_TENSOR}:
            return tensors[outline[_TENSOR]]
        return {key: _filled(item, tensors) for key, item in outline.items()}
    if isinstance(outline, list | tuple):
        return type(outline)(_filled(item, tensors) for item in outline)
    return outline

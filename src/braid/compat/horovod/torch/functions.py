"""Equal state on all ranks: parameters, optimizers and objects, from one rank or of all."""

from __future__ import annotations

import contextlib
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
        params: A state dict, or named parameters; None values are left out.
        root_rank: Global rank of the root.
        process_set: Ranks that take part.

    Raises:
        ConfigError: A value is no tensor.
        HorovodInternalError: Ranks have other names, or shapes.
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
    """Copy the root's optimizer state and options to all ranks, whatever they have.

    As in Horovod, an optimizer without state gets the state that it begins with, and gradients of
    zeros. Parameters stay as they are.

    Args:
        optimizer: Optimizer over the same parameters on all ranks.
        root_rank: Global rank of the root.
        model: Not needed.
        process_set: Ranks that take part.

    Raises:
        ConfigError: The optimizer is LBFGS, whose state is not one of parameters.
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
    """Return the root's object, on all ranks.

    None, numbers, text, bytes, lists, tuples, sets and dictionaries of them travel as they are.
    Anything else is pickled, if that is allowed: whoever can send to this job could then run code
    in it.

    Args:
        obj: Object on the root; ignored elsewhere.
        root_rank: Global rank of the root.
        name: Name by which ranks find each other's operation.
        process_set: Ranks that take part.
        allow_pickle: Whether pickling is allowed, on all ranks; when None, whether
            BRAID_HOROVOD_ALLOW_PICKLE is 1.

    Raises:
        ConfigError: The object is not plain, and pickling is not allowed.
        HorovodInternalError: The root could not send it.
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
    """Return the objects of all ranks, in their order; see `broadcast_object`."""
    allowed = _allowed(allow_pickle)
    member = process_set.member
    base = member.name("objects", name)
    data, error = _packed(obj, allowed)
    size = torch.tensor([len(data) if error is None else -len(data)])
    sizes = allgather(size, f"{base}.size", process_set).tolist()
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    whole = allgather(own, f"{base}.data", process_set)
    if error is not None:
        raise error
    parts = torch.split(whole, [abs(size) for size in sizes])
    return [
        _unpacked(part, size < 0, rank, allowed)
        for part, size, rank in zip(parts, sizes, member.ranks, strict=True)
    ]


def _named(params: Named) -> list[tuple[str, torch.Tensor]]:
    """Return tensors by name; None values are left out.

    Raises:
        ConfigError: A value is no tensor.
    """
    try:
        pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
        named = [(str(name), value) for name, value in pairs if value is not None]
    except (TypeError, ValueError) as error:
        msg = f"tensors must come by name, as a state dict or pairs of name and tensor: {error}"
        raise ConfigError(msg) from error
    wrong = [
        f"{name!r} ({type(x).__name__})" for name, x in named if not isinstance(x, torch.Tensor)
    ]
    if wrong:
        msg = (
            "tensors must come by name, as state_dict() and named_parameters() have them, got "
            f"{', '.join(wrong[:5])}"
        )
        raise ConfigError(msg)
    return named


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check that the state of an optimizer is one of parameters.

    Raises:
        ConfigError: It is that of LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        msg = (
            "LBFGS does not keep its state by parameter: use another optimizer, or broadcast "
            "what you need by broadcast_object"
        )
        raise ConfigError(msg)


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's state by a step that leaves parameters unchanged."""
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
    alone = getattr(optimizer, "skip_synchronize", contextlib.nullcontext)
    with alone():
        optimizer.step()
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
    """Return an object's bytes, or the reason why there are none."""
    try:
        return encode(obj, allow_pickle=allowed), None
    except ConfigError as error:
        why = f"{error}; scripts that cannot say so: set {PICKLE_SWITCH}=1 for all ranks"
        return why.encode(), ConfigError(why)
    except Exception as error:  # noqa: BLE001 - of pickle and of the object; the others must know
        why = f"object of type {type(obj).__name__} cannot be sent: {type(error).__name__}: {error}"
        return encodable(why).encode(), ConfigError(why)


def _unpacked(data: torch.Tensor, failed: bool, rank: int, allowed: bool) -> Any:
    raw = data.numpy().tobytes()
    if failed:
        msg = f"rank {rank} could not send its object: {raw.decode()}"
        raise HorovodInternalError(msg)
    return decode(raw, allow_pickle=allowed)


def _compare(names: list[str], process_set: ProcessSet) -> None:
    """Refuse names that differ between ranks, which otherwise wait for each other for ever."""
    digests = allgather(torch.tensor([text_digest("\n".join(names))]), process_set=process_set)
    if len(set(digests.tolist())) == 1:
        return
    everybody = allgather_object(names, process_set=process_set)
    common = set.intersection(*map(set, everybody))
    extra = [
        f"rank {rank} has {', '.join(map(repr, sorted(set(own) - common)[:5])) or 'another order'}"
        for rank, own in zip(process_set.member.ranks, everybody, strict=True)
    ]
    msg = f"tensors must have the same names, in one order, on all ranks, but {'; '.join(extra)}"
    raise HorovodInternalError(msg)


_TENSOR = "tensor number"


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the state with numbers in place of tensors, which are added to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        return {key: _outline(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_outline(each, tensors) for each in value)
    return value


def _filled(outline: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(outline, dict):
        if set(outline) == {_TENSOR}:
            return tensors[outline[_TENSOR]]
        return {key: _filled(each, tensors) for key, each in outline.items()}
    if isinstance(outline, list | tuple):
        return type(outline)(_filled(each, tensors) for each in outline)
    return outline

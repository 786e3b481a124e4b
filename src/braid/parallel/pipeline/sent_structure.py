"""Structure of a value that is sent to another stage, as plain data.

Problem: a value between stages is a nest of containers around tensors: tuples, dictionaries,
dataclasses, a model's output. A pickle could describe any of them, but can run arbitrary code.

Idea: describe each container by a short list of plain data, and a class by its name. The receiver
looks the name up among imported modules; it imports nothing. It creates only named tuples,
mappings, lists, dataclasses and enumerations, without calling constructors. Classes of the standard
library, except for a few containers, and classes with code at an object's end raise an error.

    [PLACE, 0]                                 the first tensor
    [PLAIN, 3]                                 None, a number, a text, bytes
    [TUPLE, [node, ...]]                       also LIST, SET and FROZENSET
    [DICT, [[node, node], ...]]                keys and values
    [CLASS, "module", "Name", form, node, ...] an object of a class; its form defines the parts
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from braid.comm.autograd.nested import TensorPlace, unflatten
from braid.comm.tensors.plain_data import decode, encode
from braid.errors import BraidError, CommError, ConfigError
from braid.parallel.pipeline.memory_order import order_of, restored
from braid.runtime.memory_pool import HUGE_PAGE_BYTES, MemoryPool
from braid.types import dtype_name

__all__ = ["SentSpec", "SentStructure", "read_structure"]

PLACE, PLAIN, LIST, TUPLE, SET, FROZENSET, DICT, PROXY, CLASS = range(9)
SIZE, DTYPE, DEVICE, SLICE, COMPLEX, RANGE = range(9, 15)
FIELDS, ITEMS, ENTRIES, ATTRIBUTES, MEMBER = range(5)  # forms of an object
_SCALARS = (type(None), bool, int, float, str, bytes)
_CONTAINERS: dict[type, int] = {list: LIST, tuple: TUPLE, set: SET, frozenset: FROZENSET}
_KNOWN = (OrderedDict, defaultdict, Counter, UserDict)  # allowed classes of the standard library
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}


class SentSpec(NamedTuple):
    """Shape, dtype and other properties of a tensor that is sent as a part of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_cpu: bool
    order: tuple[int, ...] | None

    @classmethod
    def of(cls, x: torch.Tensor) -> SentSpec:
        """Return the description of `x`."""
        on_cpu = x.device.type == "cpu"
        return cls(tuple(x.shape), x.dtype, x.requires_grad, on_cpu, order_of(x))

    def empty(self, device: torch.device | str, pool: MemoryPool | None = None) -> torch.Tensor:
        """Return an uninitialized tensor with this description.

        Args:
            device: Device of the tensor.
            pool: Pool for large tensors on the CPU.
        """
        numel = math.prod(self.shape)
        nbytes = numel * self.dtype.itemsize
        if pool is not None and self.on_cpu and nbytes >= HUGE_PAGE_BYTES:
            memory = torch.frombuffer(pool.lend(nbytes), dtype=self.dtype)
            like = restored(memory, self.shape, self.order)
            tensor = torch.empty(0, dtype=self.dtype, device="cpu")  # views have other rules
            return tensor.set_(memory.untyped_storage(), 0, like.shape, like.stride())
        if self.order is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        memory = torch.empty(numel, dtype=self.dtype, device=device)
        return restored(memory, self.shape, self.order)

    def as_plain(self) -> list[Any]:
        """Return the description as a list of plain values, for `from_plain`."""
        return [list(self.shape), dtype_name(self.dtype), *self[2:]]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> SentSpec:
        """Return the description from `as_plain`; raise ValueError if the data is invalid."""
        shape, dtype, requires_grad, on_cpu, order = plain
        dims = range(len(shape))
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(shape)
        if order is not None and sorted(order) != list(dims):
            raise ValueError(order)
        order = None if order is None else tuple(order)
        return cls(tuple(shape), _dtype(dtype), bool(requires_grad), bool(on_cpu), order)


class SentStructure(NamedTuple):
    """Structure of a value that is sent to another rank, without its tensors.

    Attributes:
        tree: The value, with placeholders instead of tensors.
        specs: Descriptions of the tensors.
    """

    tree: Any
    specs: tuple[SentSpec, ...]

    def as_bytes(self) -> bytes:
        """Return the structure as plain data for `read_structure`.

        Raises:
            ConfigError: A part of the value cannot be sent to another rank.
        """
        try:
            node = _node(self.tree, "the value")
            return encode([node, [spec.as_plain() for spec in self.specs]])
        except RecursionError:
            msg = (
                "a layer returned a value for another stage that contains itself or is nested "
                "too deeply: return a flat list or dictionary"
            )
            raise ConfigError(msg) from None


def read_structure(raw: bytes) -> SentStructure:
    """Decode a structure that a peer has sent; no code that the peer chooses can run.

    Raises:
        CommError: The bytes are not a structure, or use classes that this process does not know.
    """
    try:
        node, specs = decode(raw)
        structure = SentStructure(_tree(node), tuple(map(SentSpec.from_plain, specs)))
        unflatten(structure.tree, [torch.empty(0)] * len(specs))  # raises if a tensor is missing
    except BraidError as exc:
        raise CommError(str(exc)) from exc
    except Exception as exc:
        msg = (
            f"a stage sent a value whose structure cannot be read: {type(exc).__name__}: {exc}. "
            "Install the same versions on all ranks"
        )
        raise CommError(msg) from exc
    return structure


def _node(x: Any, where: str) -> list[Any]:  # noqa: C901, PLR0911, PLR0912 - one for each type
    """Return a part of a value as plain data; `where` names the part in errors."""
    kind = type(x)
    if kind is TensorPlace:
        return [PLACE, x.index]
    if kind in _SCALARS:
        return [PLAIN, x]
    if kind in _CONTAINERS:
        return [_CONTAINERS[kind], _nodes(x, where)]
    if kind is dict:
        return [DICT, _pairs(x, where)]
    if kind is MappingProxyType:
        return [PROXY, _pairs(x, where)]
    if kind is torch.Size:
        return [SIZE, list(x)]
    if kind is torch.dtype:
        return [DTYPE, dtype_name(x)]
    if kind is torch.device:
        return [DEVICE, str(x)]
    if kind is slice:
        return [SLICE, _nodes((x.start, x.stop, x.step), where)]
    if kind is range:
        return [RANGE, [x.start, x.stop, x.step]]
    if kind is complex:
        return [COMPLEX, [x.real, x.imag]]
    head: list[Any] = [CLASS, kind.__module__, kind.__qualname__]
    problem = _problem_of(kind)
    if not problem and _class(*head[1:]) is not kind:
        problem = "which cannot be found by its name: define it at the top of a module"
    if not problem and isinstance(x, enum.Enum):
        return [*head, MEMBER, x.name]
    if not problem and isinstance(x, tuple):
        return [*head, FIELDS, _nodes(x, where)]
    attributes = _attributes(x)
    if not problem and isinstance(x, defaultdict):
        factory = getattr(x.default_factory, "__name__", None)
        if factory is not None and _FACTORIES.get(factory) is not x.default_factory:
            problem = f"with a default_factory other than {', '.join(_FACTORIES)}"
        attributes["default_factory"] = factory
    if problem is None:
        parts = _pairs(attributes, where)
        if isinstance(x, dict):
            return [*head, ENTRIES, _pairs(x, where), parts]
        if isinstance(x, list):
            return [*head, ITEMS, _nodes(x, where), parts]
        if isinstance(x, MutableMapping) or dataclasses.is_dataclass(kind):
            return [*head, ATTRIBUTES, parts]
    msg = (
        f"{where} for another stage has a {kind.__module__}.{kind.__qualname__}"
        f"{', ' + problem if problem else ''}, which cannot be sent to another rank: return "
        "tensors, plain data, lists, tuples, dictionaries, named tuples or dataclasses from the "
        "layer"
    )
    raise ConfigError(msg)


def _nodes(items: Any, where: str) -> list[Any]:
    return [_node(item, f"{where}[{place}]") for place, item in enumerate(items)]


def _pairs(items: Any, where: str) -> list[Any]:
    return [[_node(k, f"a key of {where}"), _node(x, f"{where}[{k!r}]")] for k, x in items.items()]


def _attributes(x: Any) -> dict[str, Any]:
    """Return the attributes of an object besides its entries, by name."""
    attributes = dict(getattr(x, "__dict__", {}))
    if dataclasses.is_dataclass(x):
        names = [field.name for field in dataclasses.fields(x)]
        attributes |= {name: getattr(x, name) for name in names if hasattr(x, name)}
    return attributes


def _problem_of(kind: type) -> str | None:
    """Return why objects of a class may not be received from another rank; None if they may."""
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind not in _KNOWN:
        return "a class of the standard library"
    if hasattr(kind, "__del__"):
        return "a class with __del__"
    return None


def _class(module: str, name: str) -> Any:
    """Return the class of an imported module; None if there is none."""
    target: Any = sys.modules.get(module)
    for part in name.split("."):
        target = vars(target).get(part) if hasattr(target, "__dict__") else None
    return target if isinstance(target, type) else None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    return dtype


def _tree(node: list[Any]) -> Any:  # noqa: PLR0911 - one for each type
    """Return the part of a value that plain data describes."""
    form, *content = node
    if form == CLASS:
        return _object(*content)
    (content,) = content
    if form == PLACE:
        return TensorPlace(cast("int", content))
    if form == PLAIN:
        return content
    if form in (LIST, TUPLE, SET, FROZENSET):
        kind = (list, tuple, set, frozenset)[form - LIST]
        return kind(map(_tree, content))
    if form in (DICT, PROXY):
        entries = _entries(content)
        return entries if form == DICT else MappingProxyType(entries)
    if form == SIZE:
        return torch.Size(content)
    if form == DTYPE:
        return _dtype(cast("str", content))
    if form == DEVICE:
        return torch.device(cast("str", content))
    if form == SLICE:
        return slice(*map(_tree, content))
    if form == RANGE:
        return range(*content)
    if form == COMPLEX:
        return complex(*content)
    raise ValueError(form)


def _entries(pairs: list[Any]) -> dict[Any, Any]:
    return {_tree(key): _tree(value) for key, value in pairs}


def _object(module: str, name: str, form: int, content: Any, attributes: Any = ()) -> Any:
    """Return an object of a class, created from its parts without its constructor."""
    kind = _class(module, name)
    if kind is None:
        msg = (
            f"a stage sent a value of the class {module}.{name}, which this rank has not imported: "
            "import its module on all ranks"
        )
        raise CommError(msg)
    if problem := _problem_of(kind):
        msg = (
            f"a stage sent a value of the class {module}.{name}, {problem}, which is not "
            "allowed: return plain data or tensors from the layer"
        )
        raise CommError(msg)
    if form == MEMBER and issubclass(kind, enum.Enum):
        return kind.__members__[content]
    if form == FIELDS and issubclass(kind, tuple):
        values = map(_tree, content)
        # results of torch, such as of `max`, need their constructor
        is_result = module == "torch.return_types"
        return kind(values) if is_result else tuple.__new__(kind, values)
    made: Any
    if form == ENTRIES and issubclass(kind, dict):
        made = kind.__new__(kind)
        for key, value in _entries(content).items():
            made[key] = value
    elif form == ITEMS and issubclass(kind, list):
        made = kind.__new__(kind)
        made.extend(map(_tree, content))
    elif form == ATTRIBUTES and (
        issubclass(kind, MutableMapping) or dataclasses.is_dataclass(kind)
    ):
        made, attributes = object.__new__(kind), content
    else:
        raise ValueError(form)
    for key, value in _entries(attributes).items():
        if key == "default_factory" and isinstance(made, defaultdict):
            made.default_factory = _FACTORIES.get(value)
        else:
            object.__setattr__(made, key, value)
    return made

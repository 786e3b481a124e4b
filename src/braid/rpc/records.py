"""Converts dataclasses to their fields and back, without running code of the class; finds enums.

Problem: a pickled dataclass runs its `__reduce__`. Its constructor may have arguments that are no
fields, and `__post_init__` would run a second time.

Idea: an instance is its fields. The receiver sets them without calling the constructor. A value
that is not in a field would be lost, so the sender refuses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import operator
from collections.abc import Mapping
from typing import Any

from braid.rpc.outcomes import RpcError

__all__ = ["dataclass_of", "fields_of", "key_of", "member_of", "other_attributes"]


def fields_of(value: Any, noun: str) -> dict[str, Any]:
    """Return the fields of a dataclass by name; fields without `init` may be unset.

    Args:
        value: Instance of a dataclass.
        noun: Noun for the instance, for errors.

    Raises:
        RpcError: The instance has attributes that are not fields, or is also of a class such as
            `dict`.
    """
    kind = type(value)
    names = [field.name for field in dataclasses.fields(value)]
    if extra := other_attributes(value):
        msg = (
            f"{noun} is a {kind.__module__}.{kind.__qualname__} with {extra[0]!r}, which is not a "
            f"field and would be lost: declare {extra[0]!r} with field(init=False)"
        )
        raise RpcError(msg)
    try:
        object.__new__(kind)
    except TypeError:
        base = next(c for c in kind.__mro__ if c.__module__ == "builtins").__name__
        msg = (
            f"{noun} is a {kind.__module__}.{kind.__qualname__}, a dataclass that is also a "
            f"{base} and cannot be sent: make the {base} a field of the dataclass"
        )
        raise RpcError(msg) from None
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def other_attributes(value: Any) -> list[str]:
    """Return names of a dataclass's attributes that are not fields and not cached properties."""
    names = {field.name for field in dataclasses.fields(value)}
    return sorted(
        name
        for name in getattr(value, "__dict__", {}).keys() - names
        if not isinstance(getattr(type(value), name, None), functools.cached_property)
    )


def dataclass_of(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Return an instance of a dataclass with the fields that `fields_of` returned.

    Raises:
        RpcError: The class here has other fields.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = values.keys() - fields.keys()
    missing = {name for name, field in fields.items() if field.init} - values.keys()
    if unknown or missing:
        msg = (
            f"{kind.__module__}.{kind.__qualname__} of this node has the fields {sorted(fields)}, "
            f"but {sorted(values)} were sent: use the same version of the module on both nodes"
        )
        raise RpcError(msg)
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def key_of(member: enum.Enum) -> str | int:
    """Return the name of a member of an enum, or the number of a combination of flags.

    Raises:
        RpcError: The number is not a union of members.
    """
    if not isinstance(member, enum.Flag) or member.name in type(member).__members__:
        return member.name
    kind = type(member)
    if member.value != _union_within(kind, member.value):
        msg = (
            f"{kind.__qualname__}({member.value}) is not a union of members and cannot be sent: "
            f"send the number, or name its bits in {kind.__qualname__}"
        )
        raise RpcError(msg)
    return member.value


def member_of(kind: type[enum.Enum], name: str | int) -> enum.Enum:
    """Return the member of an enum with a name, or a combination of flags with a number.

    A class keeps each number that it is called with, so it is called with unions of members only.

    Raises:
        RpcError: The class here has no such member.
    """
    if isinstance(name, int) and issubclass(kind, enum.Flag):
        union = _union_within(kind, name)
        if 0 <= name == union:
            # Python 3.11.0 to 3.11.3 may refuse or change a union with a member of several bits
            with contextlib.suppress(ValueError):
                member = kind(union)
                if getattr(member, "value", None) == union:
                    return member
    if not isinstance(name, str) or name not in kind.__members__:
        msg = (
            f"{kind.__module__}.{kind.__qualname__} of this node has no member {name!r}: use the "
            "same version of the module on both nodes"
        )
        raise RpcError(msg)
    return kind[name]


def _union_within(kind: type[enum.Flag], number: int) -> int:
    """Return the union of the members whose bits a number has."""
    values = (one.value for one in kind.__members__.values())
    return functools.reduce(operator.or_, (bits for bits in values if bits & number == bits), 0)

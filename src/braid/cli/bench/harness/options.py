"""Parsers for options of benchmarks that types alone do not define."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
import tyro

from braid.errors import ConfigError
from braid.runtime.option_types import Ranks
from braid.runtime.text import bytes_text

__all__ = ["GBIT", "KIB", "MIB", "Budget", "Ranks", "Size", "in_fields", "read_fields", "read_size"]

T = TypeVar("T", bound=msgspec.Struct)
KIB, MIB = 1 << 10, 1 << 20
GBIT = 1e9


def read_fields(kind: type[T], text: str) -> T:
    """Parse text such as gpt:4, with fields separated by colons, as a struct of type `kind`.

    Raises:
        ConfigError: The text does not match the fields.
    """
    names = kind.__struct_fields__
    try:
        fields = dict(zip(names, text.split(":"), strict=True))
        return msgspec.convert(fields, kind, strict=False)
    except (ValueError, msgspec.ValidationError) as exc:
        msg = f"{text!r} does not have the form {':'.join(names)}"
        raise ConfigError(msg) from exc


def in_fields(kind: type[T]) -> tyro.constructors.PrimitiveConstructorSpec[T]:
    """Return a tyro specification of the struct type `kind`: fields separated by colons."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=":".join(kind.__struct_fields__).upper(),
        instance_from_str=lambda words: read_fields(kind, words[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [":".join(map(str, msgspec.structs.astuple(value)))],
    )


def read_size(text: str) -> int:
    """Parse a size such as 16KiB, 4MiB or 512 as a number of bytes.

    Raises:
        ConfigError: The text is not a size.
    """
    units = {"MiB": MIB, "KiB": KIB}
    unit = next((unit for unit in units if text.endswith(unit)), "")
    number = text.removesuffix(unit).strip()
    if not number.isdecimal():
        msg = f"{text!r} is not a size: write one such as 16KiB, 4MiB or 512 (bytes)"
        raise ConfigError(msg)
    return int(number) * units.get(unit, 1)


Budget = Annotated[float, tyro.conf.arg(name="budget")]
Size = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="SIZE",
        instance_from_str=lambda words: read_size(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [
            bytes_text(value).replace(" ", "").removesuffix("B" * (value < KIB))
        ],
    ),
]

"""A model's parameters as data: one record per parameter, comparable across ranks.

Problem: engines address parameters by position (flat buffers, buckets, shards). If two ranks built
their models in another order, or with another size, position 3 means different things, and
gradients are averaged into the wrong place without an error.

Idea: convert the module, in the same way on all ranks, into a table with one record per parameter;
tied parameters have one record with several names. Ranks compare a digest of the table when a model
is wrapped. If it differs, the error shows which lines differ on which rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from braid.comm import Group
from braid.errors import MismatchError
from braid.types import TensorSpec, dtype_name, text_digest

__all__ = ["ParamRecord", "ParamTable"]

MAX_LINES_SHOWN = 8
_BORDER = "\n\n"  # between arguments and parameters


class ParamRecord(NamedTuple):
    """Record of one parameter.

    Attributes:
        names: Names in the module, in the order of registration.
        spec: Shape, dtype and whether it required a gradient when the table was made.
        param: The parameter.
        sparse: Whether the parameter's gradients are sparse.
    """

    names: tuple[str, ...]
    spec: TensorSpec
    param: nn.Parameter
    sparse: bool = False

    @property
    def name(self) -> str:
        """First name of the parameter."""
        return self.names[0]

    def __str__(self) -> str:
        tied = f" (= {', '.join(self.names[1:])})" if len(self.names) > 1 else ""
        frozen = "" if self.spec.requires_grad else " frozen"
        sparse = " sparse" if self.sparse else ""
        strides = "" if self.param.is_contiguous() else f" strides {self.param.stride()}"
        return f"{self.name}{tied} {self.spec}{strides}{frozen}{sparse}"


class ParamTable:
    """The parameters of a module in registration order."""

    def __init__(self, records: tuple[ParamRecord, ...]) -> None:
        self.records = records

    @classmethod
    def of(cls, module: nn.Module, ignored: Collection[str] = ()) -> ParamTable:
        """Return the table of a module's parameters.

        Args:
            module: Module to walk.
            ignored: Names of parameters to leave out; a tied parameter is left out by any of its
                names.
        """
        sparse = {
            weight
            for part in module.modules()
            if getattr(part, "sparse", False)
            and isinstance(weight := getattr(part, "weight", None), nn.Parameter)
        }
        table = cls.named(module.named_parameters(remove_duplicate=False), sparse)
        return cls(tuple(r for r in table if not any(name in ignored for name in r.names)))

    @classmethod
    def named(
        cls,
        pairs: Iterable[tuple[str, nn.Parameter]],
        sparse: Collection[torch.Tensor] = frozenset(),
    ) -> ParamTable:
        """Return a table of named parameters in this order, with tied parameters once per name.

        Args:
            pairs: Names and parameters.
            sparse: Parameters with sparse gradients.
        """
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in pairs:
            names.setdefault(param, []).append(name)
        return cls(
            tuple(
                ParamRecord(tuple(rank_table), _spec(p), p, p in sparse)
                for p, rank_table in names.items()
            )
        )

    @property
    def requires_grad(self) -> tuple[ParamRecord, ...]:
        """Records of the parameters that require a gradient now."""
        return tuple(record for record in self.records if record.param.requires_grad)

    def compare(self, group: Group, arguments: Mapping[str, object] | None = None) -> None:
        """Check that every member has the same table and arguments; a collective.

        Args:
            group: Group whose members compare their tables.
            arguments: Options that must be equal on all members, by name; compared as text.

        Raises:
            MismatchError: Tables or arguments differ; raised on every member, with the lines that
                differ.

        Cost: one all_gather of 8 bytes per member.
        """
        text = "\n".join([f"{name}={value!r}" for name, value in (arguments or {}).items()])
        text += _BORDER + "\n".join(map(str, self.records))
        digests = group.all_gather(torch.tensor([text_digest(text)], device="cpu"))
        if bool((digests != digests[0]).any()):
            raise MismatchError(_difference(group.objects.all_gather(text), group.ranks))

    def make_equal(self, group: Group, arguments: Mapping[str, object] | None = None) -> None:
        """Compare tables and copy the first member's values to all members; a collective.

        Raises:
            MismatchError: Tables or arguments differ, see `compare`.
        """
        self.compare(group, arguments)
        with torch.no_grad():
            for record in self.records:
                group.broadcast(record.param.detach(), 0)

    def __iter__(self) -> Iterator[ParamRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        total = sum(record.param.numel() for record in self.records)
        return f"ParamTable({len(self.records)} parameters, {total} numbers)"


def _spec(param: nn.Parameter) -> TensorSpec:
    dtype = dtype_name(param.dtype)
    return TensorSpec(tuple(param.shape), dtype, param.requires_grad)


def _difference(texts: list[str], ranks: tuple[int, ...]) -> str:
    parts = [text.partition(_BORDER) for text in texts]
    arguments = [before.split("\n") for before, _, _ in parts]
    tables = [behind.split("\n") if behind else [] for _, _, behind in parts]
    lines = []
    if any(rank_arguments != arguments[0] for rank_arguments in arguments):
        lines.append("arguments differ between ranks:")
        lines += _differing("argument", arguments, ranks)
        lines.append("pass the same arguments on every rank")
    if any(rank_arguments != tables[0] for rank_arguments in tables):
        counts = ", ".join(f"{len(t)} on rank {r}" for r, t in zip(ranks, tables, strict=True))
        lines.append(f"parameters or their order differ between ranks ({counts}):")
        lines += _differing("parameter", tables, ranks)
        lines.append("build the model the same way on every rank")
    return "\n".join(lines)


def _differing(what: str, tables: list[list[str]], ranks: tuple[int, ...]) -> list[str]:
    lines = []
    differing = 0
    for index in range(max(map(len, tables))):
        column = [table[index] if index < len(table) else "(none)" for table in tables]
        if len(set(column)) == 1:
            continue
        differing += 1
        if differing <= MAX_LINES_SHOWN:
            lines.append(f"  {what} {index}")
            lines += [f"    rank {r}  {line}" for r, line in zip(ranks, column, strict=True)]
    if differing > MAX_LINES_SHOWN:
        lines.append(f"  and {differing - MAX_LINES_SHOWN} more")
    return lines

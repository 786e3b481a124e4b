"""What a model's parameters are, as data: one record each, comparable across ranks.

Problem: engines address parameters by position (flat buffers, buckets, shards). If two ranks built their models in another
order, or with another size, position 3 means different things and gradients are averaged into the wrong place, in silence.

Idea: walk the module once, the same way everywhere, into a table with one record per parameter: tied parameters have one
record with several names. Ranks compare a digest of the table when a model is wrapped; if it differs, the error
shows which lines differ on which rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from braid.comm import Group
from braid.errors import MismatchError
from braid.types import TensorSpec, text_digest

__all__ = ["ParamRecord", "ParamTable"]

MAX_LINES_SHOWN = 8
_BORDER = "\n\n"  # between arguments and parameters


class ParamRecord(NamedTuple):
    """One parameter.

    Attributes:
        names: Every name it has in the module, the first in registration order first.
        spec: Shape, dtype and whether it was trained when the module was walked.
        param: The parameter itself.
        sparse: Whether its gradients are sparse.
    """

    names: tuple[str, ...]
    spec: TensorSpec
    param: nn.Parameter
    sparse: bool = False

    @property
    def name(self) -> str:
        """Its first name."""
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
        """Walk `module`.

        Args:
            module: Any.
            ignored: Names of parameters to leave out; a tied one by any of its names.
        """
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        sparse = {
            weight
            for part in module.modules()
            if getattr(part, "sparse", False)
            and isinstance(weight := getattr(part, "weight", None), nn.Parameter)
        }
        return cls(
            tuple(
                ParamRecord(tuple(found), _spec(p), p, p in sparse)
                for p, found in names.items()
                if not any(name in ignored for name in found)
            )
        )

    @classmethod
    def named(cls, pairs: Iterable[tuple[str, nn.Parameter]]) -> ParamTable:
        """Of parameters with their names, in this order; one that has several comes with each."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in pairs:
            names.setdefault(param, []).append(name)
        return cls(tuple(ParamRecord(tuple(found), _spec(p), p) for p, found in names.items()))

    @property
    def trained(self) -> tuple[ParamRecord, ...]:
        """Records of parameters that require a gradient now."""
        return tuple(record for record in self.records if record.param.requires_grad)

    def digest_table(self) -> str:
        """One line per parameter; equal tables mean models that can be trained together."""
        return "\n".join(map(str, self.records))

    def compare(self, group: Group, arguments: Mapping[str, object] | None = None) -> None:
        """Check that every member has the same table.

        Args:
            group: Of the members.
            arguments: What else must be the same, by name, such as options; compared as text.

        Raises:
            MismatchError: On every member, with the lines that differ.

        Members also agree here on requests that are gone on all of them, such as those of an earlier wrapper, whose channels are free from then on.

        Cost: one all_gather of 16 bytes a member.
        """
        text = "\n".join([f"{name}={value!r}" for name, value in (arguments or {}).items()])
        text += _BORDER + self.digest_table()
        lost = group.numbers.lost()
        shown = f"{' '.join(map(str, lost))};{group.numbers.state()}"
        own = torch.tensor([[text_digest(text), text_digest(shown)]], device="cpu")
        digests = group.all_gather(own)
        alike, as_lost = (digests == digests[0]).all(0).tolist()
        if not alike:
            raise MismatchError(_difference(_gather_texts(group, text), group.ranks))
        group.numbers.reclaim(lost if as_lost else _lost_by_all(_gather_texts(group, shown)))

    def make_equal(self, group: Group, arguments: Mapping[str, object] | None = None) -> None:
        """Compare as `compare`, and copy rank 0's values to all; a collective.

        Raises:
            MismatchError: See `compare`.
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
    dtype = str(param.dtype).removeprefix("torch.")
    return TensorSpec(tuple(param.shape), dtype, param.requires_grad)


def _lost_by_all(texts: list[str]) -> list[int]:
    """Numbers of requests that are gone on all members; none where one has made requests alone, which lower numbers must not come between."""
    parts = [text.split(";") for text in texts]
    if len({state for _, state in parts}) > 1:
        return []
    return sorted(map(int, set.intersection(*(set(lost.split()) for lost, _ in parts))))


def _gather_texts(group: Group, text: str) -> list[str]:
    raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = group.all_gather(torch.tensor([raw.numel()], device="cpu")).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: raw.numel()] = raw
    rows = group.all_gather(padded).view(group.size, -1)
    return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, lengths, strict=True)]


def _difference(texts: list[str], ranks: tuple[int, ...]) -> str:
    parts = [text.partition(_BORDER) for text in texts]
    arguments = [before.split("\n") for before, _, _ in parts]
    tables = [behind.split("\n") if behind else [] for _, _, behind in parts]
    lines = []
    if any(own != arguments[0] for own in arguments):
        lines.append("expected the same arguments on every rank, found")
        lines += _differing("argument", arguments, ranks)
        lines.append("give them the same on every rank")
    if any(own != tables[0] for own in tables):
        counts = ", ".join(f"{len(t)} on rank {r}" for r, t in zip(ranks, tables, strict=True))
        lines.append(
            f"expected the same parameters in the same order on every rank, found {counts}, which differ at"
        )
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
            lines += [f"    rank {r}  {found}" for r, found in zip(ranks, column, strict=True)]
    if differing > MAX_LINES_SHOWN:
        lines.append(f"  and {differing - MAX_LINES_SHOWN} more")
    return lines

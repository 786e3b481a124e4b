"""Public calls of the data-moving collectives; `broadcast_gather` has the algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import torch

from braid.comm.algorithms.programs import PROGRAMS
from braid.comm.api.face import Face, is_sequence, nbytes_of
from braid.comm.engines.collective import Collective
from braid.comm.engines.work import Work
from braid.comm.tensors.arguments import (
    Data,
    Parts,
    as_tensor,
    check_peer,
    like,
    result,
    slice_shape,
)
from braid.errors import ConfigError

__all__ = ["Movements"]

X = TypeVar("X", bound=Data)
MONITORED_S = 30.0


class Movements(Face):
    """broadcast, all_gather, gather, scatter, all_to_all and barriers, for any dtype."""

    @overload
    def broadcast(
        self,
        x: X,
        root: int = 0,
        *,
        async_op: Literal[False] = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> X: ...
    @overload
    def broadcast(
        self,
        x: X,
        root: int = 0,
        *,
        async_op: Literal[True],
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Work: ...
    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        async_op: bool = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Copy `x` of member `root` into `x` of every member.

        Args:
            x: Tensor of the same shape and dtype on all members.
            root: Group rank.
            async_op: Whether to return a Work without waiting.
            algorithm: staged, pulled, or the name of a program of `braid schedule` for this
                operation, such as tree, which needs equal parts; None to choose by size.
            timeout_s: Seconds until CommTimeout.

        Cost: ceil(l / chunk) a + l b seconds: a per step, b per byte, l bytes.
        """
        check_peer(root, self.size, "root")
        tensor = as_tensor(x, written=self.rank != root)
        copies = self._copies(tensor)
        flat = copies.read(tensor) if self.rank == root else copies.written(tensor)
        nbytes = nbytes_of(flat)
        collective = Collective(
            "broadcast",
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            peer=root,
            algorithm=algorithm,
            result=x,
            ins=(flat,),
            outs=(flat,),
            copies=copies,
            nbytes=nbytes,
            timeout_s=timeout_s,
            async_op=async_op,
        )
        return self._submit(collective)

    @overload
    def all_gather(
        self,
        x: Data,
        *,
        out: Data | None = None,
        async_op: Literal[False] = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor: ...
    @overload
    def all_gather(
        self,
        x: Data,
        *,
        out: Sequence[torch.Tensor],
        async_op: Literal[False] = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> list[torch.Tensor]: ...
    @overload
    def all_gather(
        self,
        x: Data,
        *,
        out: Parts | None = None,
        async_op: Literal[True],
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Work: ...
    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        async_op: bool = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Concatenate all members' `x` along dim 0, or fill one tensor per member.

        Args:
            x: The same shape on all members, unless `out` is a sequence.
            out: Tensor for the result, or a sequence with one tensor per member. A sequence may
                have different sizes; all members pass the same sizes.
            async_op: Whether to return a Work without waiting.
            algorithm: See `broadcast`.
            timeout_s: Seconds until CommTimeout.

        Shape:
            x: (d0, ...); zero-dim tensors count as (1,). Result: (n d0, ...).

        Cost: a + l b, with l the bytes of the result; a and b as in `broadcast`.
        """
        tensor = as_tensor(x)
        copies = self._copies(tensor)
        flat = copies.read(tensor)
        widths: tuple[int, ...] | None = None
        if is_sequence(out):
            rows = self._written_parts(copies, out, tensor, "all_gather output")
            widths = tuple(row.numel() for row in rows)
            if widths[self.rank] != flat.numel():
                msg = (
                    f"out[{self.rank}] holds {widths[self.rank]} elements (shape "
                    f"{list(out[self.rank].shape)}), but x of this rank has {flat.numel()}: give "
                    "it the shape of x"
                )
                raise ConfigError(msg)
            equal = len(set(widths)) == 1
            widths, returned = None if equal else widths, out
            shape = tuple(tensor.shape) if equal else (sum(row.numel() for row in rows),)
        else:
            shape = tuple(tensor.shape)
            full = (self.size * shape[0], *shape[1:]) if shape else (self.size,)
            target = result(out, full, tensor)
            rows = self._rows(copies.written(target))
            returned = like(x, target) if out is None else out
        if flat.data_ptr() != rows[self.rank].data_ptr():
            flat = copies.apart(flat, rows)  # no copy if x is exactly this rank's row
        nbytes = sum(nbytes_of(row) for row in rows)
        collective = Collective(
            "all_gather",
            shape=shape,
            dtype=tensor.dtype,
            algorithm=algorithm,
            widths=widths,
            result=returned,
            ins=(flat,),
            outs=rows,
            copies=copies,
            nbytes=nbytes,
            part_widths=widths,
            timeout_s=timeout_s,
            async_op=async_op,
        )
        return self._submit(collective)

    def gather(
        self,
        x: Data,
        root: int = 0,
        *,
        out: Parts | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Collect the `x` of all members on member `root`.

        Args:
            x: Tensor. Sizes may differ between members if `root` passes a sequence of fitting
                tensors.
            root: Group rank.
            out: On the root, tensor or tensors for the result, as in `all_gather`; None elsewhere.
            async_op: Whether to return a Work without waiting.
            algorithm: See `broadcast`.
            timeout_s: Seconds until CommTimeout.

        Returns:
            On the root `out`, or the concatenation without `out`; None elsewhere. Or the Work.

        Cost: 2 a + l b on the root, with l the bytes of the result; a and b as in `broadcast`.
        """
        check_peer(root, self.size, "root")
        tensor = as_tensor(x)
        copies = self._copies(tensor)
        flat = copies.read(tensor)
        rows: tuple[torch.Tensor, ...] = ()
        returned: Any = None
        if self.rank != root:
            self._refuse_elsewhere(out, "out", root)
        elif is_sequence(out):
            rows = self._written_parts(copies, out, tensor, "gather output")  # type: ignore[arg-type]
            returned = out
        else:
            shape = tuple(tensor.shape)
            full = (self.size * shape[0], *shape[1:]) if shape else (self.size,)
            target = result(out, full, tensor)  # type: ignore[arg-type]  # no sequence here
            rows = self._rows(copies.written(target))
            returned = like(x, target) if out is None else out
        if rows and flat.data_ptr() != rows[root].data_ptr():
            flat = copies.apart(flat, rows)
        nbytes = sum(nbytes_of(row) for row in rows) or nbytes_of(flat) * self.size
        collective = Collective(
            "gather",
            shape=tuple(tensor.shape) if algorithm in PROGRAMS else None,
            dtype=tensor.dtype,
            peer=root,
            algorithm=algorithm,
            result=returned,
            ins=(flat,),
            outs=rows,
            copies=copies,
            nbytes=nbytes,
            part_widths=tuple(row.numel() for row in rows) or None,
            timeout_s=timeout_s,
            async_op=async_op,
        )
        return self._submit(collective)

    def scatter(
        self,
        x: Parts | None = None,
        root: int = 0,
        *,
        out: Data,
        async_op: bool = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Send part r of `x` on member `root` to member r.

        Args:
            x: On the root, a tensor to cut into equal parts along dim 0, or one tensor per member;
                None elsewhere.
            root: Group rank.
            out: Tensor for this member's part.
            async_op: Whether to return a Work without waiting.
            algorithm: See `broadcast`.
            timeout_s: Seconds until CommTimeout.

        Returns:
            `out`, or the Work.

        Cost: 2 a + l b, with l the bytes of the root's `x`; a and b as in `broadcast`.
        """
        check_peer(root, self.size, "root")
        target = as_tensor(out, written=True)
        copies = self._copies(target)
        place = copies.written(target)
        widths: tuple[int, ...] = ()
        flat = place[:0]
        if self.rank != root:
            self._refuse_elsewhere(x, "x", root)
        elif x is None:
            msg = (
                f"this rank is the root (group rank {root}), but passed no parts: pass one tensor "
                "per rank to scatter"
            )
            raise ConfigError(msg)
        elif is_sequence(x):
            flat, widths = self._read_parts(copies, x, "scatter input")  # type: ignore[arg-type]
        else:
            tensor = as_tensor(x)  # type: ignore[arg-type]
            slice_shape(tensor, self.size, "scatter")
            flat = copies.read(tensor)
            widths = (flat.numel() // self.size,) * self.size
        if widths:  # without a program, all ranks compare sizes
            compared = self.size > 1 and algorithm not in PROGRAMS
            check_own_part(flat.dtype, None if compared else widths[root], target)
        flat = copies.apart(flat, (place,)) if flat.numel() else flat
        nbytes = nbytes_of(flat) or nbytes_of(place) * self.size
        collective = Collective(
            "scatter",
            shape=tuple(target.shape) if algorithm in PROGRAMS else None,
            dtype=target.dtype,
            peer=root,
            algorithm=algorithm,
            result=out,
            ins=(flat,),
            outs=(place,),
            copies=copies,
            nbytes=nbytes,
            part_widths=widths,
            timeout_s=timeout_s,
            async_op=async_op,
        )
        return self._submit(collective)

    @overload
    def all_to_all(
        self,
        x: Data,
        *,
        out: Data | None = None,
        async_op: Literal[False] = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor: ...
    @overload
    def all_to_all(
        self,
        x: Parts,
        *,
        out: Parts,
        async_op: Literal[False] = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Any: ...
    @overload
    def all_to_all(
        self,
        x: Parts,
        *,
        out: Parts | None = None,
        async_op: Literal[True],
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Work: ...
    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        async_op: bool = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Send part r to member r, and collect the parts that the members send to this rank.

        Args:
            x: Equal slices of dim 0, or one tensor per member (`list(x.split(sizes))` makes no
                copy).
            out: Tensor for the result. With a sequence as `x`, a sequence with the sizes that the
                other members send.
            async_op: Whether to return a Work without waiting.
            algorithm: See `broadcast`.
            timeout_s: Seconds until CommTimeout.

        Shape:
            x and result: (n d0, ...), or the shapes of the sequences.

        Cost: a + 2 l b with a, b, l as in `broadcast`; with sequences a more.
        """
        if is_sequence(x):
            return self._ragged_all_to_all(x, out, async_op, algorithm, timeout_s)
        tensor = as_tensor(x)
        copies = self._copies(tensor)
        flat = copies.read(tensor)
        slice_shape(tensor, self.size, "all_to_all")
        target = result(out, tuple(tensor.shape), tensor)
        whole = copies.written(target)
        flat = copies.apart(flat, (whole,))
        returned = like(x, target) if out is None else out
        rows, nbytes = self._rows(whole), nbytes_of(flat)
        collective = Collective(
            "all_to_all",
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            algorithm=algorithm,
            result=returned,
            ins=(flat,),
            outs=rows,
            copies=copies,
            nbytes=nbytes,
            timeout_s=timeout_s,
            async_op=async_op,
        )
        return self._submit(collective)

    @overload
    def barrier(
        self, *, async_op: Literal[False] = False, timeout_s: float | None = None
    ) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True], timeout_s: float | None = None) -> Work: ...
    def barrier(self, *, async_op: bool = False, timeout_s: float | None = None) -> Work | None:
        """Wait until every member of the group has called this.

        Args:
            async_op: Whether to return a Work without waiting.
            timeout_s: Seconds until CommTimeout.

        Cost: one synchronisation of all members.
        """
        collective = Collective("barrier", timeout_s=timeout_s, async_op=async_op)
        return self._submit(collective)  # type: ignore[no-any-return]

    def monitored_barrier(self, *, timeout_s: float = MONITORED_S) -> None:
        """Return when every member has called this, or raise an error that names missing members.

        Raises:
            CommTimeout: Some members did not call this within `timeout_s`. Every rank that called
                it names all missing members, and the last call of each.
        """
        self._submit(Collective("barrier", timeout_s=timeout_s))

    def _ragged_all_to_all(
        self,
        x: Sequence[torch.Tensor],
        out: Any,
        async_op: bool,
        algorithm: str | None,
        timeout_s: float | None,
    ) -> Any:
        if not is_sequence(out):
            msg = (
                "x is a sequence of tensors, so out must be one too, with one tensor per rank, "
                f"not {type(out).__name__}. Give each tensor the size that its rank sends to "
                "this rank"
            )
            raise ConfigError(msg)
        copies = self._copies(as_tensor(x[0] if x else torch.empty(0)))
        flat, widths = self._read_parts(copies, x, "all_to_all input")
        rows = self._written_parts(copies, out, as_tensor(x[0]), "all_to_all output")
        flat = copies.apart(flat, rows)
        nbytes = max(nbytes_of(flat), sum(nbytes_of(row) for row in rows))
        collective = Collective(
            "all_to_all",
            dtype=flat.dtype,
            algorithm=algorithm,
            result=out,
            ins=(flat,),
            outs=rows,
            copies=copies,
            nbytes=nbytes,
            part_widths=widths,
            timeout_s=timeout_s,
            async_op=async_op,
        )
        return self._submit(collective)

    def _refuse_elsewhere(self, x: object, name: str, root: int) -> None:
        if x is not None:
            msg = (
                f"only the root (group rank {root}) passes {name}, but group rank {self.rank} "
                f"passed {name} as well: pass None there"
            )
            raise ConfigError(msg)


def check_own_part(dtype: torch.dtype, numel: int | None, out: torch.Tensor) -> None:
    """Raise if the root's own part does not fit into its destination `out`.

    Args:
        dtype: Dtype of the parts.
        numel: Number of elements of the part; None to accept any number.
        out: Destination.

    Raises:
        ConfigError: The dtypes or sizes differ.
    """
    if dtype != out.dtype:
        msg = f"the parts have dtype {dtype}, but out has {out.dtype}: convert one of them"
        raise ConfigError(msg)
    if numel is not None and numel != out.numel():
        msg = (
            f"the part of this rank has {numel} elements, but out has shape {list(out.shape)}: "
            f"pass an out of {numel} elements on every rank"
        )
        raise ConfigError(msg)

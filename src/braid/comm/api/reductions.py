"""Public calls of the reducing collectives.

The algorithms are in `all_reduce`, `hierarchical` and `reduce_scatter`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

import torch

from braid.comm.api.face import Face, is_sequence, nbytes_of
from braid.comm.engines.collective import Collective
from braid.comm.engines.work import Work
from braid.comm.tensors.arguments import (
    Data,
    Parts,
    as_tensor,
    check_peer,
    dense,
    like,
    result,
    slice_shape,
)
from braid.comm.tensors.reduction import identity
from braid.errors import ConfigError

__all__ = ["Reductions"]

X = TypeVar("X", bound=Data)


class Reductions(Face):
    """all_reduce, reduce, reduce_scatter, scan; the sums are taken in the order of ranks.

    A large all_reduce over several hosts with several ranks each sums inside each host first,
    unless the group of all ranks was made with `sum_order="rank"`. All ranks get the same bits in
    both cases, but sums by host differ from a sum in one process.

    Reductions are sum, avg (integers truncate), product, min, max, and band, bor, bxor for integers
    and bool. For bool, sum and max are "or", product and min are "and". Complex numbers take sum,
    avg and product. 16-bit floats are summed in 32 bits and rounded once.
    """

    @overload
    def all_reduce(
        self,
        x: X,
        op: str = "sum",
        *,
        out: X | None = None,
        async_op: Literal[False] = False,
        wire: str | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> X: ...
    @overload
    def all_reduce(
        self,
        x: X,
        op: str = "sum",
        *,
        out: X | None = None,
        async_op: Literal[True],
        wire: str | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Work: ...
    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        wire: str | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Replace `x` on every member by the reduction of all members' `x`.

        Args:
            x: Any shape; need not be contiguous. Tensors from `empty` are not copied.
            op: See the class.
            out: Tensor for the result; `x` is then unchanged.
            async_op: Whether to return a Work without waiting; the progress thread runs it.
            wire: Format of float32 numbers on the network between hosts, such as bf16, int8 or
                topk:0.01 (see `braid.comm.formats`). It has no effect inside one host. Sums are
                then taken inside each host first, even with `sum_order="rank"`.
            algorithm: direct, two_phase, pulled, registered or hierarchical; None to choose by
                size. Or a program of `programs.schedule`, such as ring, tree or halving_doubling,
                which sums in another order.
            timeout_s: Seconds until CommTimeout.

        Returns:
            `x` (or `out`), or with `async_op` the Work to wait for.

        Raises:
            ConfigError: Unknown op or algorithm, or a tensor that cannot be reduced.
            MismatchError, PeerLostError, CommTimeout: See `braid.comm.api.group`.

        Cost: a + (n+1) l b seconds for little data or two ranks (a per step, b per byte, l bytes;
            see `braid.comm.algorithms.all_reduce`). Between h hosts 2 (h-1)/h l bytes a host, see
            `braid.comm.algorithms.hierarchical`.
        """
        if wire is not None and not isinstance(wire, str):
            msg = f"wire must be a name such as 'bf16', got {wire!r}"  # type: ignore[unreachable]
            raise ConfigError(msg)
        flat = dense(x, self.devices) if out is None else None
        if flat is not None:  # nearly always
            copies, tensor, place = None, x, x
        else:
            tensor = as_tensor(x, written=out is None)
            copies, place = self._copies(tensor), tensor
            if out is None:
                flat = copies.changed(tensor)
            else:
                target = result(out, tuple(tensor.shape), tensor)
                place = target if target.shape == tensor.shape else target.view(tensor.shape)
                flat, x = copies.filled(place, tensor), out
        return self._submit(
            Collective(
                "all_reduce",
                tuple(tensor.shape),
                tensor.dtype,
                op,
                algorithm=algorithm,
                wire=wire,
                ins=(flat,),
                outs=(flat,),
                nbytes=flat.numel() * flat.element_size(),
                copies=copies,
                result=x,
                reads=(tensor,),
                writes=(place,),
                async_op=async_op,
                timeout_s=timeout_s,
            )
        )

    @overload
    def reduce(
        self,
        x: X,
        root: int = 0,
        op: str = "sum",
        *,
        out: X | None = None,
        async_op: Literal[False] = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> X: ...
    @overload
    def reduce(
        self,
        x: X,
        root: int = 0,
        op: str = "sum",
        *,
        out: X | None = None,
        async_op: Literal[True],
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Work: ...
    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Replace `x` (or fill `out`) on member `root` by the reduction of all members' `x`.

        Args:
            x: Tensor of the same shape and dtype on all members; unchanged elsewhere.
            root: Group rank.
            op: Reduction; see the class.
            out: On the root, tensor for the result; `x` is then unchanged. Ignored elsewhere.
            async_op: Whether to return a Work without waiting.
            algorithm: staged or pulled; None to choose by size.
            timeout_s: Seconds until CommTimeout.

        Returns:
            `x`, or `out` on the root if it was passed; or with `async_op` the Work to wait for.

        Raises:
            ConfigError: Unknown op, root or algorithm, or a tensor that cannot be reduced.
            MismatchError, PeerLostError, CommTimeout: See `braid.comm.api.group`.

        Cost: a + n l b on the root for little data; else 2 a + 2 l b, each member summing 1/n. For
            a, b and l see `all_reduce`.
        """
        check_peer(root, self.size, "root")
        tensor = as_tensor(x)
        copies = self._copies(tensor)
        flat = copies.read(tensor)
        target, returned = flat, x
        if self.rank == root:
            returned = x if out is None else out
            place = tensor if out is None else result(out, tuple(tensor.shape), tensor)
            target = copies.written(place)
            if flat.data_ptr() != target.data_ptr():
                flat = copies.apart(flat, (target,))
        return self._submit(
            Collective(
                "reduce",
                tuple(tensor.shape),
                tensor.dtype,
                op,
                root,
                algorithm,
                ins=(flat,),
                outs=(target,),
                nbytes=nbytes_of(flat),
                copies=copies,
                result=returned,
                async_op=async_op,
                timeout_s=timeout_s,
            )
        )

    @overload
    def reduce_scatter(
        self,
        x: Parts,
        op: str = "sum",
        *,
        out: Data | None = None,
        async_op: Literal[False] = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor: ...
    @overload
    def reduce_scatter(
        self,
        x: Parts,
        op: str = "sum",
        *,
        out: Data | None = None,
        async_op: Literal[True],
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Work: ...
    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Reduce `x` of all members and return this member's part of the result.

        Args:
            x: Tensor to cut into equal parts along dim 0, or one tensor per member; the same shapes
                and dtype on all members. Unchanged, unless `out` is a part of it.
            op: Reduction; see the class.
            out: Tensor for this member's part; None for a new one.
            async_op: Whether to return a Work without waiting.
            algorithm: staged or pulled; None to choose by size.
            timeout_s: Seconds until CommTimeout.

        Returns:
            This member's part (`out`, if it was passed), or with `async_op` the Work to wait for.

        Raises:
            ConfigError: Unknown op or algorithm, dim 0 that cannot be divided, or not one tensor
                per member.
            MismatchError, PeerLostError, CommTimeout: See `braid.comm.api.group`.

        Shape:
            x: (n d0, ...), or one tensor per member. Result: (d0, ...), or the shape of x[rank].

        Cost: a + 2 l b, with l the bytes of `x`; for a and b see `all_reduce`.
        """
        widths: tuple[int, ...] | None = None
        copies = self._copies(as_tensor(x[0] if is_sequence(x) and x else x))
        if is_sequence(x):
            flat, widths = self._read_parts(copies, x, "reduce_scatter input")
            like_x, shape = x[self.rank], tuple(x[self.rank].shape)
            full: tuple[int, ...] = (flat.numel(),)
        else:
            like_x = as_tensor(x)
            flat, shape = copies.read(like_x), slice_shape(like_x, self.size, "reduce_scatter")
            full = tuple(like_x.shape)
        target = result(out, shape, like_x)
        part = copies.written(target)
        flat = copies.apart(flat, (part,))
        return self._submit(
            Collective(
                "reduce_scatter",
                full,
                flat.dtype,
                op,
                algorithm=algorithm,
                widths=widths,
                ins=(flat,),
                outs=(part,),
                part_widths=widths,
                nbytes=nbytes_of(flat),
                copies=copies,
                result=like(x, target) if out is None else out,
                async_op=async_op,
                timeout_s=timeout_s,
            )
        )

    def scan(
        self,
        x: X,
        op: str = "sum",
        *,
        exclusive: bool = False,
        out: X | None = None,
        timeout_s: float | None = None,
    ) -> X:
        """Compute the prefix reduction: the reduction of `x` of members 0 up to this one.

        Args:
            x: Tensor of the same shape on all members; unchanged.
            op: Reduction; see the class.
            exclusive: Whether to leave out this member's `x`; member 0 gets the identity (sum,
                product, bor and bxor only).
            out: Tensor for the result; None for a new one.
            timeout_s: Seconds until CommTimeout.

        Returns:
            `out`, or a new tensor like `x`.

        Raises:
            ConfigError: Unknown op, a tensor that cannot be reduced, or `exclusive` with an op that
                has no identity.
            MismatchError, PeerLostError, CommTimeout: See `braid.comm.api.group`.

        Cost: a + (n+1) l b; for a, b and l see `all_reduce`.
        """
        tensor = as_tensor(x)
        if exclusive:
            identity(op, tensor[:0] if tensor.dim() else tensor)
        copies = self._copies(tensor)
        flat = copies.read(tensor)
        target = result(out, tuple(tensor.shape), tensor)
        place = copies.written(target)
        returned = like(x, target) if out is None else out
        flat = copies.apart(flat, (place,))
        return self._submit(  # type: ignore[no-any-return]  # X, see `returned`
            Collective(
                "scan",
                tuple(tensor.shape),
                tensor.dtype,
                op,
                exclusive=exclusive,
                ins=(flat,),
                outs=(place,),
                nbytes=nbytes_of(flat),
                copies=copies,
                result=returned,
                timeout_s=timeout_s,
            )
        )

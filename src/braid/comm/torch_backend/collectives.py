"""torch's collectives, implemented by the collectives of a Group.

Each method converts torch's arguments to the Group's (`shapes`), and defines a `call` that runs the
collective, in this thread or in the background. Tensors that are not in CPU memory, or not strided,
go to one of torch's backends (`foreign`).

Methods have the names of torch 2.13; older names follow as aliases. torch's C++ (DDP, functional
collectives) finds these methods through its trampoline; Python calls them directly. torch's
docstrings apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from braid.comm.torch_backend.backward import inside_backward
from braid.comm.torch_backend.base import BaseProcessGroup, c10d
from braid.comm.torch_backend.shapes import (
    by_input,
    cut,
    divided,
    flat_outputs,
    in_shared_memory,
    premultiplied,
    reduction,
    rows,
    tensors_of,
)
from braid.comm.torch_backend.work import FinishedWork, seconds

__all__ = ["Collectives"]

_AllreduceOptions: Any = c10d.AllreduceOptions


class Collectives(BaseProcessGroup):
    """Collectives of a process group, with the signatures of torch's backends (`opts` too)."""

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce one tensor in place."""
        if type(opts) is not _AllreduceOptions:
            opts = _options(_AllreduceOptions, opts)
        if type(tensors) is not list or len(tensors) != 1:
            tensors = tensors_of(tensors)
            if len(tensors) != 1:
                return self.allreduce_coalesced(tensors, opts)
        x = tensors[0]
        if not (x.is_cpu and x.layout is torch.strided):
            return self._elsewhere(x).allreduce(tensors, opts)
        op, factor = reduction(opts.reduceOp)
        if factor is not None:
            x.detach().mul_(factor)
        timeout_s = self._deadline(opts)
        if not opts.asyncOp:  # without `_carry_out`, for the latency of small tensors
            self._group.all_reduce(x, op, timeout_s=timeout_s)
            return FinishedWork(tensors)
        if inside_backward():
            self._buckets.note(x)

        def call(group: Any, background: bool) -> Any:
            return group.all_reduce(x, op, async_op=background, timeout_s=timeout_s)

        return self._carry_out(call, tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce several tensors in place, small ones together."""
        tensors, opts = tensors_of(tensors), _options(c10d.AllreduceCoalescedOptions, opts)
        if not all(map(in_shared_memory, tensors)):
            return self._elsewhere(tensors[0]).allreduce_coalesced(tensors, opts)
        op, factor = reduction(opts.reduceOp)
        if factor is not None:
            for x in tensors:
                x.detach().mul_(factor)
        timeout_s = self._deadline(opts)

        def call(group: Any, background: bool) -> Any:
            for x in tensors:
                group.all_reduce(x, op, async_op=background, timeout_s=timeout_s)

        return self._carry_out(call, tensors, opts, several=True)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce to the root; tensors of other ranks are unchanged."""
        tensors, opts = tensors_of(tensors), _options(c10d.ReduceOptions, opts)
        x = tensors[0]
        if not in_shared_memory(x):
            return self._elsewhere(x).reduce(tensors, opts)
        op, factor = reduction(opts.reduceOp)
        timeout_s, root = self._deadline(opts), opts.rootRank
        out = x if self.rank() == root else None

        def call(group: Any, background: bool) -> Any:
            part = premultiplied(x, factor)
            return group.reduce(part, root, op, out=out, async_op=background, timeout_s=timeout_s)

        return self._carry_out(call, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Copy the root's tensor to all ranks."""
        tensors, opts = tensors_of(tensors), _options(c10d.BroadcastOptions, opts)
        x = tensors[opts.rootTensor]
        if not in_shared_memory(x):
            return self._elsewhere(x).broadcast(tensors, opts)
        timeout_s, root = self._deadline(opts), opts.rootRank

        def call(group: Any, background: bool) -> Any:
            return group.broadcast(x, root, async_op=background, timeout_s=timeout_s)

        return self._carry_out(call, tensors, opts)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather into one list of tensors per input; their sizes may differ."""
        inputs, opts = tensors_of(inputs), _options(c10d.AllgatherOptions, opts)
        if not all(map(in_shared_memory, inputs)):
            return self._elsewhere(inputs[0]).allgather(output_lists, inputs, opts)
        pairs = list(zip(inputs, _lists(output_lists), strict=True))
        return self._all_gather_pairs(pairs, flat_outputs(output_lists), opts)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather several tensors.

        The outputs are one list per rank, as torch documents, or one list per input.
        """
        inputs = tensors_of(inputs)
        return self.allgather(by_input(output_lists, inputs, self.size()), inputs, opts)

    # torch's argument names
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:  # noqa: A002
        """Gather into one tensor, concatenated or stacked."""
        return self._all_gather_singles("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather several tensors, each into one."""
        return self._all_gather_singles("all_gather_single_coalesced", outputs, inputs, opts)

    def _all_gather_singles(self, name: str, outputs: Any, inputs: Any, opts: Any) -> Any:
        outputs, inputs = tensors_of(outputs), tensors_of(inputs)
        opts = _options(c10d.AllgatherOptions, opts)
        if not all(map(in_shared_memory, inputs)):
            return _call_either(self._elsewhere(inputs[0]), name, outputs, inputs, opts)
        size = self.size()
        pairs = [
            (_flat(x, out), rows(out, x, size)) for out, x in zip(outputs, inputs, strict=True)
        ]
        return self._all_gather_pairs(pairs, outputs, opts)

    def _all_gather_pairs(
        self, pairs: Sequence[tuple[Any, Any]], outputs: list[Any], opts: Any
    ) -> Any:
        """Gather each input into its output."""
        timeout_s = self._deadline(opts)

        def call(group: Any, background: bool) -> Any:
            for x, out in pairs:
                last = group.all_gather(x, out=out, async_op=background, timeout_s=timeout_s)
            return last

        return self._carry_out(call, outputs, opts, several=len(pairs) != 1)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        """Reduce lists of tensors; each rank keeps one tensor of the result. Sizes may differ."""
        outputs, opts = tensors_of(outputs), _options(c10d.ReduceScatterOptions, opts)
        if not all(map(in_shared_memory, outputs)):
            return self._elsewhere(outputs[0]).reduce_scatter(outputs, input_lists, opts)
        op, factor = reduction(opts.reduceOp)
        pairs = [
            ([premultiplied(x, factor) for x in parts], out)
            for out, parts in zip(outputs, _lists(input_lists), strict=True)
        ]
        return self._reduce_scatter_pairs(op, pairs, outputs, opts)

    # torch's argument names
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:  # noqa: A002
        """Reduce a tensor and keep this rank's part."""
        return self._reduce_scatter_singles("reduce_scatter_single", [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce several tensors and keep this rank's parts."""
        return self._reduce_scatter_singles(
            "reduce_scatter_single_coalesced", outputs, inputs, opts
        )

    def _reduce_scatter_singles(self, name: str, outputs: Any, inputs: Any, opts: Any) -> Any:
        outputs, inputs = tensors_of(outputs), tensors_of(inputs)
        opts = _options(c10d.ReduceScatterOptions, opts)
        if not all(map(in_shared_memory, inputs)):
            return _call_either(self._elsewhere(inputs[0]), name, outputs, inputs, opts)
        op, factor = reduction(opts.reduceOp)
        size = self.size()
        pairs = [
            divided(premultiplied(x, factor), out, size)
            for out, x in zip(outputs, inputs, strict=True)
        ]
        return self._reduce_scatter_pairs(op, pairs, outputs, opts)

    def _reduce_scatter_pairs(
        self, op: str, pairs: Sequence[tuple[Any, Any]], outputs: list[Any], opts: Any
    ) -> Any:
        """Reduce each input, and keep this rank's part in its output."""
        timeout_s = self._deadline(opts)

        def call(group: Any, background: bool) -> Any:
            for x, out in pairs:
                last = group.reduce_scatter(
                    x, op, out=out, async_op=background, timeout_s=timeout_s
                )
            return last

        return self._carry_out(call, outputs, opts, several=len(pairs) != 1)

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather on the root."""
        inputs, opts = tensors_of(inputs), _options(c10d.GatherOptions, opts)
        x = inputs[0]
        if not in_shared_memory(x):
            return self._elsewhere(x).gather(output_lists, inputs, opts)
        timeout_s, root = self._deadline(opts), opts.rootRank
        out = _lists(output_lists)[0] if self.rank() == root else None

        def call(group: Any, background: bool) -> Any:
            return group.gather(x, root, out=out, async_op=background, timeout_s=timeout_s)

        return self._carry_out(call, flat_outputs(output_lists), opts)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        """Scatter the root's list."""
        outputs, opts = tensors_of(outputs), _options(c10d.ScatterOptions, opts)
        out = outputs[0]
        if not in_shared_memory(out):
            return self._elsewhere(out).scatter(outputs, input_lists, opts)
        timeout_s, root = self._deadline(opts), opts.rootRank
        parts = _lists(input_lists)[0] if self.rank() == root else None

        def call(group: Any, background: bool) -> Any:
            return group.scatter(parts, root, out=out, async_op=background, timeout_s=timeout_s)

        return self._carry_out(call, outputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Send one tensor to each rank; sizes may differ."""
        outputs, inputs = tensors_of(outputs), tensors_of(inputs)
        opts = _options(c10d.AllToAllOptions, opts)
        if not all(map(in_shared_memory, inputs)):
            return self._elsewhere(inputs[0]).alltoall(outputs, inputs, opts)
        timeout_s = self._deadline(opts)

        def call(group: Any, background: bool) -> Any:
            return group.all_to_all(inputs, out=outputs, async_op=background, timeout_s=timeout_s)

        return self._carry_out(call, outputs, opts)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,  # noqa: A002 - torch's name
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        """Send pieces of dim 0: equal ones, or with the lengths in `input_split_sizes`."""
        opts = _options(c10d.AllToAllOptions, opts)
        if not in_shared_memory(input):
            return _call_either(
                self._elsewhere(input),
                "all_to_all_single",
                output,
                input,
                output_split_sizes,
                input_split_sizes,
                opts,
            )
        timeout_s, size = self._deadline(opts), self.size()
        x, out = cut(input, input_split_sizes, size), cut(output, output_split_sizes, size)
        if isinstance(x, list) or isinstance(out, list):
            x = x if isinstance(x, list) else list(x.chunk(size))
            out = out if isinstance(out, list) else list(out.chunk(size))

        def call(group: Any, background: bool) -> Any:
            return group.all_to_all(x, out=out, async_op=background, timeout_s=timeout_s)

        return self._carry_out(call, [output], opts)

    def barrier(self, opts: Any = None) -> Any:
        """Return when every rank has called this."""
        opts = _options(c10d.BarrierOptions, opts)
        if opts.device is not None and opts.device.type != "cpu":
            return self._elsewhere(torch.empty(0, device=opts.device)).barrier(opts)
        timeout_s = self._deadline(opts)

        def call(group: Any, background: bool) -> Any:
            return group.barrier(async_op=background, timeout_s=timeout_s)

        return self._carry_out(call, [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks as `barrier` does; the error names all missing ranks."""
        del wait_all_ranks
        self._group.monitored_barrier(timeout_s=seconds(timeout) or self._timeout_s)

    _allgather_base = all_gather_single
    all_gather_into_tensor = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _options(kind: Any, opts: Any) -> Any:
    """Return options of torch; a bare ReduceOp or root is accepted, as in torch's overloads."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if opts is None:
        return made
    if isinstance(opts, int):
        made.rootRank = opts
    elif hasattr(opts, "asyncOp"):
        return opts
    else:
        made.reduceOp = opts
    return made


def _lists(lists: Any) -> list[list[torch.Tensor]]:
    """Return a list of lists of tensors; a single list becomes a list of it."""
    lists = list(lists)
    return [lists] if lists and isinstance(lists[0], torch.Tensor) else [list(x) for x in lists]


def _flat(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return an input in the shape that `rows` gives its output."""
    return x.detach().reshape(-1) if out.is_contiguous() else x.detach()


def _call_either(group: Any, name: str, *args: Any) -> Any:
    """Call torch's method by the name that this version of torch has for it."""
    older = {
        "all_gather_single": "_allgather_base",
        "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
        "reduce_scatter_single": "_reduce_scatter_base",
        "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
        "all_to_all_single": "alltoall_base",
    }
    if not name.endswith("_coalesced") and name != "all_to_all_single":
        args = (args[0][0], args[1][0], *args[2:])
    return getattr(group, name if hasattr(group, name) else older[name])(*args)

"""Megatron's DistributedDataParallel: gradients of all micro-batches in flat buffers.

Backward adds gradients to `param.main_grad`, and `finish_grad_sync` sums `main_grad` over data
parallel ranks. If `main_grad` has the parameter's dtype, `param.grad` is then the same tensor, so
that an optimizer of torch works, too: after its zero_grad, gradients of the next batch start from
zero. A parameter that gets no gradient in that batch has a gradient of zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from braid.compat.megatron.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from braid.compat.megatron.distributed.grad_bucket import BucketOptions, MegatronBucket
from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.groups import braid_group
from braid.compat.megatron.process_groups_config import ProcessGroupCollection

__all__ = ["DistributedDataParallel", "buckets_of", "shared_weight"]


class DistributedDataParallel(nn.Module):
    """Module with gradients that are averaged over data (and context) parallel ranks.

    Args:
        config: Megatron's configuration of the model.
        ddp_config: Options of gradients.
        module: Model, or part of a model.
        disable_bucketing: Whether to reduce all gradients together.
        pg_collection: Groups of the model; the groups of `parallel_state` when None.

    Attributes:
        buckets: Buckets of parameters, in the order in which they are reduced.

    Raises:
        UnsupportedError: A parameter belongs to an expert.

    Cost: an all_reduce of all gradients per batch; with `use_distributed_optimizer` a
    reduce_scatter of gradients, and an all_gather of parameters.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.config, self.ddp_config, self.module = config, ddp_config, module
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.group = braid_group(groups.dp_cp)
        params = [param for param in module.parameters() if param.requires_grad]
        if any(not getattr(param, "allreduce", True) for param in params):
            msg = (
                "parameters of experts (allreduce=False) are not supported: use the layers of "
                "braid.parallel.expert_parallel"
            )
            raise UnsupportedError(msg)
        self._mark_shared(groups)
        per_token = getattr(config, "calculate_per_token_loss", False)
        if per_token and ddp_config.average_in_collective:
            msg = (
                "Cannot average in collective when calculating per-token loss: set "
                "average_in_collective=False"
            )
            raise UsageError(msg)
        options = BucketOptions(
            1.0 if per_token else 1.0 / self.group.size,
            ddp_config.average_in_collective,
            ddp_config.use_distributed_optimizer,
        )
        size = None
        if ddp_config.overlap_grad_reduce and not disable_bucketing and groups.pp.rank() == 0:
            size = ddp_config.bucket_size or max(40_000_000, 1_000_000 * self.group.size)
        self.buckets = [
            MegatronBucket(part, self._grad_dtype(part[0]), self.group, options)
            for part in buckets_of(params, size, alone=options.sharded)
        ]
        self._is_last_microbatch = True
        self._exposed: set[nn.Parameter] = set()
        self._bucket_of: dict[nn.Parameter, MegatronBucket] = {}
        for bucket in self.buckets:
            for param in bucket.params:
                self._bucket_of[param] = bucket
                hook = _Accumulation(self)
                param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **kwargs)

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the state of the module, without a prefix for this wrapper."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state of the module."""
        return self.module.load_state_dict(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward starts no reduction."""
        self._is_last_microbatch = False
        try:
            yield
        finally:
            self._is_last_microbatch = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reduction of all gradients."""
        del unused
        self._start(self.buckets)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait until all gradients are reduced; start the reductions that were not started.

        Args:
            force_all_reduce: Whether all ranks get all gradients, also with
                `use_distributed_optimizer`.
        """
        self._start(self.buckets, force_all_reduce=bool(force_all_reduce))
        for bucket in self.buckets:
            bucket.finish()
            if bucket.options.sharded:
                continue
            for param in bucket.params:
                grad = param.__dict__["main_grad"]
                if grad.dtype == param.dtype:
                    param.grad = grad
                    self._exposed.add(param)

    def start_param_sync(
        self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Gather the parameters from the shards of all ranks, with the distributed optimizer."""
        del unused, force_sync, force_dispatch
        for bucket in self.buckets:
            bucket.gather_values()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all gradients by a factor."""
        for bucket in self.buckets:
            bucket.grads.tensor.mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Set all gradients to zero; call this before each batch."""
        self._exposed.clear()
        for bucket in self.buckets:
            bucket.grads.tensor.zero_()
            bucket.num_ready = 0
            for param in bucket.params:
                param.grad = None

    def broadcast_params(self) -> None:
        """Replace the parameters by the parameters of the first data parallel rank."""
        for param in self.module.parameters():
            self.group.broadcast(param.detach())

    def _grad_dtype(self, param: nn.Parameter) -> torch.dtype:
        wide = self.ddp_config.grad_reduce_in_fp32 and param.dtype.itemsize < 4
        return torch.float32 if wide else param.dtype

    def accumulate(self, param: nn.Parameter) -> None:
        """Add a gradient of autograd to `main_grad`; start the bucket if it is complete.

        Raises:
            UsageError: The reduction of the bucket has started, and would miss the gradient.
        """
        self._check_not_started(param)
        grad, main = param.grad, param.__dict__["main_grad"]
        assert grad is not None
        if grad is not main:  # else autograd has added to it
            if param in self._exposed:
                main.copy_(grad)  # zero_grad of an optimizer has dropped the last batch
            else:
                main.add_(grad)
            param.grad = None
        self._exposed.discard(param)
        if not (self.ddp_config.overlap_grad_reduce and self._is_last_microbatch):
            return
        self._bucket_of[param].num_ready += 1
        ready = []
        for candidate in self.buckets:  # in order, which is the same on all ranks
            if candidate.num_ready < len(candidate.params):
                break
            ready.append(candidate)
        self._start(ready)

    def _start(self, buckets: Sequence[MegatronBucket], *, force_all_reduce: bool = False) -> None:
        for bucket in buckets:
            if not bucket.started:
                self._drop_last_batch(bucket)
                if self.ddp_config.check_for_nan_in_grad:
                    self._check_finite(bucket)
            bucket.start(force_all_reduce=force_all_reduce)

    def _drop_last_batch(self, bucket: MegatronBucket) -> None:
        """Zero `main_grad` of parameters without a gradient since the zero_grad of an optimizer."""
        for param in self._exposed.intersection(bucket.params):
            main = param.__dict__["main_grad"]
            if param.grad is not main:
                main.zero_()

    def _check_not_started(self, param: nn.Parameter) -> None:
        """Raise UsageError if the bucket of a parameter is being reduced."""
        if not self._bucket_of[param].started:
            return
        names = {param: name for name, param in self.module.named_parameters()}
        msg = (
            f"a gradient of {names[param]} was computed after the reduction of its bucket had "
            "started, which would miss it: set config.no_sync_func = model.no_sync, or use "
            "model.no_sync() for all but the last micro-batch; call finish_grad_sync() before the "
            "next batch"
        )
        raise UsageError(msg)

    def _check_finite(self, bucket: MegatronBucket) -> None:
        """Raise UsageError if a gradient of this rank is not finite."""
        if bool(bucket.grads.tensor.isfinite().all()):
            return
        names = {param: name for name, param in self.module.named_parameters()}
        wrong = [
            names[param]
            for param, view in zip(bucket.params, bucket.grads.views, strict=True)
            if not bool(view.isfinite().all())
        ]
        msg = (
            f"found NaN or Inf in local grad on rank {self.group.ranks[self.group.rank]}, before "
            f"data-parallel communication, in {', '.join(wrong)}: lower the learning rate, or look "
            "for the operation with torch.autograd.detect_anomaly()"
        )
        raise UsageError(msg)

    def _mark_shared(self, groups: ProcessGroupCollection) -> None:
        """Mark a weight that the first and the last stage share, as Megatron's models do."""
        weight = shared_weight(self.module)
        if weight is not None and groups.embd is not None and groups.embd.size() > 1:
            weight.__dict__["shared_embedding"] = True
            weight.__dict__["shared"] = groups.pp.rank() > 0


class _Accumulation:
    """Hook of a parameter; holds the wrapper weakly, as a parameter never frees its hooks.

    Args:
        wrapper: Wrapper that is called.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = weakref.ref(wrapper)

    def __call__(self, param: nn.Parameter) -> None:
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper.accumulate(param)


def shared_weight(module: nn.Module) -> Any:
    """Return the weight that a part of a model shares with another stage; None without one."""
    if not getattr(module, "share_embeddings_and_output_weights", False):
        return None
    return module.shared_embedding_or_output_weight()  # type: ignore[operator]  # of the program


def buckets_of(
    params: Sequence[nn.Parameter], size: int | None, *, alone: bool
) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one bucket, from the last parameter to the first.

    Args:
        params: Parameters in the order of the model.
        size: Number of elements that fills a bucket; None for one bucket per dtype.
        alone: Whether a weight shared by stages has a separate bucket, so that both stages shard
            it in the same way.
    """

    def kind(param: nn.Parameter) -> tuple[str, int]:
        is_alone = alone and getattr(param, "shared_embedding", False)
        return f"{param.device} {param.dtype}", id(param) if is_alone else 0

    kinds = list(dict.fromkeys(map(kind, params)))
    for wanted in kinds:
        bucket: list[nn.Parameter] = []
        for param in (param for param in reversed(params) if kind(param) == wanted):
            bucket.append(param)
            if size is not None and sum(p.numel() for p in bucket) >= size:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

"""Names that programs and frameworks read from torch's DistributedDataParallel.

Lightning, Accelerate, torchrec, Composer and torch's own pipelining and checkpoints access the
wrapper: they check its class, disable its averaging, prepare its reducer. Names that have a meaning
here are supported. All others raise an AttributeError that names the alternative, so that `hasattr`
is right. `docs/works_with.md` lists which project reads which name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.data_parallel.ddp.arguments import WrapperSettings
from braid.parallel.gradients import GradientReducer, Hook, ParamTable

__all__ = ["TorchNames"]

IGNORED = "_ddp_params_and_buffers_to_ignore"
# names of torch's class without a meaning here -> the alternative
INSTEAD = {
    "_register_builtin_comm_hook": 'hook="fp16" or register_comm_hook(state, hook)',
    "_register_buffer_comm_hook": "forward_sync_buffers=False, and your own broadcasts",
    "_register_fused_optim": "step_in_backward(lambda params: torch.optim.SGD(params, lr=...))",
    "_register_delay_all_reduce_hook": "delay_all_reduce_named_params=",
    "_set_sparse_metadata": "nn.Embedding(sparse=True), which sends gradients as rows",
    "_update_process_group": "DistributedDataParallel(model.module, process_group=...)",
    "ddp_uneven_inputs_config": "join()",
    "_sync_params_and_buffers": "DistributedDataParallel(model.module), which copies rank 0's",
    "_sync_module_states": "DistributedDataParallel(model.module), which copies rank 0's",
    "_sync_buffers": "forward_sync_buffers=",
    "_ddp_init_helper": "DistributedDataParallel(model.module)",
}


class ReducerView:
    """Object for `ddp.reducer`, with the methods of torch's reducer that other libraries call.

    All methods do nothing: braid rebuilds buckets and prepares backwards without these calls. Each
        returns the value that torch's method returns if there is nothing to do.
    """

    def prepare_for_forward(self) -> None:
        """Do nothing; called before forwards."""

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor] = ()) -> None:
        """Do nothing: the parameters used by a backward are detected during it."""

    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None:
        """Do nothing: in a static graph the first averaging is at the end of backward."""

    def __getattr__(self, name: str) -> Any:
        msg = (
            f"the reducer of braid's DistributedDataParallel has no {name!r}: use "
            "model.bucket_times(), model.num_buckets and model._get_ddp_logging_data()"
        )
        raise AttributeError(msg)


class TorchNames(nn.Module):
    """Attributes and methods of torch's class that describe a wrapper.

    Attributes:
        require_forward_param_sync: Has no effect: rank 0's buffers are copied after backwards.
    """

    module: nn.Module
    process_group: Any
    find_unused_parameters: bool
    static_graph: bool
    forward_sync_buffers: bool
    require_forward_param_sync = True
    is_multi_device_module = False
    _settings: WrapperSettings
    _group: Group
    _table: ParamTable
    _reducer: GradientReducer
    _comm_hook: Hook | None

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards average; False keeps gradients local, as `no_sync` does."""
        return self._reducer.synchronizes

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, averages: bool) -> None:
        self._reducer.synchronizes = bool(averages)

    @property
    def broadcast_buffers(self) -> bool:
        """Whether rank 0's buffers are copied to all ranks; old name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @property
    def bucket_bytes_cap(self) -> int:
        """Size limit in bytes of the buckets after the first."""
        return self._settings.caps.nbytes[-1]

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of parameters and buffers that are not averaged."""
        return set(getattr(self.module, IGNORED, ()))

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return self._table.records[0].param.device

    @property
    def device_type(self) -> str:
        """Type of the device of the first parameter."""
        return self.device.type

    @property
    def reducer(self) -> ReducerView:
        """Object with the methods of torch's reducer that other libraries call; they do nothing."""
        return ReducerView()

    @property
    def num_buckets(self) -> int:
        """Number of buckets, each reduced once a step; 0 for a copy that has not been trained."""
        return len(self._reducer.buckets) if self._reducer.is_set_up else 0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module that the wrapper does not have.

        Raises:
            AttributeError: The module has none, or only torch's class supports the name.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            if name in INSTEAD:
                msg = (
                    f"braid's DistributedDataParallel has no {name!r}, which torch's has: use "
                    f"{INSTEAD[name]}"
                )
                raise AttributeError(msg) from None
            return getattr(self.module, name)

    def _set_static_graph(self) -> None:
        """Expect the same graph in every step; call it before the first backward.

        Raises:
            ConfigError: Gradients have been averaged already.
        """
        self._reducer.use_static_graph()
        self.static_graph = True

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Any:
        """Yield the parameters that are averaged, with their names if `named_params`."""
        ignored = getattr(getattr(module, "module", module), IGNORED, ())
        for name, param in getattr(module, "module", module).named_parameters():
            if name not in ignored:
                yield (name, param) if named_params else param

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return figures under torch's names; those of buckets are empty before training."""
        sizes = self._reducer.buckets.sizes_bytes if self._reducer.is_set_up else []
        params = [record.param for record in self._table]
        return {
            "world_size": self._group.size,
            "rank": self._group.rank,
            "module_name": type(self.module).__name__,
            "num_parameter_tensors": len(params),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in params),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "bucket_sizes": ", ".join(map(str, sizes)),
            "num_buckets_reduced": self.num_buckets,
            "iteration": self._reducer.num_reductions,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": True,
            "static_graph": self.static_graph,
            "can_set_static_graph": False,
            "broadcast_buffers": self.forward_sync_buffers,
            "forward_sync_buffers": self.forward_sync_buffers,
            "comm_hook": getattr(self._comm_hook, "__qualname__", ""),
            "backend_name": "braid",
        }

"""DistributedDataParallel: one replica per process, gradients averaged during backward.

Every rank holds the whole model and its share of the batch. At wrapping, rank 0's parameters and
buffers are copied to all ranks, so that replicas start equal; since they then apply equal
gradients, they stay equal, and parameters are never sent again.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020. Differences: buckets are sent when they are full, not in order; unused parameters need no
flag; sums are in the order of ranks; `no_sync` applies to the backward; buffers are made equal
after each averaging, not before the next forward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.comm.autograd.nested import tensors_in
from braid.errors import ConfigError
from braid.parallel.data_parallel.ddp.arguments import (
    WrapperSettings,
    arguments_in_common,
    caps_of,
    checked_hash_every,
    checked_hook,
    checked_names,
    first_given,
    table_of,
    trigger_of,
)
from braid.parallel.data_parallel.ddp.averaging_listener import AveragingListener, MakeOptimizer
from braid.parallel.data_parallel.ddp.copies import CopyableWrapper
from braid.parallel.data_parallel.ddp.introspection import IGNORED, TorchNames
from braid.parallel.data_parallel.ddp.join import Join, Joinable, JoinHook, syncs_in_forward
from braid.parallel.data_parallel.ddp.mixed_precision import precision_of
from braid.parallel.data_parallel.ddp.module_buffers import ModuleBuffers
from braid.parallel.data_parallel.ddp.once_warnings import OnceWarnings
from braid.parallel.data_parallel.ddp.param_snapshot import ParamSnapshot
from braid.parallel.data_parallel.finite import NonfiniteHandler, nonfinite_handler
from braid.parallel.data_parallel.hooks.catalogue import hook_of
from braid.parallel.data_parallel.replicas.data_parallel import DataParallel
from braid.parallel.gradients import GradientReducer, Hook, ParamTable
from braid.parallel.gradients.bucket_times import BucketTimes
from braid.parallel.gradients.first_batch import FirstBatch
from braid.parallel.gradients.loss_weight import checked_weight
from braid.parallel.gradients.lost_requests import reclaim_lost_requests
from braid.parallel.gradients.process_groups import group_of, shown_group_of

__all__ = ["DistributedDataParallel"]

ONE_HOOK = "a communication hook has been registered before: a model takes one"


class DistributedDataParallel(TorchNames, CopyableWrapper):
    """Module wrapper whose backward leaves the same averaged gradients on every rank.

    The arguments up to `forward_sync_buffers` have the names, order and defaults of torch's class.
    Attributes of the module are attributes of the wrapper.

    Args:
        module: Module to train; the same on every rank, except for values.
        device_ids: None, or the one device that holds the module; or several devices, each with a
            replica and a share of this rank's batch (`DataParallel`): gradients are summed over
            these devices before they are averaged over ranks.
        output_device: Device of the outputs with several devices.
        dim: Dim along which the batch is divided between devices.
        broadcast_buffers: See `forward_sync_buffers`; False also skips the copy at wrapping.
        init_sync: Whether to compare parameters and copy rank 0's values at wrapping.
        process_group: Ranks that train together, such as `braid.init()`; a process group of torch
            over the backend "braid"; by default torch's default group, if there is one.
        bucket_cap_mb: Size in MiB of the buckets in which gradients are reduced, 25 by default; the
            first bucket is at most 1 MiB.
        find_unused_parameters: Unused parameters need no flag; True silences the warning about
            them.
        check_reduction: Has no effect, as in torch.
        gradient_as_bucket_view: Has no effect: gradients are always views of buckets.
        static_graph: Whether every step uses the same parameters the same number of times; needed
            for re-entrant checkpointing of shared parameters.
        delay_all_reduce_named_params: (name, parameter) pairs with gradients that are reduced
            together, when the gradient of `param_to_hook_all_reduce` is computed.
        param_to_hook_all_reduce: Parameter that launches the reduction of the delayed parameters.
        mixed_precision: Dtypes of the forward and of sent gradients, see `MixedPrecision`.
        device_mesh: A mesh of one dim, instead of `process_group`.
        skip_all_reduce_unused_params: Has no effect: globally unused parameters are never sent.
        bucket_cap_mb_list: Caps of the first, second, ... bucket; the last applies to all others.
        batched_grad_copy: Has no effect.
        forward_sync_buffers: Whether buffers (such as running means) are set to rank 0's values
            after each averaging.
        gradient_accumulation_steps: Number of backwards whose gradients are added before they are
            averaged.
        nonfinite: Reaction to NaN and infinity in gradients: "ignore", "warn" (once), "raise",
            "skip" (leave all gradients None), or a function called with a `NonFinite` on all ranks.
            Choose "ignore" with a `torch.amp.GradScaler`, which checks gradients itself. For
            parameters on a GPU, "warn" reports one step late, so that no step waits for the GPU.
            With steps inside of backward it is not late.
        check_all: Whether to check every number for NaN and infinity, not one per gradient.
        hash_every: Compare parameters of all ranks after every n-th averaging, and raise if they
            differ. When 0, they are compared before the steps 2, 20, 200 and so on, with a
            warning.
        hook: Name of a communication hook, such as "bf16", "topk:0.01" or "powersgd:rank=2"
            (`hooks.hook_of`).

    Raises:
        ConfigError: Nothing to train, no group, or contradictory arguments.
        MismatchError: Parameters differ between ranks; the message shows which.

    Cost:
        A step sends 2 (n-1)/n l bytes per rank, l = bytes of the gradients; in shared memory each
        rank reads and writes 2 l / n, most of it while backward computes. In addition, one message
        of 24 bytes per parameter and 24 per rank.

    On failure:
        A lost rank raises PeerLostError in backward on all other ranks; gradients are then
        undefined. An exception in the backward of one rank raises CommError in the backward of the
        other ranks as soon as that rank begins its next forward; all may continue after that. An
        exception in the forward or the loss, before backward has reached the module, does not
        interrupt the other ranks. If the program catches it, the rank continues with its next
        batch, and from then on gradients of different batches are averaged; if this is detected,
        one warning reports it. End the rank, or skip the batch on all ranks.
    """

    def __init__(  # noqa: PLR0917 - torch's order
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        gradient_accumulation_steps: int = 1,
        nonfinite: str | NonfiniteHandler = "warn",
        check_all: bool = False,
        hash_every: int = 0,
        hook: str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        del check_reduction, skip_all_reduce_unused_params, batched_grad_copy
        group = group_of(process_group, device_mesh)
        table = table_of(module, frozenset(getattr(module, IGNORED, ())), group.ranks)
        self.module = module
        self.process_group = shown_group_of(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.device_ids = None if device_ids is None else list(device_ids)
        self.output_device = output_device
        self.dim = dim
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.forward_sync_buffers = first_given(forward_sync_buffers, broadcast_buffers)
        self.mixed_precision = mixed_precision
        delayed = delay_all_reduce_named_params
        self._settings = WrapperSettings(
            init_sync=init_sync,
            broadcast_buffers=broadcast_buffers is not False,
            caps=caps_of(bucket_cap_mb, bucket_cap_mb_list),
            delayed=frozenset(name for name, _ in delayed or ()),
            delayed_after=trigger_of(table, param_to_hook_all_reduce, delayed),
            gradient_accumulation_steps=gradient_accumulation_steps,
            nonfinite=nonfinite,
            check_all=check_all,
            hash_every=checked_hash_every(hash_every),
            hook=hook,
        )
        self._set_up(group, is_copy=False)

    def _set_up(self, group: Group, *, is_copy: bool) -> None:
        """Create the parts that belong to the group; a collective unless `is_copy`."""
        module, settings = self.module, self._settings
        ignored = frozenset(getattr(module, IGNORED, ()))
        self._group = group
        self._table = table = ParamTable.of(module, ignored)
        several = self.device_ids is not None and len(self.device_ids) > 1
        devices = self.device_ids, self.output_device, self.dim
        # in a tuple: a submodule would give every parameter a second name
        self._replicas = (DataParallel(module, *devices),) if several else ()
        self._snapshot = ParamSnapshot(module.parameters(), ignored)
        buffers = ModuleBuffers(group, module, ignored)
        self._has_buffers = buffers.any()
        self._listener = AveragingListener(
            joinable=weakref.ref(self),
            group=group,
            table=table,
            buffers=buffers,
            handler=nonfinite_handler(settings.nonfinite, [record.param for record in table]),
            hash_every=settings.hash_every,
            warnings=OnceWarnings(
                type(module).__name__,
                group.ranks,
                is_speaker=group.rank == 0,
                names_unused=not self.find_unused_parameters,
            ),
            first_batch=FirstBatch(module, group),
            compares_early=settings.init_sync and settings.hook is None,
        )
        self._precision = precision_of(self.mixed_precision, module)
        name = settings.hook
        wire, self._comm_hook = (None, None) if name is None else hook_of(name, group, table)
        options = settings.options(wire or self._precision.wire, static_graph=self.static_graph)
        common = arguments_in_common(
            options,
            settings.nonfinite,
            buffers=self.forward_sync_buffers,
            hash_every=settings.hash_every,
            hook=name,
        )
        if settings.init_sync and not is_copy:
            table.make_equal(group, common)
            reclaim_lost_requests(group)
            if settings.broadcast_buffers:
                buffers.broadcast()
        agree = partial(_agree, group, table, common) if is_copy else None
        self._reducer = GradientReducer(group, table, options, self._listener, agree=agree)
        if self._comm_hook is not None:
            self._reducer.use_hook((None, self._comm_hook))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module."""
        if self._join is not None and self._join.throws:  # before collectives of the forward
            Join.notify_join_context(self)
        has_backward = torch.is_grad_enabled() and self._snapshot.check_module(self.module)
        if has_backward:
            if not self._reducer.num_reductions:
                self._listener.adopt_optimizers()
            self._reducer.forward_begins()
            first = self._listener.first_batch
            if first is not None and not first.is_known:
                first.note_input(args, kwargs)
        called = self._replicas[0] if self._replicas else self.module
        outputs = self._precision.call(called, args, kwargs)
        if has_backward:
            changes = self._has_buffers and self.forward_sync_buffers and self.module.training
            followed = [x for x in tensors_in(outputs) if x.requires_grad]
            self._reducer.register_outputs(followed, buffers_used=changes)
        return outputs

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients stay local; the next backward outside averages."""
        return self._reducer.no_sync()

    def set_loss_weight(self, num_samples: float | None) -> None:
        """Set the weight of gradients of later forwards, such as the number of samples.

        The average is then sum(weight * gradient) / sum(weight) over all forwards of all ranks
        since the last average, equal to one process with a mean loss over all samples. None
        weighs every rank equally. Gradients are multiplied when they are accumulated, so with
        16-bit gradients weights should be near 1. Zero gradients after each averaging, as usual. A
        backward that reaches no output of a forward, for example because outputs hide their
        tensors, uses the weight that was set last.

        Args:
            num_samples: Number of samples or tokens, or any weight; None for equal weights.

        Raises:
            ConfigError: The weight is negative or not finite.
            MismatchError: In backward, on all ranks: only some ranks have set a weight.
        """
        weight = None if num_samples is None else checked_weight(num_samples)
        self._reducer.set_loss_weight(weight)

    def average_next(self) -> None:
        """Average gradients in the next backward, even before the last accumulation step.

        On all ranks, call it before the last backward of an epoch if its length is not a multiple
        of `gradient_accumulation_steps`. Otherwise the next forward warns that the optimizer
        stepped without an average. Gradients that are set to None restart the count.
        """
        self._reducer.average_next()

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Call `hook(state, bucket)` instead of the all-reduce of each bucket.

        Args:
            state: Passed to the hook.
            hook: Function that returns a `torch.futures.Future` of the average, a Work, or a
                generator of Works (`gradients.grad_bucket`).

        Raises:
            ConfigError: The hook cannot be called, or the model has one already.
        """
        hook = checked_hook(state, hook)
        if self._comm_hook is not None or self._settings.hook is not None:
            raise ConfigError(ONE_HOOK)
        self._reducer.use_hook((state, hook))
        self._comm_hook = hook
        self._listener.compares_early = False  # a hook may average over some ranks only

    def step_in_backward(self, optimizer: MakeOptimizer) -> dict[str, torch.optim.Optimizer]:
        """Take the optimizer's step inside of backward, bucket by bucket.

        The step of a bucket is taken when its averages are complete, while other buckets are being
        averaged; then its gradients are dropped. Steps with NaN or infinite gradients are not
        taken, and clipping by the norm of all gradients is not possible. Sparse parameters need a
        separate optimizer.

        Args:
            optimizer: Function that creates the optimizer of one parameter, such as
                `lambda params: torch.optim.AdamW(params, lr=1e-3)`.

        Returns:
            The optimizers by parameter name, for schedules and checkpoints; a parameter that is
            unfrozen later gets its optimizer at its first step.
        """
        self._listener.step_in_backward(optimizer)
        return self._listener.optimizers

    def hook_state(self) -> dict[str, Any]:
        """Return the error of compression that this rank has not sent yet, for checkpoints.

        Returns:
            `residuals` of the wire format by parameter, and the state of the `hook`, if it has any.
            Both differ between ranks.
        """
        read = getattr(self._comm_hook, "state_dict", None)
        return {
            "residuals": self._reducer.residuals(),
            "hook": {} if read is None else read(),
        }

    def load_hook_state(self, state: Mapping[str, Any]) -> None:
        """Load the state that `hook_state` returned.

        Residuals are added to this rank's next gradients, so they may be loaded by any rank, but by
        one rank only.

        Raises:
            ConfigError: The state has other keys, or belongs to another hook.
        """
        load = getattr(self._comm_hook, "load_state_dict", None)
        if set(state) != {"residuals", "hook"} or (load is None and state["hook"]):
            extra = " of a hook with a state" if state.get("hook") else ""
            msg = (
                f"the hook state has keys {sorted(state)}{extra}, which {self._comm_hook!r} cannot "
                "load: pass what hook_state() returned, and wrap with the same hook"
            )
            raise ConfigError(msg)
        names = {record.name for record in self._table}
        residuals = {
            name: residual for name, residual in state["residuals"].items() if name in names
        }
        self._reducer.add_residuals(residuals)
        if load is not None and state["hook"]:
            load(state["hook"])

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context for uneven inputs: ranks without input take part in other ranks' steps.

        The context sends no additional messages unless `throw_on_early_termination` is set.

        Args:
            divide_by_initial_world_size: Whether averages are over all ranks; otherwise over ranks
                that still have inputs.
            enable: False for inputs that are known to be even.
            throw_on_early_termination: Whether to raise on all ranks as soon as one has no more
                input; costs one small all-reduce per forward.

        Raises:
            ConfigError: The module computes batch statistics over all ranks, which a rank without
                input cannot do, and `throw_on_early_termination` is not set.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the actions of this wrapper after its rank has joined, see `Joinable`."""
        return _Shadow(self, by_all=bool(kwargs.get("divide_by_initial_world_size", True)))

    @property
    def join_device(self) -> torch.device:
        """Device on which the wrapper communicates."""
        return self._table.records[0].param.device

    @property
    def join_process_group(self) -> Group:
        """Group in which the wrapper communicates."""
        return self._group

    def bucket_times(self) -> BucketTimes:
        """Return when each bucket of the last step was full on each rank; a collective.

        Converted to text, the result is a table that shows for which rank all others wait.
        """
        return self._reducer.bucket_times()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Exclude parameters and buffers with these names from averaging; call before wrapping."""
        setattr(module, IGNORED, checked_names(params_and_buffers_to_ignore))


# frameworks, checkpoints and pipelines check isinstance with torch's class
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)


def _agree(group: Group, table: ParamTable, arguments: Mapping[str, object]) -> None:
    """Compare a copy across ranks when it averages for the first time; a collective."""
    table.compare(group, arguments)
    reclaim_lost_requests(group)


class _Shadow(JoinHook):
    """Join hook that shadows the steps of other ranks for one wrapper."""

    def __init__(self, wrapper: DistributedDataParallel, *, by_all: bool) -> None:
        self._wrapper = wrapper
        self._by_all = by_all

    def shadow(self) -> bool:
        reducer = self._wrapper._reducer  # noqa: SLF001 - its continuation
        # with loss weights, a rank without samples has weight 0
        counts = self._by_all and reducer.loss_weight is None
        return reducer.shadow_backward(1.0 if counts else 0.0)

    def main_hook(self) -> None:
        self.shadow()

    def refusal(self) -> str | None:
        return syncs_in_forward(self._wrapper.module)

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: ARG002 - active_ranks has it
        """Copy the model from a rank that took the last steps to ranks that joined earlier."""
        wrapper, group = self._wrapper, self._wrapper._group  # noqa: SLF001 - its continuation
        listener = wrapper._listener  # noqa: SLF001 - its continuation
        root = listener.active_ranks[0]
        with torch.no_grad():
            for record in wrapper._table:  # noqa: SLF001
                group.broadcast(record.param.detach(), root)
            listener.buffers.broadcast(root)
        listener.active_ranks = list(range(group.size))

"""`megatron.core.tensor_parallel.random`: random numbers, and recomputation with the same ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from braid.comm import autograd
from braid.comm.autograd import (
    all_gather_forward_split_backward,
    split_forward_all_gather_backward,
)
from braid.comm.autograd.rng_and_autocast import RngAndAutocast, generators_of
from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.tensor_parallel.rng_tracker import (
    CudaRNGStatesTracker,
    convert_cuda_rng_state,
    get_all_rng_states,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    initialize_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from braid.compat.megatron.utils import divide, tensor_group

__all__ = [
    "CheckpointWithoutOutput",
    "CudaRNGStatesTracker",
    "checkpoint",
    "convert_cuda_rng_state",
    "get_all_rng_states",
    "get_cuda_rng_tracker",
    "get_data_parallel_rng_tracker_name",
    "get_expert_parallel_rng_tracker_name",
    "initialize_rng_tracker",
    "is_checkpointing",
    "is_graph_safe_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
]

Result = TypeVar("Result")


class _Around:
    """Context for the two runs of a checkpointed function, with equal tracker states.

    Args:
        tracker: Tracker with the current states, which are saved.
    """

    depth = 0  # number of active contexts in this process

    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        self._tracker = tracker
        self._states = tracker.get_states()

    @contextlib.contextmanager
    def __call__(self, again: bool) -> Iterator[None]:
        now = self._tracker.get_states()
        if again:
            self._tracker.set_states(self._states)
        _Around.depth += 1
        try:
            yield
        finally:
            _Around.depth -= 1
            if again:
                self._tracker.set_states(now)


def is_checkpointing() -> bool:
    """Return whether a checkpointed function is running, in forward or in backward."""
    return _Around.depth > 0


def checkpoint(
    function: Callable[..., Result], distribute_saved_activations: bool, *args: Any
) -> Result:
    """Call a function, and call it again in backward with the same random numbers.

    Args:
        function: Function to call.
        distribute_saved_activations: Whether each tensor parallel rank saves only a part of the
            first argument, which is replicated; this costs two more all_gathers.
        args: Arguments.
    """
    around = _Around(get_cuda_rng_tracker())
    if not distribute_saved_activations:
        return autograd.checkpoint(function, *args, around=around)
    group, first = tensor_group(), args[0]
    divide(first.numel(), group.size)
    part = split_forward_all_gather_backward(group, first.reshape(-1))

    def gathered(part: torch.Tensor, *rest: Any) -> Result:
        whole = all_gather_forward_split_backward(group, part)
        return function(whole.view(first_shape), *rest)

    first_shape = first.shape
    del first
    return autograd.checkpoint(gathered, part, *args[1:], around=around)


class CheckpointWithoutOutput:
    """Recomputes a function in backward, and also frees its outputs until then.

    Layers after the function save its outputs for backward. After these layers have run, the memory
    of the outputs is freed. It is filled again when backward reaches the result of these layers.

        recompute = CheckpointWithoutOutput()
        y = recompute.checkpoint(norm, x)
        z = linear(y)
        recompute.discard_output_and_register_recompute(z)

    Args:
        fp8: Must be False or None.
    """

    def __init__(self, fp8: Any = False) -> None:
        if fp8:
            msg = f"fp8={fp8!r} is not supported: leave it out"
            raise UnsupportedError(msg)
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._run_again: Callable[[], Sequence[torch.Tensor]] | None = None
        self._again: Sequence[torch.Tensor] = ()

    def checkpoint(self, run_function: Callable[..., Result], *args: Any) -> Result:
        """Return the outputs of a function, a tensor or a tuple of tensors.

        Gradients of parameters are added in `backward()`, not in `torch.autograd.grad`.
        """
        around = _Around(get_cuda_rng_tracker())
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        state = RngAndAutocast(generators_of(tensors))

        def run_again(inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
            with state.again(), around(again=True), torch.enable_grad():
                return _as_tuple(run_function(*inputs))

        with around(again=False):
            outputs: Any = _WithoutOutput.apply(run_function, self, run_again, *args)  # type: ignore[no-untyped-call]
        self._outputs = _as_tuple(outputs)
        return outputs  # type: ignore[no-any-return]

    def discard_output_and_register_recompute(self, hook_tensor: torch.Tensor) -> None:
        """Free the outputs, and recompute them when the gradient of `hook_tensor` is computed.

        Args:
            hook_tensor: Result of the layers after the function.

        Raises:
            UsageError: `checkpoint` has not been called.
        """
        if not self._outputs:
            msg = (
                "discard_output_and_register_recompute was called before checkpoint: call "
                "checkpoint first"
            )
            raise UsageError(msg)
        if not hook_tensor.requires_grad:
            return
        for output in self._outputs:
            output.untyped_storage().resize_(0)
        hook_tensor.register_hook(lambda _: self._refill())  # type: ignore[no-untyped-call]

    def _refill(self) -> None:
        """Run the function again, once, and store its results in the outputs."""
        if self._run_again is None:
            return
        self._again, self._run_again = self._run_again(), None
        for output, again in zip(self._outputs, self._again, strict=True):
            # through the storage, so that autograd does not see a change of the output
            storage, source = output.untyped_storage(), _owned(again.detach(), ())
            if storage.size() == 0:
                storage.resize_(source.untyped_storage().size())
                storage.copy_(source.untyped_storage())
        self._outputs = ()


class _WithoutOutput(torch.autograd.Function):
    """Autograd function that builds the graph of a function only in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        run_function: Callable[..., Any],
        owner: CheckpointWithoutOutput,
        run_again: Callable[[Sequence[Any]], Sequence[torch.Tensor]],
        *args: Any,
    ) -> Any:
        outputs = _as_tuple(run_function(*args))
        ctx.owner = owner
        ctx.is_tensor = [isinstance(arg, torch.Tensor) for arg in args]
        ctx.others = [arg for arg in args if not isinstance(arg, torch.Tensor)]
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        needed = ctx.needs_input_grad[3:]

        def again() -> Sequence[torch.Tensor]:
            tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
            ctx.inputs = [
                next(tensors).detach().requires_grad_(needs) if is_tensor else next(others)
                for is_tensor, needs in zip(ctx.is_tensor, needed, strict=True)
            ]
            return run_again(ctx.inputs)

        owner._run_again = again  # noqa: SLF001 - this class is a part of it
        # outputs own their memory, since it is freed
        owned = tuple(_owned(output, args) for output in outputs)
        return owned[0] if len(owned) == 1 else owned

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        owner = ctx.owner
        owner._refill()  # noqa: SLF001 - as above
        pairs = [
            (output, grad)
            for output, grad in zip(owner._again, grads, strict=True)  # noqa: SLF001
            if output.requires_grad and grad is not None
        ]
        owner._again = ()  # noqa: SLF001
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        inputs, ctx.inputs = ctx.inputs, None
        input_grads = (x.grad if isinstance(x, torch.Tensor) else None for x in inputs)
        return None, None, None, *input_grads


def _as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def _owned(output: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    """Return a contiguous tensor that does not share its memory with an argument."""
    shared = any(
        isinstance(arg, torch.Tensor)
        and arg.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        for arg in args
    )
    whole = output.untyped_storage().size() == output.numel() * output.element_size()
    if output.is_contiguous() and whole and not shared:
        return output
    return output.clone(memory_format=torch.contiguous_format)

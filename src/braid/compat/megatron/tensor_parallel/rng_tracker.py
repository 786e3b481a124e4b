"""States of the random generator by name, such as one for layers divided among ranks.

Tensor parallel ranks must draw equal numbers for replicated tensors, and different numbers for
divided ones. The tracker keeps a state for each purpose, and `fork` draws from it. It uses the
GPU's generator if there is a GPU, otherwise the CPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.parallel_state import (
    get_expert_model_parallel_rank,
    get_expert_tensor_parallel_rank,
    get_tensor_model_parallel_rank,
)

__all__ = [
    "CudaRNGStatesTracker",
    "convert_cuda_rng_state",
    "get_all_rng_states",
    "get_cuda_rng_tracker",
    "get_data_parallel_rng_tracker_name",
    "get_expert_parallel_rng_tracker_name",
    "initialize_rng_tracker",
    "is_graph_safe_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
]

States = dict[str, torch.Tensor]

MODEL_PARALLEL, EXPERT_PARALLEL, DATA_PARALLEL = (
    f"{kind}-parallel-rng" for kind in ("model", "expert", "data")
)
UNNAMED = "default-rng"
MODEL_PARALLEL_OFFSET = 2718  # as in Megatron, so that the seeds of ranks are equal
EXPERT_OFFSET, EXPERT_STEP = 1024, 100


def _generator() -> torch.Generator:
    """Return the generator with the tracked states."""
    if not torch.cuda.is_available():
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[torch.cuda.current_device()]


class CudaRNGStatesTracker:
    """Keeps named states of the random generator, and draws from the one that is chosen.

    Args:
        use_cudagraphable_rng: Must be False.
        is_inference_rng_tracker: Whether `add` and `fork` do nothing.
    """

    def __init__(
        self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False
    ) -> None:
        if use_cudagraphable_rng:
            msg = "use_cudagraphable_rng=True is not supported: leave it out"
            raise UnsupportedError(msg)
        self.use_cudagraphable_rng = False
        self.is_inference_rng_tracker = is_inference_rng_tracker
        self.reset()

    def reset(self) -> None:
        """Remove all states."""
        self._is_initialized = False
        self.states_: States = {}
        self.seeds_: set[int] = set()
        self._current_state_name = UNNAMED

    def is_initialized(self) -> bool:
        """Return whether states have been set."""
        return self._is_initialized

    def get_states(self) -> States:
        """Return the states by name."""
        return dict(self.states_)

    def set_states(self, states: States) -> None:
        """Set the states by name."""
        self._is_initialized = True
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state `name`, which begins with a seed.

        Raises:
            UsageError: The name or seed exists already.
        """
        self._is_initialized = True
        if self.is_inference_rng_tracker:
            return
        problems = [f"seed {seed} already exists"] if seed in self.seeds_ else []
        problems += [f"cuda rng state {name} already exists"] if name in self.states_ else []
        if problems:
            msg = f"{'; '.join(problems)}: choose other names and seeds, or call reset() first"
            raise UsageError(msg)
        self.seeds_.add(seed)
        generator = _generator()
        now = generator.get_state()
        generator.manual_seed(seed)
        self.states_[name] = generator.get_state()
        generator.set_state(now)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """In the context, draw random numbers from the state `name`; then restore the generator.

        Raises:
            UsageError: The state does not exist.
        """
        if self.is_inference_rng_tracker:
            yield
            return
        if name not in self.states_:
            msg = (
                f"cuda rng state {name} is not added: call model_parallel_cuda_manual_seed(seed) "
                "after initialize_model_parallel, or set use_cpu_initialization=True for layers"
            )
            raise UsageError(msg)
        generator = _generator()
        now, before = generator.get_state(), self._current_state_name
        if before != UNNAMED:
            self.states_[before] = now
        generator.set_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = generator.get_state()
            generator.set_state(self.states_[before] if before != UNNAMED else now)
            self._current_state_name = before


class _TrackerHolder:
    """The tracker of this process."""

    def __init__(self) -> None:
        self.tracker: CudaRNGStatesTracker | None = None


_HOLDER = _TrackerHolder()


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Create the tracker of random generator states, unless it exists.

    Args:
        use_te_rng_tracker: Must be False: Transformer Engine is not used.
        inference_rng_tracker: Whether the tracker is for inference, where `fork` does nothing.
        use_cudagraphable_rng: Must be False: states are tensors.
        force_reset: Whether to replace an existing tracker.
    """
    if use_te_rng_tracker:
        msg = (
            "use_te_rng_tracker=True is not supported, as Transformer Engine is not used: leave "
            "it out"
        )
        raise UnsupportedError(msg)
    if _HOLDER.tracker is None or force_reset:
        _HOLDER.tracker = CudaRNGStatesTracker(use_cudagraphable_rng, inference_rng_tracker)


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> CudaRNGStatesTracker:
    """Return the tracker of random generator states; create it if it does not exist.

    See `initialize_rng_tracker` for the arguments.
    """
    initialize_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    assert _HOLDER.tracker is not None  # created above
    return _HOLDER.tracker


def get_all_rng_states() -> States:
    """Return the states of the tracker by name."""
    return get_cuda_rng_tracker().states_


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the state for experts."""
    return EXPERT_PARALLEL


def get_data_parallel_rng_tracker_name() -> str:
    """Return the name of the state that is the same on tensor parallel ranks."""
    return DATA_PARALLEL


def is_graph_safe_cuda_rng_tracker(cuda_rng_tracker: Any) -> bool:
    """Return whether the states of a tracker can be used in CUDA graphs."""
    return bool(getattr(cuda_rng_tracker, "use_cudagraphable_rng", False))


def convert_cuda_rng_state(
    state: torch.Tensor | torch.Generator, to_graphable: bool = False
) -> torch.Tensor:
    """Return the state of a generator as a tensor; `to_graphable` must be False."""
    if to_graphable:
        msg = "to_graphable=True is not supported, as states are tensors here: leave it out"
        raise UnsupportedError(msg)
    return state.get_state() if isinstance(state, torch.Generator) else state


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """Seed the default generator, and the tracker's states for sharded layers and experts.

    Args:
        seed: Seed of the default generator, the same on tensor parallel ranks.
        te_rng_tracker: Must be False.
        inference_rng_tracker: See `CudaRNGStatesTracker`.
        use_cudagraphable_rng: Must be False.
        tp_rank: Tensor parallel rank for the seed of divided layers; this rank's when None.
        ep_rank: Expert parallel rank for the seed of experts; this rank's when None.
        etp_rank: Expert tensor parallel rank for the seed of experts; this rank's when None.
        force_reset_rng: Whether to create a new tracker.
    """
    if tp_rank is None:
        tp_rank = get_tensor_model_parallel_rank()
    if ep_rank is None:
        ep_rank = get_expert_model_parallel_rank()
    if etp_rank is None:
        etp_rank = get_expert_tensor_parallel_rank() or 0
    initialize_rng_tracker(
        te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng, force_reset_rng
    )
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    _generator().manual_seed(seed)
    tracker.add(DATA_PARALLEL, seed)
    tracker.add(MODEL_PARALLEL, seed + MODEL_PARALLEL_OFFSET + tp_rank)
    tracker.add(EXPERT_PARALLEL, seed + EXPERT_OFFSET + EXPERT_STEP * ep_rank + etp_rank)

"""PowerSGD: sends each gradient matrix as two thin factors, and keeps the error for later steps.

Problem: a wire format saves at most a factor of 30, and its rounding breaks sums; a gradient of
4096 x 4096 is often close to a matrix of rank 4, which is 500 times smaller.

Idea: `comm.formats.LowRank` factors a matrix, `comm.formats.ErrorFeedback` keeps the error; this
hook does both for all matrices of a bucket together, in two messages:

    1   P = M Q of each matrix; together with all uncompressed gradients
    2   Q = M^T P of each matrix, after P's columns have been made orthonormal

State is kept by the parameter's name, so it survives a new assignment of parameters to buckets; the
reductions of a parameter are counted by name as well.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2. Torch's
`powerSGD_hook` keeps its state by bucket index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from braid.comm import StepsBy
from braid.comm.formats import ErrorFeedback, LowRank
from braid.errors import ConfigError
from braid.parallel.data_parallel.hooks.agreement import AgreedNames, agree
from braid.parallel.data_parallel.step_counts import is_whole
from braid.parallel.gradients import GradBucket
from braid.parallel.gradients.grad_bucket import Steps
from braid.types import text_digest

__all__ = ["COMPRESSED", "PowerSGDHook", "PowerSGDOptions"]

COMPRESSED = (torch.float32, torch.bfloat16, torch.float16)  # other dtypes are sent uncompressed


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSGDOptions:
    """Options of the compression.

    Attributes:
        rank: Number of columns of the factors; at most the smaller side of a matrix.
        start: Number of reductions of a parameter before it is compressed. Gradients of the first
            steps are far from low rank; a tenth of all steps is a good choice if accuracy suffers
            (the default of torch's hook is 1000).
        rate: Smallest compression at which a matrix is compressed: its size over its factors' size.
        warm_start: Whether to begin with the last step's factor Q instead of a random one.
        error_feedback: Whether to add the error to the next gradient; 4 bytes per number.
        seed: Seed of the first factor Q.

    Raises:
        ConfigError: A number is out of range.
    """

    rank: int = 1
    start: int = 0
    rate: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r}"
            for name, value, good in (
                ("rank", self.rank, is_whole(self.rank, 1)),
                ("start", self.start, is_whole(self.start, 0)),
                ("rate", self.rate, 0 < self.rate < float("inf")),
            )
            if not good
        ]
        if wrong:
            msg = (
                f"powersgd got {', '.join(wrong)}: rank must be an int of at least 1, start "
                "one of at least 0, and rate a positive number"
            )
            raise ConfigError(msg)

    def compresses(self, param: torch.Tensor) -> bool:
        """Return whether the factors of a parameter are `rate` times smaller than the parameter."""
        if param.dim() < 2 or param.dtype not in COMPRESSED or not param.numel():
            return False
        rows, columns = param.shape[0], param.numel() // param.shape[0]
        thin = (rows + columns) * min(self.rank, rows, columns)
        return thin * self.rate < rows * columns


class PowerSGDHook:
    """Hook that compresses gradients by low rank.

    Register it by `model.register_comm_hook(None, PowerSGDHook(PowerSGDOptions(rank=2)))`, with the
    same options on all ranks; the resulting gradients are equal on all ranks. A tensor of more than
    two dims is a matrix of its first dim by all others. 16-bit gradients are compressed in 32 bits.

    Args:
        options: Options of the compression.
        wire: Format in which factors cross a network. Its rounding is part of the error that is
            kept, so nothing is lost.

    Cost:
        4 rank (rows + columns) bytes per matrix instead of 4 rows columns, in two messages; 6 rank
        rows columns operations, five passes over the gradient for error feedback. Before a
        parameter's first reduction, an all_gather of 16 bytes.

    Source: see the module docstring.
    """

    def __init__(self, options: PowerSGDOptions | None = None, *, wire: str | None = None) -> None:
        self.options = options or PowerSGDOptions()
        self._wire = wire
        self._memories: dict[str, _Memory] = {}
        self._agreed = AgreedNames()

    def __call__(self, state: object, bucket: GradBucket) -> Steps:
        """Average a bucket; `state` is ignored."""
        del state
        self._agree(bucket)
        whole, matrices = [], []
        gradients = bucket.gradients()
        parts = torch.split(bucket.buffer(), [gradient.numel() for gradient in gradients])
        named = zip(bucket.names, bucket.parameters(), gradients, parts, strict=True)
        for name, param, gradient, part in named:
            memory = self._memories.setdefault(name, _Memory())
            if memory.num_steps >= self.options.start and self.options.compresses(param):
                matrices.append(self._matrix(name, memory, gradient))
            else:
                whole.append(part)
            memory.num_steps += 1
        if not matrices:
            whole = [bucket.buffer()]  # this memory is sent without a copy
        ps = [matrix.low_rank.compress(matrix.values) for matrix in matrices]
        with bucket.group.coalesce(steps_by=StepsBy.WAITER) as batch:
            for part in whole:
                batch.all_reduce(part, "avg")
            for p in ps:
                batch.all_reduce(p, "avg", wire=self._wire)
        yield batch.work
        if not matrices:
            return
        qs = [m.low_rank.project(m.values, p) for m, p in zip(matrices, ps, strict=True)]
        with bucket.group.coalesce(steps_by=StepsBy.WAITER) as batch:
            for q in qs:
                batch.all_reduce(q, "avg", wire=self._wire)
        yield batch.work
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            matrix.finish(p, q)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank by parameter name, for checkpoints.

        Returns:
            `steps` (integers), `q` (matrices) and `error` (flat tensors).
        """
        kept = {name: memory.kept() for name, memory in self._memories.items()}
        return {
            "steps": {name: memory.num_steps for name, memory in self._memories.items()},
            "q": {name: q for name, (q, _) in kept.items() if q is not None},
            "error": {name: error for name, (_, error) in kept.items() if error is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned on this rank; call it on all ranks that saved.

        New ranks continue with the steps and Q of ranks that have loaded a state.

        Raises:
            ConfigError: The state has other keys.
        """
        missing = {"steps", "q", "error"} - set(state)
        if missing:
            msg = f"the state of powersgd must have steps, q and error, got {sorted(state)}"
            raise ConfigError(msg)
        self._memories = {
            name: _Memory(num_steps, q=state["q"].get(name), error=state["error"].get(name))
            for name, num_steps in state["steps"].items()
        }
        self._agreed.clear()

    def _agree(self, bucket: GradBucket) -> None:
        """Copy counts and Q from ranks with a state to ranks without; a collective.

        It is called before a parameter's first reduction.

        Raises:
            ConfigError: Ranks have states of different steps.
        """
        names = self._agreed.fresh(bucket)
        if not names:
            return
        params = dict(zip(bucket.names, bucket.parameters(), strict=True))
        memories = [self._memories.setdefault(name, _Memory()) for name in names]
        qs = [memory.kept()[0] for memory in memories]
        counts = [memory.num_steps for memory in memories]
        counts += [0 if q is None else q.shape[1] for q in qs]
        agreed = agree("powersgd", bucket, names, counts)
        ranks_of_q = agreed.counts[len(names) :]
        for i, (memory, q, rank) in enumerate(zip(memories, qs, ranks_of_q, strict=True)):
            memory.num_steps = agreed.counts[i]
            if rank and any(agreed.is_new):
                param = params[names[i]]
                shape = max(param.shape[0], param.numel() // param.shape[0]), rank
                memory.q = param.new_empty(shape, dtype=torch.float32) if q is None else q.clone()
                memory.q = memory.q.to(param.device)
                bucket.group.broadcast(memory.q, agreed.source)

    def _matrix(self, name: str, memory: _Memory, gradient: torch.Tensor) -> _Matrix:
        options = self.options
        flat = gradient.reshape(-1).float()  # in row-major order, for any strides
        values = _wide(flat, gradient.shape)
        if memory.low_rank is None or not options.warm_start:
            step = 0 if options.warm_start else memory.num_steps
            seed = text_digest(f"{options.seed} {name} {step}")  # the same on all ranks
            generator = torch.Generator(gradient.device).manual_seed(seed)
            rows, columns = values.shape
            rank = min(options.rank, rows, columns)
            memory.low_rank = LowRank(rows, columns, rank, generator=generator)
            if memory.q is not None and options.warm_start:
                memory.low_rank.load_state_dict({"q": memory.q.to(gradient.device)})
        if options.error_feedback:
            if memory.feedback is None:
                memory.feedback = ErrorFeedback(flat.numel(), device=flat.device)
                if memory.error is not None:
                    memory.feedback.load_state_dict({"residual": memory.error})
            values = _wide(memory.feedback.correct(flat), gradient.shape)
        return _Matrix(values, gradient, memory.low_rank, memory.feedback)

    def __repr__(self) -> str:
        return f"PowerSGDHook({self.options}, wire={self._wire!r})"


@dataclass(slots=True)
class _Memory:
    """State of one parameter.

    Attributes:
        num_steps: Number of its reductions.
        q: Q of a checkpoint, until it is used.
        error: Error of a checkpoint, until it is used.
        low_rank: Factors, with the current Q.
        feedback: Error feedback, with the current error.
    """

    num_steps: int = 0
    q: torch.Tensor | None = None
    error: torch.Tensor | None = None
    low_rank: LowRank | None = None
    feedback: ErrorFeedback | None = None

    def kept(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the factor Q and the residual error; None where they do not exist."""
        q = self.q if self.low_rank is None else self.low_rank.state_dict()["q"]
        error = self.error if self.feedback is None else self.feedback.state_dict()["residual"]
        return q, error


class _Matrix(NamedTuple):
    """Gradient that is being compressed.

    Attributes:
        values: Sum of the gradient and the previous error, as a matrix in float32.
        gradient: The gradient, which receives the result.
        low_rank: Factors of the parameter.
        feedback: Error feedback of the parameter.
    """

    values: torch.Tensor
    gradient: torch.Tensor
    low_rank: LowRank
    feedback: ErrorFeedback | None

    def finish(self, p: torch.Tensor, q: torch.Tensor) -> None:
        """Write the product of the factors `p` and `q` to the gradient, and keep its error."""
        gradient = self.gradient
        plain = gradient.dtype == torch.float32 and gradient.is_contiguous()
        flat = gradient.view(-1) if plain else torch.empty(gradient.numel(), device=gradient.device)
        self.low_rank.finish(p, q, out=_wide(flat, gradient.shape))
        if not plain:
            gradient.copy_(flat.view(gradient.shape))
        if self.feedback is not None:
            self.feedback.mark_sent(gradient.reshape(-1).float())


def _wide(flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a tensor as a matrix that is not taller than wide, since P is orthogonalized."""
    matrix = flat.view(shape[0], -1)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T

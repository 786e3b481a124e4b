"""PowerSGD: each matrix of gradients travels as two thin factors; the rest is sent later.

Problem: a wire format saves at most a factor of 30 and breaks sums apart; a gradient of 4096 x 4096
is often close to a matrix of rank 4, which is 500 times smaller.

Idea: `comm.formats.LowRank` takes a matrix apart, `comm.formats.ErrorFeedback` keeps what it
missed; this hook does both for all matrices of a bucket at once, in two messages:

    1   P = M Q of each matrix; together with them, as it is, all that is not compressed
    2   Q = M^T P of each, after P's columns have been made orthonormal

Everything is kept by the parameter's name, so it survives other buckets; how often a parameter has
been reduced is counted by name as well.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2. Torch has it as
`powerSGD_hook`, with its state by number of bucket.
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

COMPRESSED = (torch.float32, torch.bfloat16, torch.float16)  # all others go whole


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSGDOptions:
    """Options of the compression.

    Attributes:
        rank: Number of columns of the factors; at most the smaller side of a matrix.
        start: Number of reductions of a parameter before it is compressed. Gradients of the first
            steps are far from low rank; a tenth of all steps is a good choice when accuracy suffers
            (torch's hook has 1000).
        rate: Ratio of sizes, matrix to factors, from which a matrix is compressed.
        warm_start: Begin with the last step's Q instead of a random one.
        error_feedback: Add what was missed to the next gradient; 4 bytes a number.
        seed: Seed of the first Q.

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
        """Return whether factors of a parameter are `rate` times smaller than the parameter."""
        if param.dim() < 2 or param.dtype not in COMPRESSED or not param.numel():
            return False
        rows, columns = param.shape[0], param.numel() // param.shape[0]
        thin = (rows + columns) * min(self.rank, rows, columns)
        return thin * self.rate < rows * columns


class PowerSGDHook:
    """Compresses gradients by low rank.

    Register it by `model.register_comm_hook(None, PowerSGDHook(PowerSGDOptions(rank=2)))`, with the
    same options on all ranks; gradients come out equal on all of them. A tensor of more than two
    dims is a matrix of its first dim by all others. Gradients of 16 bits are compressed in 32.

    Args:
        options: Options of the compression.
        wire: Format in which the factors cross a network. What it rounds is part of what was
            missed, so nothing is lost.

    Cost:
        4 rank (rows + columns) bytes a matrix instead of 4 rows columns, in two messages; 6 rank
        rows columns operations, five passes over the gradient for error feedback. Before a
        parameter's first reduction, an all_gather of 16 bytes.

    Source: see the module.
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
            whole = [bucket.buffer()]  # lies where no copies are made
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
        """Return the state of this rank for checkpoints, by parameter name.

        Returns:
            `steps` (numbers), `q` and `error` (tensors; the latter flat).
        """
        kept = {name: memory.kept() for name, memory in self._memories.items()}
        return {
            "steps": {name: memory.num_steps for name, memory in self._memories.items()},
            "q": {name: q for name, (q, _) in kept.items() if q is not None},
            "error": {name: error for name, (_, error) in kept.items() if error is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` of this rank returned, on all ranks of that time.

        Ranks that are new go on with the steps and Q of the others.

        Raises:
            ConfigError: The state is something else.
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
        """Give ranks without a state that of the others; a collective.

        Called before a parameter's first reduction.

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
        flat = gradient.reshape(-1).float()  # row by row, whatever its strides are
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
        q: Q of a checkpoint, until it is needed.
        error: Error of a checkpoint, until it is needed.
        low_rank: Factors, with the present Q.
        feedback: Error feedback, with the present error.
    """

    num_steps: int = 0
    q: torch.Tensor | None = None
    error: torch.Tensor | None = None
    low_rank: LowRank | None = None
    feedback: ErrorFeedback | None = None

    def kept(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return Q and error."""
        q = self.q if self.low_rank is None else self.low_rank.state_dict()["q"]
        error = self.error if self.feedback is None else self.feedback.state_dict()["residual"]
        return q, error


class _Matrix(NamedTuple):
    """A gradient that is being compressed.

    Attributes:
        values: The gradient and what was missed before, as a matrix in float32.
        gradient: The gradient, which receives the result.
        low_rank: Factors of the parameter.
        feedback: Error feedback of the parameter.
    """

    values: torch.Tensor
    gradient: torch.Tensor
    low_rank: LowRank
    feedback: ErrorFeedback | None

    def finish(self, p: torch.Tensor, q: torch.Tensor) -> None:
        """Write the approximation, and keep its error."""
        gradient = self.gradient
        plain = gradient.dtype == torch.float32 and gradient.is_contiguous()
        flat = gradient.view(-1) if plain else torch.empty(gradient.numel(), device=gradient.device)
        self.low_rank.finish(p, q, out=_wide(flat, gradient.shape))
        if not plain:
            gradient.copy_(flat.view(gradient.shape))
        if self.feedback is not None:
            self.feedback.mark_sent(gradient.reshape(-1).float())


def _wide(flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a tensor as a matrix with at most as many rows as columns: P is orthogonalised."""
    matrix = flat.view(shape[0], -1)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T

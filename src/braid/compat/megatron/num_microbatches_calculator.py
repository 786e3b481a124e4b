"""`megatron.core.num_microbatches_calculator`: micro-batches of a batch, constant or ramped up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from braid.compat.megatron.failure import GroupNotInitializedError, UsageError
from braid.compat.megatron.state import STATE
from braid.errors import raise_all

__all__ = [
    "ConstantNumMicroBatchesCalculator",
    "NumMicroBatchesCalculator",
    "RampupBatchsizeNumMicroBatchesCalculator",
    "destroy_num_microbatches_calculator",
    "get_current_global_batch_size",
    "get_current_running_global_batch_size",
    "get_micro_batch_size",
    "get_num_microbatches",
    "init_num_microbatches_calculator",
    "reconfigure_num_microbatches_calculator",
    "unset_num_microbatches_calculator",
    "update_num_microbatches",
]


class NumMicroBatchesCalculator(ABC):
    """Number of micro-batches of a data parallel rank, by the number of consumed samples.

    Args:
        global_batch_size: Number of samples of a batch on all ranks.
        micro_batch_size: Number of samples of a micro-batch.
        data_parallel_size: Number of data parallel ranks.
        decrease_batch_size_if_needed: Whether a batch that does not consist of whole micro-batches
            is rounded down, not refused.

    Raises:
        UsageError: A batch does not consist of at least one micro-batch per rank.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
    ) -> None:
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.decrease_batch_size_if_needed = decrease_batch_size_if_needed
        self.num_micro_batches = 0
        self.current_global_batch_size = self.current_running_global_batch_size = 0

    def get(self) -> int:
        """Return the number of micro-batches."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Return the number of samples of a batch."""
        return self.current_global_batch_size

    def get_current_running_global_batch_size(self) -> int:
        """Return the number of samples of a batch, rounded down to whole micro-batches."""
        return self.current_running_global_batch_size

    def get_micro_batch_size(self) -> int:
        """Return the number of samples of a micro-batch."""
        return self.micro_batch_size

    @abstractmethod
    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Update the numbers; see `update_num_microbatches`."""

    def _set(self, batch_size: int, *, check: bool) -> None:
        """Set the size of the current batch."""
        unit = self.micro_batch_size * self.data_parallel_size
        if check and not self.decrease_batch_size_if_needed and batch_size % unit:
            msg = (
                f"global batch size ({batch_size}) is not divisible by micro batch size "
                f"({self.micro_batch_size}) times data parallel size ({self.data_parallel_size}): "
                "choose a multiple, or pass decrease_batch_size_if_needed=True"
            )
            raise UsageError(msg)
        self.current_global_batch_size = self.current_running_global_batch_size = batch_size
        if self.decrease_batch_size_if_needed:
            self.current_running_global_batch_size = batch_size // unit * unit
        self.num_micro_batches = batch_size // unit
        if check and self.num_micro_batches < 1:
            msg = (
                f"number of microbatches should be at least 1, got {self.num_micro_batches}: "
                f"choose a global batch size of at least {unit}"
            )
            raise UsageError(msg)


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """Constant number of micro-batches.

    Args:
        global_batch_size: See `NumMicroBatchesCalculator`.
        micro_batch_size: See `NumMicroBatchesCalculator`.
        data_parallel_size: See `NumMicroBatchesCalculator`.
        decrease_batch_size_if_needed: See `NumMicroBatchesCalculator`.
        rank: No effect.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
    ) -> None:
        del rank
        super().__init__(
            global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed
        )
        self._set(global_batch_size, check=True)

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Do nothing: the number is constant."""


class RampupBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """Number of micro-batches of batches that grow in equal steps.

    Args:
        global_batch_size: Size of a batch at the end.
        micro_batch_size: See `NumMicroBatchesCalculator`.
        data_parallel_size: See `NumMicroBatchesCalculator`.
        decrease_batch_size_if_needed: See `NumMicroBatchesCalculator`.
        rank: No effect.
        start_global_batch_size: Size of the first batch.
        batch_size_increment: Difference between sizes.
        ramup_samples: Number of samples until the batch has its last size.

    Raises:
        UsageError: Sizes are not positive, or increments do not lead to the last size.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
        start_global_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
    ) -> None:
        del rank
        super().__init__(
            global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed
        )
        sizes = {
            "global batch size": global_batch_size,
            "start batch size": start_global_batch_size,
            "batch size increment": batch_size_increment,
        }
        problems = [
            f"{name} should be positive, got {size}" for name, size in sizes.items() if size <= 0
        ]
        if ramup_samples < 0:
            problems.append(f"ramp-up samples should be non-negative, got {ramup_samples}")
        difference = global_batch_size - start_global_batch_size
        if difference < 0:
            problems.append(
                "expected global batch size to be greater than or equal to start batch size, got "
                f"{global_batch_size} and {start_global_batch_size}"
            )
        elif batch_size_increment > 0 and difference % batch_size_increment:
            problems.append(
                f"expected global batch size interval ({difference}) to be divisible by global "
                f"batch size increment ({batch_size_increment})"
            )
        raise_all(problems, UsageError)
        self.start_global_batch_size = start_global_batch_size
        self.batch_size_increment, self.ramup_samples = batch_size_increment, ramup_samples
        self.update(0, consistency_check=False)

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Set the size of the batch after a number of samples; see `update_num_microbatches`."""
        del verbose
        size, increment = self.global_batch_size, self.batch_size_increment
        num_increments = (size - self.start_global_batch_size) // increment
        if num_increments and self.ramup_samples and consumed_samples <= self.ramup_samples:
            steps = int(consumed_samples / (self.ramup_samples / num_increments))
            size = self.start_global_batch_size + steps * increment
        self._set(size, check=consistency_check)


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Create the calculator of this process.

    Args:
        rank: No effect.
        rampup_batch_size: First size, increment, and number of samples until the last size; None
            for batches of constant size.
        global_batch_size: Number of samples of a batch on all ranks.
        micro_batch_size: Number of samples of a micro-batch.
        data_parallel_size: Number of data parallel ranks.
        decrease_batch_size_if_needed: Whether to round batches down to whole micro-batches.

    Raises:
        UsageError: A calculator exists, or an argument is wrong.
    """
    if STATE.microbatches is not None:
        msg = (
            "num microbatches calculator is already initialized.: call "
            "reconfigure_num_microbatches_calculator, or destroy_num_microbatches_calculator first"
        )
        raise UsageError(msg)
    reconfigure_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
    )


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Replace the calculator of this process; see `init_num_microbatches_calculator`."""
    sizes = (global_batch_size, micro_batch_size, data_parallel_size)
    if rampup_batch_size is None:
        STATE.microbatches = ConstantNumMicroBatchesCalculator(
            *sizes, decrease_batch_size_if_needed, rank
        )
        return
    if len(rampup_batch_size) != 3:
        msg = (
            "expected the following format: --rampup-batch-size <start batch size> "
            f"<batch size increment> <ramp-up samples>, got {list(rampup_batch_size)}"
        )
        raise UsageError(msg)
    STATE.microbatches = RampupBatchsizeNumMicroBatchesCalculator(
        *sizes, decrease_batch_size_if_needed, rank, *map(int, rampup_batch_size)
    )


def destroy_num_microbatches_calculator() -> None:
    """Remove the calculator of this process."""
    STATE.microbatches = None


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def get_num_microbatches() -> int:
    """Return the number of micro-batches of a batch on this rank."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Return the number of samples of a batch on all ranks."""
    return _calculator().get_current_global_batch_size()


def get_current_running_global_batch_size() -> int:
    """Return the number of samples of a batch on all ranks, rounded down to whole micro-batches."""
    return _calculator().get_current_running_global_batch_size()


def get_micro_batch_size() -> int:
    """Return the number of samples of a micro-batch."""
    return _calculator().get_micro_batch_size()


def update_num_microbatches(
    consumed_samples: int, consistency_check: bool = True, verbose: bool = False
) -> None:
    """Update the number of micro-batches.

    Args:
        consumed_samples: Number of samples that all ranks have used.
        consistency_check: Whether to raise an error if a batch has no whole micro-batches.
        verbose: No effect.
    """
    _calculator().update(consumed_samples, consistency_check, verbose)


def _calculator() -> NumMicroBatchesCalculator:
    calculator = STATE.microbatches
    if calculator is None:
        msg = (
            "num microbatches calculator is not initialized: call init_num_microbatches_calculator "
            "first"
        )
        raise GroupNotInitializedError(msg)
    assert isinstance(calculator, NumMicroBatchesCalculator)
    return calculator

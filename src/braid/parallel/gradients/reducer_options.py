"""Options, outcomes and listeners of a `GradientReducer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from braid.comm import Work
from braid.errors import ConfigError
from braid.parallel.gradients.bucket import Bucket, CheckedNumbers
from braid.parallel.gradients.bucket_layout import Caps
from braid.parallel.gradients.status import Status
from braid.parallel.gradients.table import ParamRecord

__all__ = ["AveragingOutcome", "ReducerListener", "ReducerOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerOptions:
    """Options of a `GradientReducer`.

    Attributes:
        caps: Size limits of buckets.
        wire: Format in which float32 gradients cross a network; None for no conversion.
        gradient_accumulation_steps: Number of backwards with gradients to add before they are
            averaged.
        static_graph: Whether every backward uses the same parameters the same number of times. A
            gradient may then arrive in parts.
        delayed: Names of parameters with separate buckets that are reduced late.
        delayed_after: Name of the parameter whose gradient, once ready, starts the reduction of
            these buckets; empty for the end of backward.
        finite_check: Numbers to check for NaN and infinity: `all`, or the `first` of each gradient;
            `late` checks the first without waiting for a GPU, and reports with the next averaging.

    Raises:
        ConfigError: `gradient_accumulation_steps` is less than 1.
    """

    caps: Caps = field(default_factory=Caps)
    wire: str | None = None
    gradient_accumulation_steps: int = 1
    static_graph: bool = False
    delayed: frozenset[str] = frozenset()
    delayed_after: str = ""
    finite_check: CheckedNumbers = "first"

    def __post_init__(self) -> None:
        steps = self.gradient_accumulation_steps
        if type(steps) is not int or steps < 1:
            msg = f"gradient_accumulation_steps must be an int of at least 1, got {steps!r}"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class AveragingOutcome:
    """Outcome of an averaging, equal on all ranks.

    Attributes:
        number: Number of averagings so far, including this one.
        status: Sum of the status vectors of all ranks.
        records: Parameters, in the order in which `status` lists them.
    """

    number: int
    status: Status
    records: tuple[ParamRecord, ...]

    @property
    def unused(self) -> list[str]:
        """Names of parameters that require a gradient but have none on any rank."""
        flags = zip(self.records, self.status.present, self.status.requires_grad, strict=True)
        return [record.name for record, present, required in flags if required and not present]

    @property
    def nonfinite(self) -> list[str]:
        """Names of parameters with gradients that are not finite on some rank."""
        counts = zip(self.records, self.status.nonfinite, strict=True)
        return [record.name for record, count in counts if count]


class ReducerListener:
    """Base class for objects that are notified during averaging; methods do nothing by default.

    Attributes:
        steps_in_backward: Whether `on_bucket_averaged` takes optimizer steps. Steps must not use
            gradients that are not finite, so these are detected in the same backward.
    """

    steps_in_backward = False

    def on_averaging_begins(self) -> None:
        """Called when an averaging begins, before anything is sent."""

    def on_first_launch(self, bucket: Bucket) -> None:
        """Called in the first averaging before this rank's gradients in a bucket are reduced."""

    def start_beside_status(self) -> Sequence[Work]:
        """Start messages that are sent along with the status vector; called on all ranks."""
        return ()

    def on_bucket_averaged(self, records: Sequence[ParamRecord], *, is_usable: bool) -> None:
        """Called when the averages of a bucket are complete; other buckets may be in flight.

        Args:
            records: Parameters of the bucket that have a gradient on some rank.
            is_usable: False if any gradient is not finite, or an earlier call of this method has
                raised.
        """

    def on_averaged(self, outcome: AveragingOutcome) -> None:
        """Called after each averaging, before gradients are used."""

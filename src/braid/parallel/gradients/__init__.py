"""A table of parameters and buckets of gradients, for engines that split training over ranks."""

from braid.parallel.gradients.bucket import Bucket, CheckedNumbers
from braid.parallel.gradients.bucket_layout import Caps
from braid.parallel.gradients.flat import FlatBuffer, allocator
from braid.parallel.gradients.grad_bucket import GradBucket, Hook
from braid.parallel.gradients.grad_scaler import AgreedGradScaler
from braid.parallel.gradients.gradient_hooks import GradientHooks
from braid.parallel.gradients.missing_gradients import fill_missing_gradients
from braid.parallel.gradients.reducer import GradientReducer
from braid.parallel.gradients.reducer_options import (
    AveragingOutcome,
    ReducerListener,
    ReducerOptions,
)
from braid.parallel.gradients.status import RankState, Status
from braid.parallel.gradients.table import ParamRecord, ParamTable

__all__ = [
    "AgreedGradScaler",
    "AveragingOutcome",
    "Bucket",
    "Caps",
    "CheckedNumbers",
    "FlatBuffer",
    "GradBucket",
    "GradientHooks",
    "GradientReducer",
    "Hook",
    "ParamRecord",
    "ParamTable",
    "RankState",
    "ReducerListener",
    "ReducerOptions",
    "Status",
    "allocator",
    "fill_missing_gradients",
]

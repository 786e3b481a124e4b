"""Parameters as data, and gradients in buckets, for engines that split training over ranks."""

from braid.params.bucket import Bucket, FiniteCheck
from braid.params.bucket_layout import BucketLayout, Caps, plan_buckets
from braid.params.buckets import Buckets
from braid.params.flat import FlatBuffer, allocator
from braid.params.grad_bucket import GradBucket, Hook
from braid.params.gradient_hooks import GradientHooks
from braid.params.hook_schedule import StateHook
from braid.params.missing_gradients import fill_missing_gradients
from braid.params.reducer import GradientReducer
from braid.params.reducer_options import Outcome, ReducerListener, ReducerOptions
from braid.params.reducer_policy import ReducerPolicy
from braid.params.status import RankState, Status, StatusLayout
from braid.params.table import ParamRecord, ParamTable

__all__ = [
    "Bucket",
    "BucketLayout",
    "Buckets",
    "Caps",
    "FiniteCheck",
    "FlatBuffer",
    "GradBucket",
    "GradientHooks",
    "GradientReducer",
    "Hook",
    "Outcome",
    "ParamRecord",
    "ParamTable",
    "RankState",
    "ReducerListener",
    "ReducerOptions",
    "ReducerPolicy",
    "StateHook",
    "Status",
    "StatusLayout",
    "allocator",
    "fill_missing_gradients",
    "plan_buckets",
]

"""Parameters as data, and gradients in buckets: shared by every engine that splits training over ranks."""

from braid.params.bucket_state import Bucket, BucketState, Caps, plan_buckets
from braid.params.buckets import Buckets, StateHook
from braid.params.flat import FlatBuffer, allocator
from braid.params.grad_bucket import GradBucket, Hook
from braid.params.reducer import GradientReducer
from braid.params.reducer_options import Outcome, ReducerOptions
from braid.params.status import Standing, Status, StatusLayout
from braid.params.table import ParamRecord, ParamTable

__all__ = [
    "Bucket",
    "BucketState",
    "Buckets",
    "Caps",
    "FlatBuffer",
    "GradBucket",
    "GradientReducer",
    "Hook",
    "Outcome",
    "ParamRecord",
    "ParamTable",
    "ReducerOptions",
    "Standing",
    "StateHook",
    "Status",
    "StatusLayout",
    "allocator",
    "plan_buckets",
]

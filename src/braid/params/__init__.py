"""Parameters as data, and gradients in buckets: shared by every engine that splits training over ranks."""

from braid.params.bucket_state import Bucket, BucketState, plan_buckets
from braid.params.flat import FlatBuffer
from braid.params.reducer import GradientReducer
from braid.params.table import ParamRecord, ParamTable

__all__ = [
    "Bucket",
    "BucketState",
    "FlatBuffer",
    "GradientReducer",
    "ParamRecord",
    "ParamTable",
    "plan_buckets",
]

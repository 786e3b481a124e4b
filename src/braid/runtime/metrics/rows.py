"""One row of numbers, which a rank logs for one step.

    {"step": 12, "time_s": 3.204, "unix_s": 1795392000.1, "rss_bytes": 412000256,
     "peak_rss_bytes": 415154176, "loss": 2.31, "samples": 32}

| key | meaning |
|---|---|
| `step` | number of the step, an integer; a step that is logged again adds to its row |
| `time_s` | seconds since the rank's `braid.init()` |
| `unix_s` | seconds since 1970 |
| `rss_bytes`, `peak_rss_bytes` | memory of the rank's process, now and at most |
| `cuda_bytes`, `cuda_peak_bytes` | memory that torch has allocated on the rank's GPU, if any |
| `loss`, `eval_loss`, `val_loss` | drawn in one chart |
| `samples`, `tokens` | processed by this rank in this step; the report draws their sum per second |
| any other | a number of the program; drawn in a separate chart |

Values are floats; NaN and infinities are `null`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from braid.errors import ConfigError

__all__ = ["DIGESTS", "MEASURED", "Row", "row_of"]

Row: TypeAlias = dict[str, int | float | None]

MEASURED = (
    "step",
    "time_s",
    "unix_s",
    "rss_bytes",
    "peak_rss_bytes",
    "cuda_bytes",
    "cuda_peak_bytes",
)
# logged under `braid chaos` to compare weights, and not shown
DIGESTS = (
    "weights",
    "weights_digest",
    "weights_projection",
    "weights_squares",
    "weights_order",
    "weights_training",
    "weights_epoch",
)
NAME = re.compile(r"[^\x00-\x1f\x7f]{1,80}")
MAX_VALUES = 200
EXACT = 1 << 53  # integers below it are exact as floats, to which readers convert them


def row_of(step: object, values: Mapping[str, Any], measured: Mapping[str, float]) -> Row:
    """Return a step's numbers as a row of the metrics file.

    Args:
        step: Number of the step.
        values: Numbers of the program: Python's, numpy's, or tensors of one element.
        measured: Numbers that braid adds, under names of `MEASURED`.

    Raises:
        ConfigError: The step is not an integer, or values are not numbers; the message names all.
    """
    problems = []
    number = _integer(step)
    if number is None:
        problems.append(f"step must be an integer of at least 0, got {step!r}")
    if len(values) > MAX_VALUES:
        problems.append(f"{len(values)} values exceed the limit of a row, {MAX_VALUES}: log fewer")
    row: Row = {"step": number, **measured}
    for name, value in values.items():
        if not NAME.fullmatch(name):
            problems.append(f"{name!r} is not a valid name: use 1 to 80 printable characters")
        elif name in MEASURED:
            problems.append(f"{name} is reserved for braid's own measurements: choose another name")
        else:
            try:
                row[name] = _number(value)
            except OverflowError:
                problems.append(f"{name} is beyond the largest float, 1.8e308: log its logarithm")
            except (TypeError, ValueError, RuntimeError):
                problems.append(f"{name} must be one number, got {_described(value)}")
    if problems:
        msg = f"cannot log: {'; '.join(problems)}"
        raise ConfigError(msg)
    return row


def _integer(value: object) -> int | None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        number = int(value.__index__())
    except TypeError:
        return None
    return number if 0 <= number < EXACT else None


def _number(value: Any) -> int | float | None:
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError
    item = value.item() if hasattr(value, "item") else value  # tensors and numpy's scalars
    number = item if isinstance(item, int) and abs(item) < EXACT else float(item)
    return number if math.isfinite(number) else None


def _described(value: object) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"a {type(value).__name__} of shape {tuple(shape)}: log its mean or sum"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}... ({type(value).__name__})"

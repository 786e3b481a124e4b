"""The table of reductions by dtype, shared by groups and Horovod's engine.

dtypes go by their names ("float32"), so that a coordinator that holds no tensors knows the answer
before anybody starts.
"""

from __future__ import annotations

__all__ = ["REDUCTIONS", "refusal"]

ORDERED = ("sum", "avg", "product", "min", "max")
BITWISE = ("band", "bor", "bxor")
REDUCTIONS = (*ORDERED, *BITWISE)
_DEFINED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), ORDERED),
    **dict.fromkeys(("uint8", "int8", "int16", "int32", "int64"), REDUCTIONS),
    **dict.fromkeys(("complex64", "complex128"), ("sum", "avg", "product")),
    "bool": ("sum", "product", "min", "max", *BITWISE),  # logic: sum is or, product is and
}


def refusal(op: str, dtype: str) -> str:
    """Return why the reduction `op` is not defined for numbers of `dtype`; empty if it is defined.

    >>> refusal("sum", "float32")
    ''
    >>> refusal("band", "float32")
    "reduction 'band' is not defined for float32 (sum, avg, product, min, max are): convert the tensor first"
    """  # noqa: E501, W505 - as it is printed
    possible = _DEFINED.get(dtype, ())
    if op in possible:
        return ""
    what = f"{', '.join(possible)} are" if possible else "only moving them is"
    return f"reduction {op!r} is not defined for {dtype} ({what}): convert the tensor first"

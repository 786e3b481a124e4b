"""Which numbers can be reduced how: known to the coordinator before anybody starts, so that all ranks are told. Pure.

The same as `braid.comm.tensors.reduction` accepts, without torch; a test holds one against the
other.
"""

from __future__ import annotations

__all__ = ["refusal"]

ORDERED = ("sum", "avg", "product", "min", "max")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COUNTED = ("uint8", "int8", "int16", "int32", "int64")
POSSIBLE = {
    **dict.fromkeys((*FLOATS, *COUNTED), ORDERED),
    **dict.fromkeys(("complex64", "complex128"), ("sum", "avg", "product")),
    "bool": ("sum", "product", "min", "max"),
}


def refusal(op: str, dtype: str) -> str:
    """Why numbers of this dtype cannot be reduced so; empty if they can. Reductions of others, such as Adasum, are theirs to judge.

    >>> refusal("sum", "float32")
    ''
    >>> refusal("avg", "bool")
    "reduction 'avg' is not defined for bool (sum, product, min, max are): convert the tensor first"
    """
    possible = POSSIBLE.get(dtype, ())
    if op not in ORDERED or op in possible:
        return ""
    what = f"{', '.join(possible)} are" if possible else "only moving them is"
    return f"reduction {op!r} is not defined for {dtype} ({what}): convert the tensor first"

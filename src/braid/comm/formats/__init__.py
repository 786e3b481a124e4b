"""Wire formats: compact encodings of numbers for messages between hosts.

Read `wire_format.py` (the interface), then `floats.py`, `integers.py`, `sparse.py`, `feedback.py`
(error feedback for lossy formats), `low_rank.py`, `catalogue.py`.
"""

from braid.comm.formats.catalogue import by_name
from braid.comm.formats.feedback import ErrorFeedback
from braid.comm.formats.floats import BF16, FLOAT16, FLOAT32
from braid.comm.formats.integers import Int8
from braid.comm.formats.low_rank import LowRank
from braid.comm.formats.sparse import TopKFormat
from braid.comm.formats.wire_format import WireFormat

__all__ = [
    "BF16",
    "FLOAT16",
    "FLOAT32",
    "ErrorFeedback",
    "Int8",
    "LowRank",
    "TopKFormat",
    "WireFormat",
    "by_name",
]

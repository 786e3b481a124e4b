"""Storage of one shard of a table on a server."""

from __future__ import annotations

from braid.ps.storage.admission import Admission
from braid.ps.storage.dense import DenseStorage, SumStorage
from braid.ps.storage.eviction import Eviction
from braid.ps.storage.initial_rows import Constant, GivenRows, Init, Normal, Uniform
from braid.ps.storage.keys import shard_of, to_signed, to_unsigned
from braid.ps.storage.parameters import ParameterStorage
from braid.ps.storage.resharding import join_shards, parts_in, ranges_of_shards, split_state
from braid.ps.storage.rules import FTRL, SGD, Adagrad, Adam, AdamW, RowWiseAdagrad, Rule
from braid.ps.storage.sparse import SparseStorage
from braid.ps.storage.storage import State, Storage, Tensors

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Admission",
    "Constant",
    "DenseStorage",
    "Eviction",
    "GivenRows",
    "Init",
    "Normal",
    "ParameterStorage",
    "RowWiseAdagrad",
    "Rule",
    "SparseStorage",
    "State",
    "Storage",
    "SumStorage",
    "Tensors",
    "Uniform",
    "join_shards",
    "parts_in",
    "ranges_of_shards",
    "shard_of",
    "split_state",
    "to_signed",
    "to_unsigned",
]

"""A parameter server: tables on servers, from which workers pull, and to which they push."""

from __future__ import annotations

from braid.ps.consistency import BSP, Consistency
from braid.ps.dense import DenseTable
from braid.ps.embedding import Embedding
from braid.ps.module import ParameterServer, ParamGroup
from braid.ps.node import Node
from braid.ps.rendezvous import join, join_running
from braid.ps.scheduler import Options
from braid.ps.sparse import SparseTable
from braid.ps.storage import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Admission,
    Constant,
    Eviction,
    Normal,
    RowWiseAdagrad,
    Uniform,
)

__all__ = [
    "BSP",
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Admission",
    "Consistency",
    "Constant",
    "DenseTable",
    "Embedding",
    "Eviction",
    "Node",
    "Normal",
    "Options",
    "ParamGroup",
    "ParameterServer",
    "RowWiseAdagrad",
    "SparseTable",
    "Uniform",
    "join",
    "join_running",
]

"""Training that goes on, with the same bits, when ranks die or come; see README.md."""

from __future__ import annotations

from braid.elasticity.begin import elastic, elastic_mesh
from braid.elasticity.training import ElasticTraining

__all__ = ["ElasticTraining", "elastic", "elastic_mesh"]

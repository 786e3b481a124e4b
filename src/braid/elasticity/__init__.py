"""Training that goes on, with the same bits, when ranks die or come; see README.md."""

from __future__ import annotations

from braid.elasticity.training import ElasticTraining, elastic

__all__ = ["ElasticTraining", "elastic"]

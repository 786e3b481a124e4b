"""Orders of samples by step and rank, computed and never stored; see README.md."""

from __future__ import annotations

from braid.programs.sampling.order import OrderedSampler, SampleOrder, SamplerState, share_of
from braid.programs.sampling.permutation import Permutation

__all__ = ["OrderedSampler", "Permutation", "SampleOrder", "SamplerState", "share_of"]

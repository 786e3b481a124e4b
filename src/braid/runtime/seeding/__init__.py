"""Random numbers that depend on what is computed, not on the rank that computes it."""

from __future__ import annotations

from braid.runtime.seeding.keyed import Draws, key_of
from braid.runtime.seeding.philox import random_words, uniform

__all__ = ["Draws", "key_of", "random_words", "uniform"]

"""Engines that run people's clusters: each starts braid's agents on its nodes."""

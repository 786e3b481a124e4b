"""Checks, copies and reductions of the tensors that collectives are called with."""

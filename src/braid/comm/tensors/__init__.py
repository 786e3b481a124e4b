"""Argument checks, copies and reductions of the tensors that are passed to collectives."""

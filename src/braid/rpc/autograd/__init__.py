"""Distributed autograd inside of a node: contexts, their graph, and local backwards."""

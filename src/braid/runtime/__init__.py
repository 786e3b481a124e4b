"""Processes, bytes and time: the layer below all other packages."""

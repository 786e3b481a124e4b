"""Processes, bytes and time: what every other package runs on."""

"""Starts and observes the process of one rank on this host."""

"""The algorithms of collectives and messages, as generators of waits."""

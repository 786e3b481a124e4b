"""Algorithms of collectives and messages, as generators that yield waits."""

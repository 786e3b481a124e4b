"""train: a GPT that learns from bytes, on one rank or many; see README.md.

Import names from their modules: `config` works without torch, `command` starts ranks, `worker` is
the program of a rank.
"""

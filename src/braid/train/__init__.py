"""train: a GPT that learns from bytes, on one rank or many; see README.md.

Import names from their modules: `config` needs no torch, `command` starts ranks, `worker` is a
rank.
"""

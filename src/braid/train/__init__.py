"""train: a GPT that learns from bytes, on one rank or many; see README.md.

Names are found in their modules: `config` needs no torch, `command` starts ranks, `worker` is one.
"""

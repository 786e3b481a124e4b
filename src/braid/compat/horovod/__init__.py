"""Horovod's face: `import braid.compat.horovod.torch as hvd`, and `run` to start a function on several ranks; see README.md."""

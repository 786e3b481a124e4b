"""Families of subcommands of `braid`; see ../README.md."""

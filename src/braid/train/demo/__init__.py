"""demo: one command that trains on this machine and checks the results; see README.md."""

"""Several hosts: agents on each, how they are found, and the ranks that they start."""

"""Several hosts: their rendezvous, the agents on them, and the ranks that the agents start."""

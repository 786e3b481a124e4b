"""demo: one command that shows, and proves, what braid does on this machine; see README.md."""

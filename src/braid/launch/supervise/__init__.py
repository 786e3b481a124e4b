"""One run: its ranks, its supervisor, its hang reports and its end."""

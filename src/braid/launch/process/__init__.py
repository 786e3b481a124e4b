"""One process on this host, and what the launcher can observe of it."""

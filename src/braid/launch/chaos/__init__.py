"""Strikes a run with faults by a seeded plan, and accounts for what came of it."""

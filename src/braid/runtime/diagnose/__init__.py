"""Determines which rank made a run fail or hang, and explains the failure as text."""

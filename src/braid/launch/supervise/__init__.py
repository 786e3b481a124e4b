"""Supervises one run: its ranks, hang reports and end."""

"""Engines that split training over ranks."""

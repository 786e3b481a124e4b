"""The ways of splitting a training over ranks."""

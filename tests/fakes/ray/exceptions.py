"""Ray's exceptions."""


class RayError(Exception):
    """Any of them."""


class ActorDiedError(RayError):
    """An actor's process is gone."""

"""The faces of other libraries, for code that was left behind: their names and behaviour, on braid's engines."""

"""The faces of other libraries, for code that was left behind, on braid's engines."""

"""The decisions of key-value programs, without input and output."""

"""Generators of the reference pages: each function returns Markdown that is derived from the code."""

"""Chunks of published collections: formats, files, and what engines read of them."""

"""Chunk KV of a published collection, delivered by a service over plain HTTP (delivery/, serve/kdn.py)."""

"""Chunk KV of a published collection, delivered by a service over plain HTTP (kdn/, serve/delivery.py)."""

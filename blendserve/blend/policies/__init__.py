"""Which tokens of the reused chunks are recomputed. A policy is a class and its line in blendserve/registry.py."""

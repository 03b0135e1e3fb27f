"""Which tokens of the reused chunks are recomputed: one file a policy, found by its line in blendserve/registry.py."""

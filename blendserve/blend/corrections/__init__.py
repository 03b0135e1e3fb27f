"""What is done for the reused tokens that are not recomputed: one file a correction, found by its line in registry.py."""

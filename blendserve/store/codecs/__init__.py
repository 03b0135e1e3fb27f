"""How a chunk's KV becomes bytes: one contract (base.py), one file a codec, found by the name that a record carries."""

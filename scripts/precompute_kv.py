"""Precompute the KV of an index's chunks, on one machine or on a share of several: `blendserve precompute` as a script.

    python scripts/precompute_kv.py indexes/demo
    python scripts/precompute_kv.py indexes/demo --shard 0/2 --store kv-0

Resumable after any kill; exits with 1 when a chunk is missing at the end.
"""

import sys

from blendserve.cli import main

if __name__ == "__main__":
    sys.exit(main(["precompute", *sys.argv[1:]]))

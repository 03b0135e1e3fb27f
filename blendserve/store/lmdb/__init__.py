"""The KV store in an LMDB file: store.py, over snapshot.py (reading), ledger.py (counts) and environment.py (files)."""

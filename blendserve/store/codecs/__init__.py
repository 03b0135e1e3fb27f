"""Codecs of chunk KV: one contract (base.py), one file or package for each codec."""

"""Compiled kernels for CPUs that multiply bf16.

*.cpp -> build.py (compiled once, kept in the user's cache) -> library.py (loaded) -> one file an operation
"""

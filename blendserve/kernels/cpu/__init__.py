"""Compiled kernels for CPUs.

*.cpp, kernels.h -> build.py (compiled once, kept in the user's cache) -> library.py (loaded, typed) -> bindings.py
"""

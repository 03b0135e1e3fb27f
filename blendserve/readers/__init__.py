"""Readers of files: each kind of file -> texts. registry.py names the reader of each suffix.

Readers of text run in this process. Those that need a library run in a child (child.py), whose time and memory are
bounded, as files come from anywhere.
"""

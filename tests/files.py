"""Moved to tests/support/files.py; this goes when all tests import from there."""

from tests.support.files import copied_model, own_cache

__all__ = ["copied_model", "own_cache"]

"""Moved to tests/support/forked.py; this goes when all tests import from there."""

from tests.support.forked import process, run

__all__ = ["process", "run"]

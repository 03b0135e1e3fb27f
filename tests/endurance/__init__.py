"""Runs that last longer than a test, each `python -m tests.endurance.NAME`, and a short test of each."""
